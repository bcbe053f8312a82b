"""What `replay_from` names is looked at before anything is loaded: steps, schedule, and folders that must stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.schema.replay_source import ReplaySource, parse_replay_from
from roll.tracking.replay_check import recording_of, replay_violations
from roll.tracking.rollouts import write_rollouts

YAML = """
pipeline: rlvr
pretrain: model
max_steps: 8
rewards: {sums: {name: exact}}
actor_train: {data_args: {file_name: rows.jsonl}}
validation: {data_args: {file_name: rows.jsonl}}
reward_model: {model_args: {model_name_or_path: model}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of eight steps, of which 1 to 5 and 7 are recorded."""
    for step in (1, 2, 3, 4, 5, 7):
        write_rollouts(tmp_path / "run" / "rollouts", step, [{"row_id": "t#0"}])
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "run.json").write_text(json.dumps({"total_steps": 8, "rollouts": "../rollouts"}))
    (tmp_path / "job.yaml").write_text(YAML)
    return tmp_path


def config_of(folder: Path, steps: str = "", *keys: str):
    return load_config(folder, "job", [f"replay_from={folder}/run{steps}", f"output_dir={folder}/mine", *keys])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("output/run", ReplaySource(run="output/run")),
        ("output/run:7", ReplaySource(run="output/run", first=7, last=7)),
        ("a:b:2-15", ReplaySource(run="a:b", first=2, last=15)),
        ("run:latest", ReplaySource(run="run:latest")),
        ("run:2-", ReplaySource(run="run:2-")),
    ],
)
def test_a_run_and_its_steps_are_read(text, found):
    assert parse_replay_from(text) == found


@pytest.mark.parametrize(
    ("text", "words"), [("run:0", "from 1"), ("run:5-2", "run backwards"), (" ", "names no run"), ("", "names no run")]
)
def test_steps_that_there_cannot_be_are_refused(text, words, folder):
    with pytest.raises(ValueError, match=words):
        parse_replay_from(text)
    with pytest.raises(ConfigError, match=f"replay_from: .* expected a run's folder.*{words}"):
        load_config(folder, "job", [f"replay_from='{text}'"])


def test_chosen_steps_are_replayed_on_the_schedule_of_the_run(folder):
    found = recording_of(config_of(folder, ":2-4"))
    assert (found.steps, found.schedule, list(found.left)) == (range(2, 5), 8, [])
    # max_steps says how long the run is, as it did there; without it the run's own record does.
    assert recording_of(config_of(folder, "", "max_steps=4")).steps == range(1, 5)
    assert recording_of(config_of(folder, "", "max_steps=4")).left == range(5, 8)
    assert recording_of(config_of(folder, ":3", "max_steps=20")).schedule == 20
    assert recording_of(config_of(folder, ":3", "max_steps=0", "num_train_epochs=1")).schedule == 8
    assert recording_of(config_of(folder, ":3", "max_steps=20", "num_train_epochs=1")).schedule == 8


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("", r"has no rollouts of step 6, but of 1-5, 7; replay_from=.*run:7 replays from there"),
        (":6", r"has no rollouts of step 6, but of 1-5, 7$"),
        (":9", "step 9 is beyond the run's last one, 8: raise max_steps"),
        ("-gone", "there is no folder"),
    ],
)
def test_steps_that_are_not_recorded_are_refused(folder, steps, words):
    with pytest.raises(ValueError, match=words):
        recording_of(config_of(folder, steps))
    (violation,) = replay_violations(config_of(folder, steps))
    assert violation.path == "replay_from"


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("output_dir", "run"),
        ("rollout_dump_dir", "run/rollouts"),
        ("logging_dir", "run/logs"),
        ("checkpoint_config.output_dir", "run/checkpoints"),
        ("export_dir", "run/hf_model"),
    ],
)
def test_what_is_replayed_is_not_overwritten(folder, key, place):
    (violation,) = replay_violations(config_of(folder, ":1", f"{key}={folder}/{place}"))
    assert violation.path == key and "would be overwritten" in str(violation)
    assert not list(replay_violations(config_of(folder, ":1")))


def test_nothing_of_what_plays_is_started_or_looked_for(folder):
    from roll.configs.checks.machine_checks import Machine
    from roll.configs.checks.prerequisites import prerequisite_violations
    from roll.configs.rules.validate import warnings_of

    keys = (
        "rewards.sums.name=reward_model",
        "eval_steps=2",
        "actor_infer.strategy_args.strategy_name=vllm",
        "async_generation_ratio=1",
        "allow_uncorrected_async=true",
        "executor=inline",
    )
    config = config_of(folder, ":1", *keys)
    assert set(config.roles) == {"actor_train"}
    told = {violation.path for violation in prerequisite_violations(config, Machine(packages=frozenset()))}
    assert told == {"pretrain"}, "the model alone isn't there"
    assert "replay_from: nothing is validated, because a replay has no engine" in warnings_of(config)
    with pytest.raises(ConfigError, match="val_only: a replay has no engine that could play the validation"):
        config_of(folder, ":1", "val_only=true")
