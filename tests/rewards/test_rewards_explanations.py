"""Why a reward has its value, from the function to whoever shows it."""

from __future__ import annotations

import pytest

from roll.pipelines.rollouts.reward_router import combined
from roll.rewards.base import Reward, RewardOutputError, RewardResult, as_reward, explained
from roll.rewards.weighted import weighted
from roll.types.trajectory import Task

TASK = Task(id="t", source="", payload={}, seed=0, tag="", domain="d")


def test_a_function_explains_in_its_dict_or_its_reward():
    assert as_reward({"score": 1.0, "explanation": "all tests passed"}, "f") == Reward(
        1.0, {}, None, "all tests passed"
    )
    assert as_reward({"score": 1.0, "explanation": 3.0}, "f") == Reward(1.0, {"explanation": 3.0})  # a number is a part
    assert as_reward(Reward(0.0, explanation="x" * 20_000), "f").explanation == "x" * 10_000
    with pytest.raises(RewardOutputError, match="an explanation of type int"):
        as_reward(Reward(0.0, explanation=5), "f")


def test_parts_of_a_weighted_reward_explain_under_their_names():
    scores = {
        "tests": Reward(1.0, explanation="3 of 3 passed"),
        "form": Reward(0.0),
        "style": Reward(0.5, explanation="long lines"),
    }
    found = weighted(scores, {"tests": 1.0, "form": 0.5, "style": 0.5})
    assert found is not None and found.explanation == "tests: 3 of 3 passed\n\nstyle: long lines"
    assert explained({}) == explained({"a": ""}) == ""


def test_a_judge_and_a_function_explain_side_by_side():
    class Config:
        is_function, name, rule_weight, added = False, "regex", 1.0, {"judge": 0.5}

    own = RewardResult(id="r", status="ok", reward=Reward(1.0, explanation="it matches"))
    judged = RewardResult(id="r", status="ok", reward=Reward(0.5, {"judge": 0.5}, explanation="good, but long"))
    found = combined(own, {"judge": judged}, Config())
    assert found.reward is not None and found.reward.value == 1.25
    assert found.reward.explanation == "regex: it matches\n\njudge: good, but long"
