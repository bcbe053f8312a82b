"""Composition, overrides, interpolation, variables."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import yaml

from roll.configs.errors import ConfigError
from roll.configs.parsing.build_config import build
from roll.configs.parsing.loader import load_config, to_yaml
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.strategy_config import Fsdp2Config, HfInferConfig


def test_values_of_the_file_arrive_typed(job):
    config = load_config(job, "job.yaml")
    assert config.rollout_batch_size == 4
    assert config.rewards["math"].tag_included == ("algebra",)
    assert config.actor_train.data_args.file_name == ("train.jsonl",)
    assert config.actor_infer.strategy_args.strategy_config == HfInferConfig()
    assert config.actor_train.strategy_args.strategy_config == Fsdp2Config()


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001", "+1e-06"])
def test_numbers_in_scientific_notation_are_numbers_in_file_and_override(job, text):
    assert load_config(job, "job", [f"actor_train.training_args.learning_rate={text.lstrip('+')}"]).actor_train
    (job / "lr.yaml").write_text(
        f"defaults: [job, _self_]\nactor_train: {{training_args: {{learning_rate: {text}}}}}\n"
    )
    assert load_config(job, "lr").actor_train.training_args.learning_rate == pytest.approx(1e-6)


def test_an_override_sets_a_key_that_the_file_does_not_name(job):
    config = load_config(job, "job", ["seed=7", "critic.training_args.learning_rate=2", "adv_estimator=gae",
                                      "critic.training_args.per_device_train_batch_size=2"])  # fmt: skip
    assert config.seed == 7
    assert config.critic is not None
    assert config.critic.training_args.learning_rate == 2.0


def test_plus_tilde_and_null_overrides_work(job):
    config = load_config(job, "job", ["+seed=7", "~validation", "save_steps=null"])
    assert (config.seed, config.validation, config.save_steps) == (7, None, None)


def test_later_files_and_overrides_win(job):
    (job / "more.yaml").write_text("defaults: [job, _self_]\nseed: 5\nrollout_batch_size: 8\n")
    config = load_config(job, "more", ["seed=6"])
    assert (config.seed, config.rollout_batch_size, config.max_steps) == (6, 8, 2)


def test_a_preset_is_used_through_its_name(job):
    presets = job / "configs"
    presets.mkdir()
    (presets / "sharded.yaml").write_text("sharded: {reduce_dtype: bf16}\n")
    (presets / "unused.yaml").write_text("unused: {reduce_dtype: fp16}\n")
    folder = job / "jobs" / "mine"
    folder.mkdir(parents=True)
    tree = yaml.safe_load((job / "job.yaml").read_text())
    tree["defaults"] = ["../../configs/sharded@_here_", "../../configs/unused@_here_", "_self_"]
    tree["actor_train"]["strategy_args"] = {"strategy_name": "fsdp2_train", "strategy_config": "${sharded}"}
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(folder, "mine")
    assert config.actor_train.strategy_args.strategy_config == Fsdp2Config(reduce_dtype="bf16")


def test_a_variable_of_ones_own_is_allowed_only_where_something_refers_to_it(job):
    assert load_config(job, "job", ["mine=9", "seed=${mine}"]).seed == 9
    with pytest.raises(ConfigError, match="mine: got 9"):
        load_config(job, "job", ["mine=9"])


def test_a_variable_without_a_value_is_asked_for_once(job):
    text = "defaults: [job, _self_]\nwhere: ???\noutput_dir: ${where}\nlogging_dir: ${where}/l\n"
    (job / "ask.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(job, "ask")
    assert [violation.path for violation in caught.value.violations] == ["where"]
    assert load_config(job, "ask", ["where=here"]).logging_dir == "here/l"


def test_a_reference_to_itself_is_an_error_not_a_recursion(job):
    with pytest.raises(ConfigError, match="exp_name"):
        load_config(job, "job", ["exp_name=${exp_name}"])


def test_what_is_printed_loads_to_the_same_configuration(job):
    config = load_config(job, "job", ["train_infer_correction={ratio_high: 2}", "actor_infer.device_mapping='0'"])
    again, violations = build(RLVRConfig, yaml.safe_load(to_yaml(config)))
    assert not violations
    assert again == config


def test_configuration_and_error_survive_pickling(job):
    config = load_config(job, "job")
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", ["sead=1"])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_two_loads_in_one_process_do_not_disturb_each_other(job):
    first = load_config(job, "job", ["seed=1"])
    assert load_config(job, "job").seed == 42
    assert first.seed == 1


def test_a_key_with_the_name_of_one_of_hydras_own_files_is_unknown(job):
    """In a process of its own: these tests leave Hydra's files out."""
    (job / "more.yaml").write_text("defaults: [job, _self_]\nbasic: 1\ndefault: {x: 1}\n")
    code = "import sys; from roll.configs.parsing.loader import load_config; load_config(sys.argv[1], 'more')"
    shown = subprocess.run([sys.executable, "-c", code, str(job)], capture_output=True, text=True)
    assert shown.returncode == 1
    assert "basic: " in shown.stderr
    assert "default: " in shown.stderr
