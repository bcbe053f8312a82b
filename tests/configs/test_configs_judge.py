"""Configurations of judges and of several reward models: which are sound, and one clear error for each that isn't."""

from __future__ import annotations

from pathlib import Path

from refused import check_refused_here, refusals

from roll.configs.checks.endpoint_checks import endpoint_notes
from roll.configs.checks.machine_checks import Machine, machine_checks
from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.parsing.loader import load_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "rlvr"
ENDPOINT = ["rewards.words.name=judge", "judge={endpoint: 'http://127.0.0.1:1/v1', model: m}"]

BROKEN = [
    # id, overrides, fragments of the one violation's text, and its path unless it is the last override's key
    ("no section", ENDPOINT[:1], ["rewards.words.name asks for one", "endpoint"], "judge"),
    ("a weight without a section", ["rewards.math.rule_weight=1", "rewards.math.judge_weight=1"],
     ["rewards.math.judge_weight asks for one"], "judge"),
    ("a weight alone", [*ENDPOINT, "rewards.math.judge_weight=1"], ["because judge_weight is set"],
     "rewards.math.rule_weight"),
    ("added to itself", [*ENDPOINT, "rewards.words.judge_weight=1"], ["nothing to combine"]),
    ("no address", [*ENDPOINT, "judge.endpoint=localhost"], ["http://host:8000/v1"]),
    ("a key in the address", [*ENDPOINT, "judge.endpoint='http://a:sk-1@h/v1'"], ["api_key_env"]),
    ("a key for its variable", [*ENDPOINT, "judge.api_key_env=sk-abc"], ["never the key"]),
    ("no name at the endpoint", [*ENDPOINT, "judge.model=null"], ["name at the endpoint"]),
    ("no model of its own", [ENDPOINT[0], "judge={}"], ["because judge.endpoint is null"],
     "judge.model_args.model_name_or_path"),
    ("a prompt without the response", [*ENDPOINT, "judge.prompt=good?"], ["{response}"]),
    ("an empty range", [*ENDPOINT, "judge.score_min=10"], ["more than score_min (10)"], "judge.score_max"),
    ("a pattern without a group", [*ENDPOINT, "judge.score_pattern='[0-9]'"], ["has 0"]),
    ("an unknown option", [*ENDPOINT, "rewards.words.reward_kwargs={promt: x}"], ["did you mean 'prompt'"],
     "rewards.words.reward_kwargs.promt"),
    ("a limit of an engine", [ENDPOINT[0], "judge={model_args: {model_name_or_path: model}, requests_per_minute: 5}"],
     ["endpoint"], "judge.requests_per_minute"),
    ("a reward model that isn't there", ["rewards.math.rule_weight=1", "rewards.math.reward_models_weights={x: 1}"],
     ["which has none"], "rewards.math.reward_models_weights.x"),
]  # fmt: skip


@refusals(BROKEN)
def test_a_broken_judge_gives_one_clear_error(job, overrides, path, fragments):
    assert "sk-" not in check_refused_here(job, overrides, path, fragments)


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
