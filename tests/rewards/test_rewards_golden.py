"""Rewards on real data: the gold answer scores 1, somebody else's doesn't."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.rewards.gsm8k import gsm8k
from roll.rewards.math_rule import math_rule
from roll.types.trajectory import Task

DATA = Path(__file__).parents[2].parent / "shared" / "data"


def rows(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def task(truth: object) -> Task:
    return Task(id="t", source="t", payload={"ground_truth": truth}, seed=0, tag="t", domain="d")


def shifted(items: list[Any], by: int) -> Iterator[tuple[Any, Any]]:
    """(gold of a row, gold of the row `by` further): a wrong answer of the right form."""
    return zip(items, items[by:] + items[:by], strict=True)


@pytest.mark.parametrize("name", ["gsm8k/train.jsonl", "gsm8k/test.jsonl"])
def test_every_gsm8k_gold_answer_scores_one_and_another_rows_rarely(name: str) -> None:
    answers = [row["answer"] for row in rows(name)]
    misses = [a for a in answers if gsm8k(a, task(a)).value != 1.0]
    assert misses == []
    finals = [a.rpartition("####")[2].strip() for a in answers]
    assert [
        a for a, final in zip(answers, finals, strict=True) if gsm8k(f"#### {final}", task(final)).value != 1.0
    ] == []
    others = sum(gsm8k(other, task(gold)).value for gold, other in shifted(answers, 17))
    assert others / len(answers) < 0.03


def test_every_mawps_gold_answer_scores_one_under_both_rewards() -> None:
    targets = [row["target"] for row in rows("mawps/mawps.jsonl")]
    for target in targets:
        assert gsm8k(f"so #### {target:.8g}", task(target)).value == 1.0
        assert math_rule(rf"\boxed{{{target:.8g}}}", task(target)).value == 1.0
    others = sum(math_rule(f"The answer is {other:g}.", task(gold)).value for gold, other in shifted(targets, 17))
    assert others / len(targets) < 0.05


def test_every_deepmath_gold_answer_scores_one_in_a_box() -> None:
    truths = [row["ground_truth"] for row in rows("deepmath/deepmath.jsonl")]
    assert [truth for truth in truths if math_rule(rf"So it is \boxed{{{truth}}}.", task(truth)).value != 1.0] == []


def test_deepmath_answers_that_are_numbers_or_words_reject_the_others() -> None:
    truths = [row["ground_truth"] for row in rows("deepmath/deepmath.jsonl")]
    simple = [truth for truth in truths if truth.lstrip("-").isdigit() or truth in ("Yes", "No", "True", "False")]
    assert len(simple) > 2500
    for gold, other in shifted(simple, 17):
        expected = float(gold == other)
        assert math_rule(rf"\boxed{{{other}}}", task(gold)).value == expected
