"""Agents that do what they shouldn't, all in one validation: each costs its own episode, with the right status."""

from __future__ import annotations

import json
import time

import pytest
from agents_run import AGENTS, command, endpoint, write_run
from toy import run_toy

FAULTS = {
    "never": (command("never"), "env_error", "the agent never called the model (exit code 0)"),
    "never_fails": (command("never fails"), "env_error", "the agent never called the model (exit code 5)"),
    "raises": (
        endpoint(agent=f"{AGENTS}:raises"),
        "env_error",
        "the agent raised before the model answered it: KeyError: 'question'\nTraceback",
    ),
    "hangs": (command("hangs", timeout_s=4), "timeout", "waited over 4 s for the agent's end"),
    "forks": (command("forks", timeout_s=4), "timeout", "waited over 4 s for the agent's end"),
    "crashes": (command("crashes"), "env_error", "the agent ended with signal 6"),
    "exits": (command("exits 3"), "env_error", "the agent ended with exit code 3"),
    "unknown_code": (
        command("exits 3", score="exit", exit_rewards={"0": 1.0}),
        "env_error",
        "the agent ended with exit code 3",
    ),
    "known_code": (command("exits 3", score="exit", exit_rewards={"3": 0.5}), "ok", 0.5),
    "floods": (command("floods"), "ok", (0.0, 1.0)),
    "nan": (command("prints nan"), "env_error", "nan, expected a finite number"),
    "silent": (command("prints nothing"), "env_error", "printed no line of JSON"),
    "twice": (command("scores twice", score="callback"), "ok", 0.25),
    "posts_nan": (command("scores nan", score="callback"), "env_error", "without posting its score"),
    "another": (command("scores another", score="callback"), "env_error", "without posting its score"),
    "for_ever": (command("asks for ever", max_calls=3), "truncated", 0.0),
    "for_ever_fails": (command("asks for ever", max_calls=3, truncated_reward=None), "env_error", "exit code 1"),
    "too_many_tokens": (command("asks for ever", max_tokens=3, truncated_reward=-1.0), "truncated", -1.0),
    "too_long": (command("asks too much"), "truncated", 0.0),
    "asks_on": (command("asks on", max_calls=2), "truncated", 0.0),
    "asks_on_fails": (command("asks on", max_calls=2, truncated_reward=None), "env_error", "calls are spent"),
    "asks_on_scored": (command("scores and asks on", max_calls=2, score="callback"), "truncated", 0.75),
    "asks_too_much_again": (command("asks too much again"), "truncated", 0.0),
    "sleeps_when_spent": (command("sleeps", max_calls=1, timeout_s=5), "truncated", 0.0),
    "sleeps_when_spent_fails": (command("sleeps", max_calls=1, timeout_s=5, truncated_reward=None), "timeout", "5 s"),
    "disconnects": (command("disconnects"), "ok", (0.0, 1.0)),
    "lives_on": (command("lives on"), "ok", (0.0, 1.0)),
    "secret": (command("secret"), "ok", (0.0, 1.0)),
}


@pytest.fixture(scope="module")
def played(tiny_model, tmp_path_factory):
    """What became of each tag's episode, and the run's metrics."""
    folder = tmp_path_factory.mktemp("agents")
    envs = {tag: env for tag, (env, _, _) in FAULTS.items()}
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_SECRET_TOKEN", "hidden")
        (row,) = run_toy(write_run(folder, tiny_model, envs), "val_only=true")
    assert time.monotonic() - began < 150, "one that ought to be ended was waited for"  # timeout_s is 600
    lines = (folder / "output" / "episodes.jsonl").read_text().splitlines()
    return folder, {episode["tag"]: episode for episode in map(json.loads, lines)}, row


@pytest.mark.parametrize("tag", FAULTS)
def test_an_agent_that_does_what_it_should_not_costs_its_own_episode(played, tag):
    _, status, expected = FAULTS[tag]
    episode = played[1][tag]
    assert episode["status"] == status, episode
    if status in ("ok", "truncated"):
        assert episode["reward"] in (expected if isinstance(expected, tuple) else (expected,))
    else:
        assert expected in episode["error"]


def test_an_agent_that_fails_for_a_spent_budget_has_not_crashed(tiny_model, tmp_path):
    folder = write_run(tmp_path, tiny_model, {"ever": command("asks for ever", max_calls=1)})
    (row,) = run_toy(folder, "max_steps=1")
    assert (row["agent/spent"], row["agent/crashes"]) == (4, 0)
    assert row["reward/mean"] == 0.0
