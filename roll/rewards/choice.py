r"""`choice`: is the letter that the response settles on the right one?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.rewards.answers import ThinkMode, visible_text
from roll.rewards.base import Reward, ground_truth
from roll.rewards.choice_statements import stated_letter
from roll.types.trajectory import Task


def choice(
    response: str, task: Task, *, letters: str = "ABCDEFGHIJ", think: ThinkMode = "auto", require_boxed: bool = False
) -> Reward:
    r"""Return 1.0 when the letter stated is the one of `task.payload["ground_truth"]`, else 0.0.

    The letter is the one of the last `\boxed{}`, else of the last `<answer>`, else the one that the sentences assert
    last ("the answer is B", "B is correct", "leaving (B)"), else the only one that stands by itself ("B", "B) text",
    "(B)"). A letter that is ruled out or asked about isn't stated, and of two asserted together ("A or B") none is.
    The ground truth is a letter, alone or in front of its text, or its number from 0. Parts:
    `correct`, `answered`.
    """
    if think not in ("auto", "required", "ignore"):
        raise ValueError(f"choice: think must be auto, required or ignore, got {think!r}")
    if len(set(letters)) != len(letters) or not re.fullmatch(r"[A-Z]{2,26}", letters):
        raise ValueError(f"choice: letters are capitals such as ABCD, each once, got {letters!r}")
    expected = _expected(ground_truth(task), letters, task)
    visible = visible_text(response, task, think)
    stated = None if visible is None else stated_letter(visible, letters, require_boxed=require_boxed)
    correct = float(stated == expected)
    return Reward(correct, {"correct": correct, "answered": float(stated is not None)}, stated)


def _expected(truth: Any, letters: str, task: Task) -> str:
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(letters):
        return letters[truth]
    match = re.match(r"\s*[(\[]?([A-Za-z])(?:[)\].:]|\s*$)", truth) if isinstance(truth, str) else None
    letter = match.group(1).upper() if match is not None else ""
    if not letter or letter not in letters:
        raise ValueError(
            f"task {task.id!r}: ground truth {str(truth)[:80]!r} is no choice{_hint(truth, letters, task)}; expected a "
            f"letter of {letters} ('B', '(B)', 'B. text') or a number from 0 to {len(letters) - 1}"
        )
    return letter


def _hint(truth: Any, letters: str, task: Task) -> str:
    """Say what a row that states its answer in another way would have to hold."""
    if isinstance(truth, str) and truth.strip().isdigit():
        return " (a number written as text may count from 0 or from 1: write the letter)"
    for name in ("choices", "options"):
        texts = task.payload.get(name)
        if isinstance(texts, Mapping):
            texts = texts.get("text")
        if isinstance(texts, (list, tuple)) and truth in texts[: len(letters)]:
            return f" (its letter in the column {name!r} is {letters[texts.index(truth)]!r}: write that)"
    return ""
