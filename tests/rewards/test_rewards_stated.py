"""Which answer a response states, for majority votes: from the reward, through its process, to the trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.rewards.base import RewardOutputError, RewardRequest, RewardSpec, as_reward
from roll.rewards.reward_pool import RewardPool
from roll.rewards.reward_registry import load_reward
from roll.types.trajectory import Task

OWN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "pred": solution_str.strip()}
"""


def task(truth: Any) -> Task:
    return Task(id="t:1", source="f", payload={"prompt": "?", "ground_truth": truth}, seed=0, tag="t", domain="d")


@pytest.mark.parametrize(
    ("name", "kwargs", "truth", "responses"),
    [
        ("math_rule", {}, "0.5", {r"\boxed{ \dfrac12 }.": r"\frac{1}{2}", r"\boxed{\frac{1}{2}}": r"\frac{1}{2}"}),
        ("gsm8k", {}, "72", {"#### 1,250": "1250", "#### 1250.0 apples": "1250", "72": None}),
        ("choice", {}, "B", {"The answer is (B).": "B", "who knows": None}),
        ("exact", {"ignore_case": True}, "yes", {" Yes\n": "yes", "": None}),
        ("regex", {"pattern": r"=(?P<answer>\d+)"}, "7", {"x=7": "7", "x": None}),
        ("weighted", {}, "7", {"x=7": "7"}),
    ],
)  # fmt: skip
def test_equal_answers_are_equal_texts(name: str, kwargs: Any, truth: str, responses: dict[str, str | None]) -> None:
    part = RewardSpec(name="regex", kwargs={"pattern": r"=(?P<answer>\d+)"})
    parts = {"short": (1.0, RewardSpec(name="none")), "right": (1.0, part)} if name == "weighted" else {}
    reward = load_reward(RewardSpec(name=name, kwargs=kwargs, parts=parts))
    assert {response: reward(response, task(truth)).answer for response in responses} == responses


def test_the_answer_of_ones_own_function_comes_through_its_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    request = RewardRequest(id="r", domain="d", response=" 42 ", task=task("42"))
    with RewardPool({"d": RewardSpec(name=f"{tmp_path}/own.py:compute_score")}) as pool:
        (result,) = pool.score([request])
    assert result.reward is not None
    assert (result.reward.value, result.reward.answer) == (1.0, "42")


def test_an_answer_is_a_text_of_bounded_length() -> None:
    assert as_reward({"score": 1.0, "pred": 7}, "f").answer == "7"
    assert len(as_reward({"score": 1.0, "pred": "x" * 10**6}, "f").answer or "") == 10_000
    with pytest.raises(RewardOutputError, match="an answer of type list, expected a text"):
        as_reward(type(as_reward(1.0, "f"))(1.0, {}, ["a"]), "f")  # type: ignore[arg-type]
