"""The form of an answer pair, and how pairs written by hand become such."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Case = tuple[str, tuple[str, ...], tuple[str, ...]]
"""A gold answer, answers that are equal to it, answers that aren't."""


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """A gold answer, the inside of a box, and whether they are equal."""

    kind: str
    gold: str
    answer: str
    equal: bool


def written(kind: str, cases: Iterable[Case]) -> list[AnswerPair]:
    """Return the pairs of cases that are written by hand."""
    pairs = []
    for gold, right, wrong in cases:
        pairs += [AnswerPair(kind, gold, answer, True) for answer in right]
        pairs += [AnswerPair(kind, gold, answer, False) for answer in wrong]
    return pairs
