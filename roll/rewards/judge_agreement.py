"""How well a judge's scores agree with given labels: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """Figures over the rows that got a score; NaN where one isn't defined."""

    rows: int
    accuracy: float
    """Share of rows whose score is nearest to their own label, of all labels that occur."""
    kappa: float
    """Cohen's kappa of the same: 1 complete agreement, 0 what chance gives."""
    pearson: float
    spearman: float
    mean_difference: float
    """Score less label: above 0 where the judge is lenient."""


def agreement(scores: Sequence[float], labels: Sequence[float]) -> Agreement:
    """Compare scores with labels on the same scale; raises `ValueError` without rows."""
    if not scores or len(scores) != len(labels):
        raise ValueError(f"{len(scores)} scores and {len(labels)} labels: there is nothing to compare")
    classes = sorted(set(labels))
    nearest = [min(classes, key=lambda label: (abs(label - score), label)) for score in scores]
    count = len(scores)
    observed = sum(a == b for a, b in zip(nearest, labels, strict=True)) / count
    chance = sum(nearest.count(label) * labels.count(label) for label in classes) / count**2
    return Agreement(
        rows=count,
        accuracy=observed,
        kappa=(observed - chance) / (1 - chance) if chance < 1 else math.nan,
        pearson=correlation(scores, labels),
        spearman=correlation(_ranks(scores), _ranks(labels)),
        mean_difference=(math.fsum(scores) - math.fsum(labels)) / count,
    )


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's correlation; NaN where one side doesn't vary."""
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    xx = math.fsum((x - mean_x) ** 2 for x in xs)
    yy = math.fsum((y - mean_y) ** 2 for y in ys)
    xy = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return xy / math.sqrt(xx * yy) if xx > 0 and yy > 0 else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]
