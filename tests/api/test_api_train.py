"""`roll.train` and its siblings, as a notebook calls them."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
from pathlib import Path

import pytest

import roll
from roll.api.python_arguments import as_file, as_path
from roll.api.run import assignments
from roll.cli.__main__ import main
from roll.configs.errors import ConfigError
from roll.envs.base import Env, Observation, StepResult
from roll.utils.importing import load_object

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
SETTINGS = {
    "pipeline": "rlvr",
    "executor": "inline",
    "track_with": "stdout",
    "rollout_batch_size": 2,
    "num_return_sequences_in_group": 2,
    "prompt_length": 32,
    "response_length": 4,
    "actor_train": {"training_args": {"per_device_train_batch_size": 4, "learning_rate": 1e-3}},
}


class Echo(Env):
    """One turn."""

    actions = ("a", "b")
    instructions = "Say a."

    def __init__(self, *, word: str = "a") -> None:
        self._word = word

    def reset(self, seed, options):
        return Observation.of("say")

    def step(self, action):
        return StepResult(reward=float(action == self._word), terminated=True)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_and_rows_are_trained_on_and_the_run_resumes(here, tiny_model, monkeypatch):
    bonus = 0.5

    def short(response: str, task, scale: float = 1.0) -> float:
        return scale / (1 + len(response)) + bonus + 0 * int(task.payload["ground_truth"])

    settings = {**SETTINGS, "pretrain": tiny_model}
    result = roll.train(settings, reward=short, data=ROWS, max_steps=1, save_steps=1)
    assert [row["step"] for row in result.metrics] == [1]
    assert result.model_path == Path("output/hf_model")
    assert result.summary["steps"] == 1
    rows = result.rollouts(1)
    assert len(rows) == 4
    assert all(0.5 < row["reward"] <= 1.5 for row in rows)
    with pytest.raises(ValueError, match="no rollouts of step 9"):
        result.rollouts(9)
    # From elsewhere, and inside a running loop, as in a notebook; the function is the one that was kept.
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")

    async def cell():
        return roll.resume(here / "output", max_steps=2)

    asyncio.run(cell())
    monkeypatch.chdir(here)
    again = roll.load_run("output")
    steps, rewards = again.curve("reward/mean")
    assert steps == [1, 2]
    assert all(0.5 < reward <= 1.5 for reward in rewards)
    assert [path.name for path in again.checkpoints] == ["checkpoint-1", "checkpoint-2"]
    assert main(["export", "output", "--step", "1", "-o", "first"]) == 0
    assert json.loads((here / "first" / "roll_export.json").read_text())["step"] == 1
    assert (here / "first" / "model.safetensors").stat().st_size > 0
    assert main(["export", "output", "--step", "3"]) == 2
    assert main(["export", "output", "-o", "first"]) == 2


def test_check_writes_nothing_and_takes_a_class(here, tiny_model, checks_start_no_process):
    settings = {
        "pipeline": "agentic", "executor": "inline", "pretrain": tiny_model, "sequence_length": 64,
        "prompt_length": 32, "response_length": 4, "rollout_batch_size": 4,
        "train_env_manager": {"num_env_groups": 2, "group_size": 2},
    }  # fmt: skip
    config = roll.check(settings, env=Echo, custom_envs={"own": {"max_steps": 1}}, max_steps=3)
    assert config.max_steps == 3
    assert "2 groups x 2 episodes" in config.batch.explain()
    with pytest.raises(ValueError, match="has no such argument; it has word"):
        roll.check(settings, env=Echo, custom_envs={"own": {"env_config": {"lenght": "b"}}})
    assert list(here.iterdir()) == []


def test_all_that_is_wrong_is_said_without_the_name_of_a_file_that_is_gone(here):
    with pytest.raises(ConfigError) as error:
        roll.check({**SETTINGS, "sead": 1, "rollout_batch_size": 0}, reward=len, data=ROWS)
    # The model of two roles is missing as well.
    assert str(error.value).startswith("4 problems in the given configuration")


def test_a_function_that_cannot_be_called_is_refused_with_all_else_and_without_a_place_that_is_gone(here):
    def no_task(response):
        return 1.0

    with pytest.raises(ConfigError) as error:
        roll.check({**SETTINGS, "sead": 1}, reward=no_task, data=ROWS, max_step=2)
    said = str(error.value)
    assert "no_task(response)" in said
    assert "it takes too few arguments" in said
    assert "at: the arguments of the call" in said
    assert "roll-" not in said.replace("given/", "")
    with pytest.raises(ConfigError, match="1 problem in the given configuration"):
        roll.check({})


def test_the_column_of_prompts_is_guessed_only_where_the_settings_name_none(here, tiny_model, checks_start_no_process):
    def long(response, task):
        return float(len(response))

    rows = [{"prompt": "left out", "text": f"{i}+1="} for i in range(8)]
    settings = {**SETTINGS, "pretrain": tiny_model}
    assert roll.check(settings, reward=long, data=rows).actor_train.data_args.prompt == "prompt"
    named = {**SETTINGS["actor_train"], "data_args": {"prompt": "text"}}
    config = roll.check({**settings, "actor_train": named}, reward=long, data=rows)
    assert config.actor_train.data_args.prompt == "text"


def test_a_function_that_needs_columns_which_the_given_rows_lack_is_refused(here, tiny_model, checks_start_no_process):
    def graded(completions, rubric, **kwargs):
        return [1.0 for _ in completions]

    settings = {**SETTINGS, "pretrain": tiny_model}
    with pytest.raises(ConfigError, match="rubric: no row has such a column, and it has no default"):
        roll.check(settings, reward=graded, data=ROWS)
    assert roll.check(settings, reward=graded, data=[{**row, "rubric": "short"} for row in ROWS])
    with pytest.raises(ConfigError, match="rubric: no row has such a column"):
        roll.check(settings, reward=functools.partial(graded, weight=2), data=ROWS)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"reward": 3}, "reward: got 3, expected a function"),
        ({"data": []}, "data: there are no rows"),
        ({"data": [3]}, r"data\[0\]: got int, expected a dictionary"),
        ({"data": ROWS, "seed": object()}, "expected what YAML can say"),
        ({"data": ROWS, "rewards": {"a": {}, "b": {}}, "reward": len}, "several domains, a, b; give a dictionary"),
    ],
)
def test_what_cannot_be_used_is_refused(call, expected, here):
    with pytest.raises(ValueError, match=expected):
        roll.check(SETTINGS, **call)


def test_what_cannot_be_carried_is_refused(here):
    held = (here / "x").open("w")

    def writes(response, task):
        held.write(response)
        return 0.0

    with held, pytest.raises(ValueError, match="reward: .*writes' can't be carried to another process"):
        as_path(writes, here, key="reward")


def test_a_function_travels_as_a_file_that_is_named_by_its_contents(here):
    factor = 3

    def triple(response, task):
        return factor * len(response)

    path = as_path(triple, here, key="reward")
    assert as_path(triple, here, key="reward") == path
    assert load_object(path)("ab", None) == 6
    assert len(list((here / "given").iterdir())) == 2
    assert as_path("pkg.module:f", here, key="reward") == "pkg.module:f"
    pickle.loads(pickle.dumps(path))


def test_rows_become_a_file(here):
    file = Path(as_file([{"prompt": "a", "n": 1}, "b"], here, key="data"))
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"prompt": "a", "n": 1}, {"prompt": "b"}]
    assert as_file("rows.jsonl", here, key="data") == "rows.jsonl"


def test_values_are_written_as_hydra_reads_them():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values = {"a": 'it\'s ${x} \\ "y"', "b": [1, 2.5, None, True], "c": {"d": {"e": "f: g"}}, "h": Path("p q")}
    parser = OverridesParser.create()
    parsed = {item.key_or_group: item.value() for item in map(parser.parse_override, assignments(values))}
    assert parsed["b"] == [1, 2.5, None, True]
    assert parsed["c"] == {"d": {"e": "f: g"}}
    assert str(parsed["h"]) == "p q"
    assert "it's" in str(parsed["a"])
