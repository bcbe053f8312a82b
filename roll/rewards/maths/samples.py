"""Sample points for letters, and when two numbers are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from roll.rewards.maths.evaluation import DIGITS, TooHard, Undefined, context, numeric
from roll.rewards.maths.forms import letters, walk
from roll.rewards.maths.nodes import Node


def points(names: frozenset[str], count: int) -> Iterator[dict[str, Any]]:
    """Give values of letters: first positive, then of both signs; the same for a name in every expression."""
    ctx = context()
    for i in range(count):
        point = {"log": ctx.mpf(1)}
        for name in names:
            digest = hashlib.sha256(f"{name} {i}".encode()).digest()
            value = ctx.mpf(int.from_bytes(digest[:8], "big")) / 2**64 * 2 + ctx.mpf("0.3")
            point[name] = -value if i >= count // 2 and digest[8] % 2 else value
        yield point


def integer_points(names: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Give whole values of letters."""
    ctx = context()
    for i in range(1, 13):
        point = {"log": ctx.mpf(1)}
        for j, name in enumerate(sorted(names)):
            point[name] = ctx.mpf(i + j * (i % 3))
        yield point


def both(answer: Node, gold: Node, point: dict[str, Any], imaginary: bool) -> tuple[Any, Any] | None:
    """Return both values at a point, or None where one has none, or none that is real."""
    try:
        pair = numeric(answer, point), numeric(gold, point)
    except Undefined:
        return None
    if not is_finite(*pair):
        return None
    if not imaginary and not all(isinstance(value, context().mpf) for value in pair):
        return None
    return pair


def is_finite(*values: Any) -> bool:
    """Return whether all values are finite."""
    return all(context().isfinite(value) for value in values)


def close(a: Any, b: Any) -> bool:
    """Return whether two values to 60 digits are one, after some cancellation."""
    return bool(abs(a - b) <= context().mpf(10) ** (20 - DIGITS) * max(abs(a), abs(b), 10**-20))


def is_hard(node: Node) -> bool:
    """Return whether a value in an answer, with its letters at a sample point, is too large to compute."""
    (point,) = points(letters(node), 1)
    for child in walk(node):
        try:
            numeric(child, point)
        except TooHard:
            return True
        except Undefined:
            continue
    return False


def same_number(answer: Fraction, gold: Fraction, decimal: bool, powers: bool = False) -> bool:
    """Return whether two numbers are equal; six decimals are enough when one is written as a decimal.

    But 0 is no number that is written with a power of ten. Where six decimals leave nothing of the gold one
    (`6.63e-34`), six digits have to agree, and three in any case.
    """
    if not decimal or answer == gold:
        return answer == gold
    if powers and 0 in (answer, gold):
        return False
    error, size = abs(answer - gold), max(abs(answer), abs(gold))
    if gold != 0 and round(gold, 6) == 0:
        return error * 10**6 <= size
    return round(answer, 6) == round(gold, 6) and (0 in (answer, gold) or error * 200 <= size)
