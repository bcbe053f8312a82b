"""`gsm8k`: does the response end with `#### <the right number>`?"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, Literal

from roll.rewards.answers import visible_text
from roll.rewards.base import Reward, ground_truth
from roll.rewards.maths.comparison import read
from roll.rewards.maths.evaluation import TooHard, Undefined, exact
from roll.rewards.maths.nodes import Node
from roll.rewards.maths.tokens import PLAIN_NUMBER, plain_characters
from roll.types.trajectory import Task

_NUMBER = re.compile(
    r"(?:(?<![\w)])-\s?)?[$€£]?(?<![\^_])(?<![\^_]{)"
    rf"(?:(?P<whole>\d{{1,50}})?\s?\\frac\{{(?P<over>\d{{1,50}})\}}\{{(?P<under>\d{{1,50}})\}}|(?P<digits>{PLAIN_NUMBER}))"
)
_MARKED = re.compile(rf"\s*\**(?P<sign>-?)\s*[$€£]?(?P<sign2>-?)(?P<digits>{PLAIN_NUMBER})(?P<rest>[^\d\n]*)(?:\n|$)")
_CALCULATION = re.compile(
    r"[*+=<>(!]|\d\s*[-/]|\\(?:times|cdot|div)|\d\s*\\frac|\d\s+\d|[\d)}]\s*\^|,\s|\band\b|\bor\b"
)
"""What stands in a line that isn't a number with its unit alone."""
_OPERATOR = re.compile(r"[-+*/^=<>\\]")
_TAIL_CHARS = 4000
_MAX_LINE_CHARS = 400
MAX_DIGITS = 200  # Longer numbers are not read: nobody states one, and converting them takes quadratic time


def gsm8k(
    response: str, task: Task, *, mode: Literal["strict", "flexible"] = "strict", format_weight: float = 0.0
) -> Reward:
    """Return 1.0 when the number stated is the one of `task.payload["ground_truth"]` (`... #### 72`, `72` or 72), else
    0.0.

    `strict`: the number after the last `####`, alone on its line but for a unit. `flexible`: that, else the last number
    of the response. A number after `####` that is wrong gets `format_weight` (other recipes' 0.1).
    Parts: `correct`, `answered` (a number was found), `format` (it followed `####`). Raises
    `ValueError` for a ground truth that is not a number: scoring against it would train on noise.
    """
    if mode not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: mode must be strict or flexible, got {mode!r}")
    expected = _expected(ground_truth(task), task.id)
    response = visible_text(response, task) or ""
    marked = marked_number(response)
    stated = marked if marked is not None or mode == "strict" else last_number(response)
    correct = float(stated is not None and _same(stated, expected))
    formatted = float(marked is not None)
    parts = {"correct": correct, "answered": float(stated is not None), "format": formatted}
    return Reward(correct or format_weight * formatted, parts, None if stated is None else str(stated))


def marked_number(text: str) -> Fraction | None:
    """Return the number after the last `####`; None when there is none, or when its line goes on as a calculation."""
    _, mark, rest = text.rpartition("####")
    line = plain_characters(rest[:_TAIL_CHARS]).strip(" *\t\r\n").split("\n", 1)[0].strip(" *\t\r")
    if not mark:
        return None
    if len(line) <= _MAX_LINE_CHARS and re.search(r"\d", line) and not _CALCULATION.search(line):
        node = read(line).node
        value = _stated(node) if node is not None else None
        if value is not None:
            return value
    match = _MARKED.match(line)
    if match is None or _OPERATOR.search(match["rest"].lstrip("*")):
        return None
    return _value(match["digits"], (match["sign"] == "-") != (match["sign2"] == "-"))


def _stated(node: Node) -> Fraction | None:
    """Return the number of an answer, whatever unit stands behind it; a percentage is the number before the sign."""
    while node.op in ("quantity", "degrees", "percent"):
        node = node.args[0]
    try:
        return exact(node)
    except (TooHard, Undefined):
        return None


def last_number(text: str) -> Fraction | None:
    """Return the last number among the last 4,000 characters, or None."""
    match = None
    for match in _NUMBER.finditer(plain_characters(text[-_TAIL_CHARS:])):  # noqa: B007 - the last one counts
        pass
    if match is None:
        return None
    negative = match.group().startswith("-")
    if match["digits"]:
        return _value(match["digits"], negative)
    if int(match["under"]) == 0:
        return None
    value = int(match["whole"] or 0) + Fraction(int(match["over"]), int(match["under"]))  # ½ is \frac{1}{2} by now
    return -value if negative else value


def _value(digits: str, negative: bool) -> Fraction | None:
    if len(digits) > MAX_DIGITS:
        return None
    value = Fraction(digits.replace(",", ""))
    return -value if negative else value


def _same(stated: Fraction, expected: Fraction) -> bool:
    """Exact for whole numbers; otherwise six decimals are enough (0.666667 for 0.6666666667)."""
    return stated == expected or (expected.denominator != 1 and round(stated, 6) == round(expected, 6))


def _expected(truth: Any, task_id: str) -> Fraction:
    if isinstance(truth, (int, float)) and not isinstance(truth, bool) and math.isfinite(truth):
        return Fraction(str(truth))
    expected = None
    if isinstance(truth, str):
        expected = marked_number(truth if "####" in truth else f"#### {truth}")
    if expected is None:
        raise ValueError(
            f"task {task_id!r}: ground truth {str(truth)[-80:]!r} is not a number; "
            "expected e.g. 72, '1,250' or '... #### 72'"
        )
    return expected
