"""`exact`: is the answer the expected text?"""

from __future__ import annotations

import string
import unicodedata
from typing import Any, Literal

from roll.rewards.answers import ThinkMode, last_boxed
from roll.rewards.base import Reward, ground_truth
from roll.rewards.thoughts import visible_text
from roll.types.episode import Task

Extract = Literal["whole", "first_line", "last_line", "after_answer", "tags", "boxed"]
_EXTRACTS = ("whole", "first_line", "last_line", "after_answer", "tags", "boxed")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact(
    response: str,
    task: Task,
    *,
    extract: Extract = "whole",
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    think: ThinkMode = "auto",
) -> Reward:
    r"""1.0 when the answer is `task.payload["ground_truth"]`, or one of them if that is a list; else 0.0.

    The answer is the `whole` response after the thinking, its `first_line` or `last_line`, what follows the last
    "answer:" on its line (`after_answer`), what stands in the last `<answer>` (`tags`) or the last `\boxed{}`. Runs of
    white space count as one space; letters that only look different to a computer (composed or not) are equal. Parts:
    `correct`, `answered`.
    """
    if extract not in _EXTRACTS or think not in ("auto", "required", "ignore"):
        raise ValueError(f"exact: extract is one of {', '.join(_EXTRACTS)}, got {extract!r}; think {think!r}")
    accepted = [normalised(one, ignore_case, ignore_punctuation) for one in accepted_answers(task)]
    visible = visible_text(response, task, think)
    stated = None if visible is None else extracted(visible, extract)
    text = normalised(stated or "", ignore_case, ignore_punctuation)
    correct = float(bool(text) and text in accepted)
    return Reward(correct, {"correct": correct, "answered": float(bool(text))}, text or None)


def accepted_answers(task: Task) -> list[str]:
    """Return the texts that the ground truth allows; raises `ValueError` when one is empty."""
    truth: Any = ground_truth(task)
    many = list(truth) if isinstance(truth, (list, tuple)) else [truth]
    texts = [str(int(one)) if isinstance(one, float) and one.is_integer() else str(one) for one in many]
    if not texts or any(not text.strip() for text in texts):
        raise ValueError(f"task {task.id!r}: ground truth {str(truth)[:80]!r} is empty")
    return texts


def extracted(text: str, extract: Extract) -> str | None:
    """Return the answer of a response, or None when it states none."""
    if extract == "boxed":
        return last_boxed(text)
    if extract == "tags":
        inside = text.rpartition("<answer>")[2] if "<answer>" in text else ""
        return inside.partition("</answer>")[0] if "</answer>" in inside else None
    if extract == "after_answer":
        start = text.lower().rfind("answer:")
        return text[start + len("answer:") :].lstrip(" *_").partition("\n")[0].rstrip(" *_") if start >= 0 else None
    lines = [line for line in text.splitlines() if line.strip()]
    if extract == "whole" or not lines:
        return text
    return lines[0] if extract == "first_line" else lines[-1]


def normalised(text: str, ignore_case: bool, ignore_punctuation: bool) -> str:
    """Return the text as it is compared."""
    text = unicodedata.normalize("NFC", text)
    text = text.casefold() if ignore_case else text
    return " ".join((text.translate(_PUNCTUATION) if ignore_punctuation else text).split())
