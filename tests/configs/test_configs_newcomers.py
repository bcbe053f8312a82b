"""What newcomers write: overrides in their own words, algorithms for pipelines, slots that no core is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.api.python_arguments import rows_in_words
from roll.cli.__main__ import main
from roll.configs.checks.machine_checks import Machine, machine_warnings
from roll.configs.errors import ConfigError
from roll.configs.parsing.key_hints import RECIPES, pipeline_hint
from roll.configs.parsing.loader import load_config, read_tree
from roll.pipelines.rollouts.eval_table import ValidationProgress


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("ppo", "pipeline: rlvr or agentic, adv_estimator: gae, and a critic; examples/recipes/ppo_cpu.yaml"),
        ("grpo", "pipeline: rlvr or agentic, adv_estimator: grpo"),
        ("GRPO", "adv_estimator: grpo"),
        ("dapo", "examples/recipes/dapo_cpu.yaml"),
        ("kto", "pipeline: dpo, loss_type: kto"),
        ("reward-model", "pipeline: reward_model"),
        ("finetune", "pipeline: sft"),
        ("rlvrr", "did you mean 'rlvr'?"),
    ],
)
def test_an_algorithm_for_a_pipeline_is_answered_with_its_keys(word, says):
    assert says in pipeline_hint(word)


def test_every_recipe_is_known():
    files = (Path(__file__).parents[2] / "examples/recipes").glob("*_cpu.yaml")
    assert sorted(file.stem.removesuffix("_cpu") for file in files) == sorted(RECIPES)


def test_an_override_is_a_text_where_it_can_be_nothing_else(job):
    name = "runs, (8) of 'mine'"
    config = load_config(job, "job", [f"exp_name={name}", "actor_train.device_mapping=list(range(0,1))"])
    assert config.exp_name == name and config.actor_train.slots == (0,)
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", ["actor_train.device_mapping=[0,1"])
    assert "this isn't key=value with a value as YAML has it" in str(caught.value)
    assert "Hydra" not in str(caught.value)


def test_a_command_that_is_not_there_is_answered_with_the_nearest(capsys):
    for words, near in ((["tarin", "x"], "did you mean 'train'?"), (["data", "checks", "x"], "did you mean 'check'?")):
        with pytest.raises(SystemExit):
            main(words)
        assert near in capsys.readouterr().err


def test_more_slots_than_cores_are_a_warning_on_a_cpu_alone():
    tree = {"pipeline": "sft", "max_steps": 1, "sequence_length": 8, "pretrain": "m", "num_gpus_per_node": 8}
    tree["actor_train"] = {"data_args": {"file_name": "a.jsonl"}, "device_mapping": "0-7"}
    config = read_tree(tree).config
    (warning,) = machine_warnings(config, Machine(cores=2))
    assert "8 slots are used" in warning and "share 2 cores" in warning
    assert list(machine_warnings(config, Machine(cores=8))) == []
    assert list(machine_warnings(config, Machine(("H100",) * 8, cores=2))) == []


def test_the_rest_of_a_validation_is_estimated_from_its_last_tasks(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("roll.pipelines.rollouts.eval_table.time.monotonic", lambda: clock[0])
    config = read_tree({"pipeline": "rlvr", "max_steps": 1, "actor_train": {"data_args": {"file_name": "a"}},
                        "rewards": {"a": {"name": "none"}}}).config  # fmt: skip
    progress = ValidationProgress(config, None, 100)
    said = []
    logger = "roll.pipelines.rollouts.eval_table.logger"
    monkeypatch.setattr(f"{logger}.info", lambda text, *args: said.append(text % args))
    clock[0] = 10.0
    progress.add(None)  # one of 100 after ten seconds, since all began together: no "990 s to go"
    assert said == ["validation: 1 of 100 tasks"]
    for _ in range(49):
        clock[0] += 0.25
        progress.add(None)
    # Ten seconds later 41 have ended, four a second: 59 are left, 59 / 4 = 14.75 s.
    assert said[1] == "validation: 41 of 100 tasks, about 15 s to go"


def test_rows_of_python_are_named_as_they_were_given():
    said = "/tmp/roll-x/given/data-01c3c65d200e.jsonl:2: the prompt is None; task 'validation_data-01c3c65d200e:1'"
    assert rows_in_words(said) == "data[1]: the prompt is None; task 'validation_data[0]'"
    assert rows_in_words("data-set.jsonl:2") == "data-set.jsonl:2"
