"""Metrics that add up: micro-batches, ranks and mini-batches merge into one number per name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Metrics:
    """Running sums, weighted means, minima and maxima by name; `merge` is associative and order-free up to rounding."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, float] = {}
        self._max: dict[str, float] = {}
        self._min: dict[str, float] = {}

    def add_mean(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add `total` (already a weighted sum) and its `weight` to the mean called `name`; weight 0 leaves no trace."""
        old_total, old_weight = self._means.get(name, (0.0, 0.0))
        self._means[name] = (old_total + float(total), old_weight + float(weight))

    def add_sum(self, name: str, value: float) -> None:
        """Add to a counter."""
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def add_max(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self._max[name] = max(self._max.get(name, float("-inf")), float(value))

    def add_min(self, name: str, value: float) -> None:
        """Keep the smallest value."""
        self._min[name] = min(self._min.get(name, float("inf")), float(value))

    def merge(self, other: Metrics) -> Metrics:
        """Fold `other` into this one and return it."""
        for name, (total, weight) in other._means.items():
            self.add_mean(name, total, weight)
        for name, value in other._sums.items():
            self.add_sum(name, value)
        for name, value in other._max.items():
            self.add_max(name, value)
        for name, value in other._min.items():
            self.add_min(name, value)
        return self

    @staticmethod
    def merged(parts: Iterable[Metrics]) -> Metrics:
        """All parts folded into a new one."""
        result = Metrics()
        for part in parts:
            result.merge(part)
        return result

    def update(self, values: Mapping[str, float]) -> None:
        """Set plain values (each a mean over itself)."""
        for name, value in values.items():
            self._means[name] = (float(value), 1.0)

    def result(self) -> dict[str, float]:
        """One float per name, sorted by name. A mean without weight is left out."""
        values = {name: total / weight for name, (total, weight) in self._means.items() if weight}
        values.update(self._sums)
        values.update(self._max)
        values.update(self._min)
        return dict(sorted(values.items()))
