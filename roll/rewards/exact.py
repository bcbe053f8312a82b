"""`exact`: is the answer the expected text?"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from datetime import datetime, time
from typing import Any, Literal

from roll.rewards.answers import ThinkMode, last_boxed, visible_text
from roll.rewards.base import Reward, ground_truth
from roll.rewards.punctuation import without_punctuation
from roll.types.trajectory import Task

Extract = Literal["whole", "first_line", "last_line", "after_answer", "tags", "boxed"]
_EXTRACTS = ("whole", "first_line", "last_line", "after_answer", "tags", "boxed")
_CUE = re.compile(r"answer(?:\*\*|__)?[ \t]?:", re.IGNORECASE)


def exact(
    response: str,
    task: Task,
    *,
    extract: Extract = "whole",
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    think: ThinkMode = "auto",
) -> Reward:
    r"""Return 1.0 when the answer is `task.payload["ground_truth"]`, or one of them if that is a list; else 0.0.

    The answer is the `whole` response after the thinking, its `first_line` or `last_line`, what follows the last
    "answer:" on its line (`after_answer`), what stands in the last `<answer>` (`tags`) or the last `\boxed{}`. Runs of
    white space count as one space; letters that only look different to a computer (composed or not) are equal.
    `ignore_punctuation` leaves out what ends or quotes; not signs, decimal points, fractions, times, operators
    (`punctuation.py`). Dates and truth values of a row are accepted as they are usually written. Parts: `correct`,
    `answered`.
    """
    if extract not in _EXTRACTS or think not in ("auto", "required", "ignore"):
        raise ValueError(f"exact: extract is one of {', '.join(_EXTRACTS)}, got {extract!r}; think {think!r}")
    truths = accepted_answers(task)
    accepted = [normalised(one, ignore_case, ignore_punctuation) for one in truths]
    if "" in accepted:
        raise ValueError(
            f"task {task.id!r}: nothing is left of the ground truth {truths[accepted.index('')]!r} without "
            "punctuation; set ignore_punctuation=false"
        )
    visible = visible_text(response, task, think)
    stated = None if visible is None else extracted(visible, extract)
    text = normalised(stated or "", ignore_case, ignore_punctuation)
    correct = float(bool(text) and text in accepted)
    return Reward(correct, {"correct": correct, "answered": float(bool(text))}, text or None)


def accepted_answers(task: Task) -> list[str]:
    """Return the texts that the ground truth allows; raises `ValueError` for one that no text could equal."""
    truth: Any = ground_truth(task)
    many = list(truth) if isinstance(truth, (list, tuple)) else [truth]
    texts = [text for one in many for text in written_forms(one)]
    if not texts or any(not text.strip() for text in texts):
        raise ValueError(f"task {task.id!r}: ground truth {str(truth)[:80]!r} is empty")
    for one in many:
        if one is None or isinstance(one, (Mapping, list, tuple, bytes)):
            raise ValueError(
                f"task {task.id!r}: ground truth {str(truth)[:80]!r} is or holds a {type(one).__name__}, expected a "
                "text, a number, a date, or a list of them; a dot leads into a nested column: "
                "data_args.ground_truth=answer.text"
            )
    return texts


def written_forms(value: Any) -> list[str]:
    """Return how a value of a row may be written: `43` for 43.0, `true` for True, `2024-01-02` for midnight of it."""
    texts = [str(value)]
    if isinstance(value, bool):
        texts += [str(value).lower(), str(value).upper()]
    elif isinstance(value, float) and value.is_integer():
        texts = [str(int(value)), *texts]
    elif isinstance(value, datetime):
        texts.append(value.isoformat())
        if value.time() == time() and value.tzinfo is None:
            texts.append(value.date().isoformat())
        elif not (value.second or value.microsecond):
            texts += [value.isoformat(separator, "minutes") for separator in " T"]
    elif isinstance(value, time) and not (value.second or value.microsecond):
        texts.append(value.isoformat("minutes"))
    return texts


def extracted(text: str, extract: Extract) -> str | None:
    """Return the answer of a response, or None when it states none."""
    if extract == "boxed":
        return last_boxed(text)
    if extract == "tags":
        inside = text.rpartition("<answer>")[2] if "<answer>" in text else ""
        return inside.partition("</answer>")[0] if "</answer>" in inside else None
    if extract == "after_answer":
        end = None
        for cue in _CUE.finditer(text):
            end = cue.end()
        return None if end is None else text[end:].lstrip(" *_").partition("\n")[0].rstrip(" *_")
    lines = [line for line in text.splitlines() if line.strip()]
    if extract == "whole" or not lines:
        return text
    return lines[0] if extract == "first_line" else lines[-1]


def normalised(text: str, ignore_case: bool, ignore_punctuation: bool) -> str:
    """Return the text as it is compared."""
    text = unicodedata.normalize("NFC", text)
    text = text.casefold() if ignore_case else text
    return without_punctuation(text) if ignore_punctuation else " ".join(text.split())
