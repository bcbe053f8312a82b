r"""`math_rule`: is the final answer mathematically equal to the ground truth?

Numbers and words are compared here, exactly; everything else by math-verify (sympy). Its own timeouts use a signal that
only works in a main thread, so they are off: the time limit is the reward pool's, which kills the process.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Any

from roll.rewards.answers import MAX_ANSWER_CHARS, ThinkMode, find_answer
from roll.rewards.base import Reward, ground_truth
from roll.rewards.quantities import plain_characters, read_quantity, same_quantity
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
    `\boxed{}` outside of the thinking. `think` is explained at `answers.after_thinking`; with `require_boxed` an answer
    outside of a box is none. Raises `ValueError` when the ground truth is not an answer: scoring against it would train
    on noise.
    """
    if think not in ("auto", "required", "ignore"):
        raise ValueError(f"math_rule: think must be auto, required or ignore, got {think!r}")
    gold = read_gold(ground_truth(task), task.id)
    answer = find_answer(response, think=think, require_boxed=require_boxed)
    correct = answered = formatted = 0.0
    if answer is not None:
        formatted = float(answer.boxed)
        stated = normalise(answer.text)
        answered = float(stated == gold or is_readable(stated))
        correct = float(answered and same_answer(stated, gold))
    return Reward(correct + format_weight * formatted, {"correct": correct, "answered": answered, "format": formatted})


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
    return bool(answer) and depth is not None and depth <= _MAX_DEPTH and not _EXPLOSIVE.search(answer)


def _words(text: str) -> str | None:
    r"""`text` in lower case when it is an answer in words (`Yes`, `\text{no}`), not a product of variables (`MN`)."""
    text = " ".join(_TEXT_COMMAND.sub(r" \1 ", text).split()).strip(" .()")
    if not _WORDS.fullmatch(text):
        return None
    return text.lower() if len(text) > 2 or text.lower() == "no" else None


def same_answer(answer: str, gold: str) -> bool:
    """Whether two normalised answers are equal."""
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
    return _verify(answer, gold)


@lru_cache(maxsize=256)
def _parse(answer: str) -> tuple[Any, ...]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the limits are ours
    return tuple(parse(rf"\boxed{{{answer}}}", parsing_timeout=0))


def _verify(answer: str, gold: str) -> bool:
    from math_verify import verify

    return bool(verify(list(_parse(gold)), list(_parse(answer)), timeout_seconds=0))
