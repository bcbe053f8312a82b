r"""`math_rule`: is the final answer mathematically equal to the ground truth?

`answers.py` finds the answer in the response; the package `maths` reads and compares it.
"""

from __future__ import annotations

import math
from typing import Any

from roll.rewards.answers import (
    MAX_ANSWER_CHARS,
    ThinkMode,
    after_thinking,
    all_boxed,
    box_is_too_long,
    find_answer,
    thought_mode,
)
from roll.rewards.base import Reward, ground_truth
from roll.rewards.maths.comparison import ComparisonResult, same
from roll.rewards.maths.evaluation import TooHard
from roll.rewards.maths.tokens import is_readable, nesting, written
from roll.types.trajectory import Task


def math_rule(
    response: str, task: Task, *, think: ThinkMode = "auto", require_boxed: bool = False, format_weight: float = 0.0
) -> Reward:
    r"""Return 1 for an answer equal to `task.payload["ground_truth"]`, else 0, plus `format_weight` for a `\boxed{}`
    answer.

    Parts: `correct`; `answered`, 0 when the response states no answer that can be read; `format`, 1 for a closed
    `\boxed{}` outside of the thinking; `too_hard`, only there as 1, when an answer's value is too large to compute: it
    counts as wrong unless it is written as the ground truth is. The explanation says what was compared as text and why.
    `think` is explained at `answers.after_thinking`; with `require_boxed` an answer outside of a box is none. Raises
    `ValueError` when the ground truth is not an answer: scoring against it would train on noise.
    """
    if think not in ("auto", "required", "ignore"):
        raise ValueError(f"math_rule: think must be auto, required or ignore, got {think!r}")
    think = thought_mode(think, task)
    gold = read_gold(ground_truth(task), task.id)
    answer = find_answer(response, think=think, require_boxed=require_boxed)
    answered = formatted = 0.0
    verdict = ComparisonResult(False)
    stated = None
    if answer is not None:
        formatted = float(answer.boxed)
        stated = written(answer.text)
        answered = float(is_readable(stated) or stated == gold)
        hard = not answered and (nesting(stated) or 0) > 0
        try:
            verdict = _verdict(stated, gold) if answered else verdict
        except TooHard:
            answered, hard = 0.0, True
    else:
        hard = box_is_too_long(after_thinking(response, think) or "")
    correct = float(verdict.equal)
    parts = {"correct": correct, "answered": answered, "format": formatted}
    value = correct + format_weight * formatted
    return Reward(value, {**parts, "too_hard": 1.0} if hard else parts, stated if answered else None, verdict.note)


def _verdict(answer: str, gold: str) -> ComparisonResult:
    return ComparisonResult(True) if answer == gold else same(answer, gold)


def read_gold(truth: Any, task_id: str) -> str:
    """Return the ground truth as a normalised string; raises `ValueError` for one that no answer could match."""
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        raise ValueError(
            f"task {task_id!r}: ground truth {truth!r} is a {type(truth).__name__}, expected a string or a number"
        )
    if isinstance(truth, float):
        if not math.isfinite(truth):
            raise ValueError(f"task {task_id!r}: ground truth {truth} is not finite")
        truth = int(truth) if truth.is_integer() else repr(truth)
    text = str(truth)
    boxed = all_boxed(text) if "boxed" in text else None
    gold = written(boxed or text)
    if not gold or len(gold) > MAX_ANSWER_CHARS or nesting(gold) is None:
        raise ValueError(
            f"task {task_id!r}: ground truth {text[:200]!r} is not an answer "
            "(empty, too long, or with unbalanced braces); "
            r"expected e.g. '72', '\\frac{1}{2}' or 'Yes'"
        )
    return gold
