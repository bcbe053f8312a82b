"""Configurations of judges and of several reward models: which are sound, and one clear error for each that isn't."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.checks.endpoint_checks import endpoint_notes
from roll.configs.checks.machine_checks import Machine, machine_checks
from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "rlvr"
ENDPOINT = ["rewards.words.name=judge", "judge={endpoint: 'http://127.0.0.1:1/v1', model: m}"]

BROKEN: list[tuple[str, list[str], str, list[str]]] = [
    # id, overrides, path of the one violation, fragments of its text
    ("no section", ENDPOINT[:1], "judge", ["rewards.words.name asks for one", "endpoint"]),
    ("a weight without a section", ["rewards.math.rule_weight=1", "rewards.math.judge_weight=1"], "judge",
     ["rewards.math.judge_weight asks for one"]),
    ("a weight alone", [*ENDPOINT, "rewards.math.judge_weight=1"], "rewards.math.rule_weight",
     ["because judge_weight is set"]),
    ("added to itself", [*ENDPOINT, "rewards.words.judge_weight=1"], "rewards.words.judge_weight",
     ["nothing to combine"]),
    ("no address", [*ENDPOINT, "judge.endpoint=localhost"], "judge.endpoint", ["http://host:8000/v1"]),
    ("a key in the address", [*ENDPOINT, "judge.endpoint='http://a:sk-1@h/v1'"], "judge.endpoint", ["api_key_env"]),
    ("a key for its variable", [*ENDPOINT, "judge.api_key_env=sk-abc"], "judge.api_key_env", ["never the key"]),
    ("no name at the endpoint", [*ENDPOINT, "judge.model=null"], "judge.model", ["name at the endpoint"]),
    ("no model of its own", [ENDPOINT[0], "judge={}"], "judge.model_args.model_name_or_path",
     ["because judge.endpoint is null"]),
    ("a prompt without the response", [*ENDPOINT, "judge.prompt=good?"], "judge.prompt", ["{response}"]),
    ("an empty range", [*ENDPOINT, "judge.score_min=10"], "judge.score_max", ["more than score_min (10)"]),
    ("a pattern without a group", [*ENDPOINT, "judge.score_pattern='[0-9]'"], "judge.score_pattern", ["has 0"]),
    ("an unknown option", [*ENDPOINT, "rewards.words.reward_kwargs={promt: x}"], "rewards.words.reward_kwargs.promt",
     ["did you mean 'prompt'"]),
    ("a limit of an engine", [ENDPOINT[0], "judge={model_args: {model_name_or_path: model}, requests_per_minute: 5}"],
     "judge.requests_per_minute", ["endpoint"]),
    ("a reward model that isn't there", ["rewards.math.rule_weight=1", "rewards.math.reward_models_weights={x: 1}"],
     "rewards.math.reward_models_weights.x", ["which has none"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "path", "fragments"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_a_broken_judge_gives_one_clear_error(job, overrides, path, fragments):
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(load_config(job, "job", overrides))
    assert [violation.path for violation in caught.value.violations] == [path], str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "sk-" not in str(caught.value)


def test_the_examples_are_sound_without_a_network(monkeypatch):
    monkeypatch.setattr("roll.configs.checks.prerequisites.hub_problem", lambda _: "")
    endpoint = load_config(EXAMPLES, "rlvr_judge", [])
    check_prerequisites(endpoint, Machine())
    assert "judge" not in endpoint.roles
    engine = load_config(EXAMPLES, "rlvr_judge_engine", [])
    check_prerequisites(engine, Machine())
    assert engine.placement.roles["judge"] == ((1,),)


def test_an_absent_service_and_key_are_notes():
    overrides = ["judge.endpoint=http://127.0.0.1:1/v1", "judge.api_key_env=JUDGE_KEY"]
    notes = list(endpoint_notes(load_config(EXAMPLES, "rlvr_judge", overrides), {}))
    assert len(notes) == 2
    assert "JUDGE_KEY is not set" in notes[0]
    assert "127.0.0.1:1 can't be reached" in notes[1]


def test_a_judge_on_another_roles_accelerator_is_refused():
    config = load_config(EXAMPLES, "rlvr_judge_engine", ["judge.device_mapping=[0]"])
    found = list(machine_checks(config, Machine(accelerators=("NVIDIA H200",) * 2)))
    assert [violation.path for violation in found] == ["judge.device_mapping"]
