r"""`math_rule`: is the final answer mathematically equal to the ground truth?

Numbers and words are compared here, exactly; everything else by math-verify (sympy), within limits of time and memory
(`bounded_maths.py`).
"""

from __future__ import annotations

import math
import re
from typing import Any

from roll.rewards.answers import MAX_ANSWER_CHARS, ThinkMode, after_thinking, box_is_too_long, find_answer
from roll.rewards.base import Reward, ground_truth
from roll.rewards.bounded_maths import MATHS, TooHard
from roll.rewards.quantities import plain_characters, read_quantity, same_quantity
from roll.rewards.thoughts import thought_mode
from roll.types.episode import Task

_MAX_DEPTH = 30
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z][A-Za-z'-]*)*")
_EXPLOSIVE = re.compile(
    r"""\^\s*\{?[^{}^]*\d\s*\}?\s*\^\s*\{?\s*-?\d   # a tower: 9^{9^{9}}
    |\)\s*\^\s*\{?\s*\d{3,}                       # (x+y+z)^{300} expands
    |\^\s*\{?\s*-?\d{6,}                          # 2^{1000000}
    |\d{5,}\s*!|\d{4,}[^()]*\)\s*!|!\s*[)}]\s*!   # huge or nested factorials
    """,
    re.VERBOSE,
)


def math_rule(
    response: str, task: Task, *, think: ThinkMode = "auto", require_boxed: bool = False, format_weight: float = 0.0
) -> Reward:
    r"""1 for an answer equal to `task.payload["ground_truth"]`, else 0, plus `format_weight` for a `\boxed{}` answer.

    Parts: `correct`; `answered`, 0 when the response states no answer that can be read; `format`, 1 for a closed
    `\boxed{}` outside of the thinking; `too_hard`, only there as 1, when checking the answer would take over 2 s or 200
    MB: it counts as wrong. `think` is explained at `answers.after_thinking`; with `require_boxed` an answer outside
    of a box is none. Raises `ValueError` when the ground truth is not an answer, or too hard itself: scoring against it
    would train on noise.
    """
    if think not in ("auto", "required", "ignore"):
        raise ValueError(f"math_rule: think must be auto, required or ignore, got {think!r}")
    think = thought_mode(think, task)
    gold = read_gold(ground_truth(task), task.id)
    answer = find_answer(response, think=think, require_boxed=require_boxed)
    correct = answered = formatted = 0.0
    stated = None
    if answer is not None:
        formatted = float(answer.boxed)
        stated = normalise(answer.text)
        readable = stated == gold or is_readable(stated)
        hard = not readable and is_hard(stated)
        try:
            answered = float(readable)
            correct = float(readable and same_answer(stated, gold))
        except TooHard:
            _check_gold(gold, task.id)
            answered, hard = 0.0, True
    else:
        hard = box_is_too_long(after_thinking(response, think) or "")
    parts = {"correct": correct, "answered": answered, "format": formatted}
    value = correct + format_weight * formatted
    return Reward(value, {**parts, "too_hard": 1.0} if hard else parts, stated if answered else None)


def _check_gold(gold: str, task_id: str) -> None:
    """Raise `ValueError` if it is the ground truth that no answer can be compared with."""
    try:
        MATHS.same("1", gold)
    except TooHard:
        raise ValueError(
            f"task {task_id!r}: ground truth {gold[:200]!r} takes more than 2 s or 200 MB to evaluate, so no answer "
            "can be compared with it; write it as a number, or leave the row out"
        ) from None


def read_gold(truth: Any, task_id: str) -> str:
    """The ground truth as a normalised string; raises `ValueError` for one that no answer could match."""
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        raise ValueError(
            f"task {task_id!r}: ground truth {truth!r} is a {type(truth).__name__}, expected a string or a number"
        )
    if isinstance(truth, float):
        if not math.isfinite(truth):
            raise ValueError(f"task {task_id!r}: ground truth {truth} is not finite")
        truth = int(truth) if truth.is_integer() else repr(truth)
    text = str(truth)
    found = find_answer(text, think="ignore") if "boxed" in text else None
    gold = normalise(found.text if found else text)
    if not gold or len(gold) > MAX_ANSWER_CHARS or _depth(gold) is None:
        raise ValueError(
            f"task {task_id!r}: ground truth {text[:200]!r} is not an answer "
            "(empty, too long, or with unbalanced braces); "
            r"expected e.g. '72', '\\frac{1}{2}' or 'Yes'"
        )
    return gold


def normalise(answer: str) -> str:
    """The same answer without decoration: math delimiters, spacing commands, `dfrac`, a trailing full stop."""
    text = re.sub(r"(?:\{,\}|,\s*\\[!,])\s*(?=\d{3})", ",", plain_characters(answer).strip())
    text = re.sub(r"(?<!\\)\\[,;:! ]|\\(?:q?quad|left|right|displaystyle)(?![A-Za-z])|~", " ", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    # Spaces only matter between words, and after a comma: `1, 250` is not 1250.
    text = re.sub(r"\s+(?!\w)|(?<![\w,])\s+", "", " ".join(text.split()))
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inner.strip() and opening not in inner:
            text = inner.strip()
    return text.rstrip(".").strip()


def _depth(text: str) -> int | None:
    """Deepest nesting of braces and brackets; None when the braces don't balance."""
    braces = deepest = brackets = 0
    escaped = False
    for character in text:
        if not escaped:
            braces += (character == "{") - (character == "}")
        brackets += (character in "([") - (character in ")]")
        deepest = max(deepest, braces + max(brackets, 0))
        if braces < 0:
            return None
        escaped = character == "\\" and not escaped
    return deepest if braces == 0 else None


def is_readable(answer: str) -> bool:
    """False for what no parser should see: unbalanced, nested beyond reason, or a number too large to evaluate."""
    depth = _depth(answer)
    return bool(answer) and depth is not None and not is_hard(answer)


def is_hard(answer: str) -> bool:
    """Whether it can be seen without evaluating it that no limit would be enough."""
    return (_depth(answer) or 0) > _MAX_DEPTH or _EXPLOSIVE.search(answer) is not None


def _words(text: str) -> str | None:
    r"""`text` in lower case when it is an answer in words (`Yes`, `\text{no}`), not a product of variables (`MN`)."""
    text = " ".join(_TEXT_COMMAND.sub(r" \1 ", text).split()).strip(" .()")
    if not _WORDS.fullmatch(text):
        return None
    return text.lower() if len(text) > 2 or text.lower() == "no" else None


def same_answer(answer: str, gold: str) -> bool:
    """Whether two normalised answers are equal; raises `TooHard`."""
    if answer == gold:
        return True
    expected = _words(gold)
    if expected is not None:
        return _words(answer) == expected  # a parser would read Yes as the product y*e*s
    mine, theirs = read_quantity(answer), read_quantity(gold)
    if mine is not None and theirs is not None:
        return same_quantity(mine, theirs)
    if theirs is not None and _words(answer) is not None:
        return False
    return MATHS.same(answer, gold)
