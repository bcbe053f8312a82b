"""Metrics that add up: micro-batches, ranks and mini-batches merge into one number per name.

What a loss measures is on the device. It may stay there: scalars that are tensors are only kept, and all of them are
read together when somebody asks for a result or sends it elsewhere. Each reading by itself would make the host wait
until the device has done all it was given, and the device then wait for the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Scalar: TypeAlias = "float | Tensor"
"""A number, or a tensor [] on any device; its gradient isn't followed."""


class Metrics:
    """Running sums, weighted means, minima and maxima by name; `merge` is associative and order-free up to rounding."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, float] = {}
        self._max: dict[str, float] = {}
        self._min: dict[str, float] = {}
        self._unread: list[tuple[str, str, tuple[Scalar, ...]]] = []  # (kind, name, numbers some of which are tensors)

    def add_mean(self, name: str, total: Scalar, weight: Scalar = 1.0) -> None:
        """Add `total` (already a weighted sum) and its `weight` to the mean called `name`; weight 0 leaves no trace."""
        self._add("mean", name, total, weight)

    def add_sum(self, name: str, value: Scalar) -> None:
        """Add to a counter."""
        self._add("sum", name, value)

    def add_max(self, name: str, value: Scalar) -> None:
        """Keep the largest value; -inf, the largest of nothing, leaves no trace."""
        self._add("max", name, value)

    def add_min(self, name: str, value: Scalar) -> None:
        """Keep the smallest value; inf, the smallest of nothing, leaves no trace."""
        self._add("min", name, value)

    def merge(self, other: Metrics) -> Metrics:
        """Fold `other` into this one and return it."""
        for name, (total, weight) in other._means.items():
            self._fold("mean", name, total, weight)
        for kind, values in (("sum", other._sums), ("max", other._max), ("min", other._min)):
            for name, value in values.items():
                self._fold(kind, name, value)
        self._unread += other._unread
        return self

    @staticmethod
    def merged(parts: Iterable[Metrics]) -> Metrics:
        """Fold all parts into a new one."""
        result = Metrics()
        for part in parts:
            result.merge(part)
        return result

    def update(self, values: Mapping[str, float]) -> None:
        """Set plain values (each a mean over itself)."""
        self._read()
        for name, value in values.items():
            self._means[name] = (float(value), 1.0)

    def result(self) -> dict[str, float]:
        """Return one float per name, sorted by name. A mean without weight is left out."""
        self._read()
        values = {name: total / weight for name, (total, weight) in self._means.items() if weight}
        values.update(self._sums)
        values.update(self._max)
        values.update(self._min)
        return dict(sorted(values.items()))

    def __getstate__(self) -> dict[str, Any]:
        self._read()
        return self.__dict__

    def _add(self, kind: str, name: str, *numbers: Scalar) -> None:
        if any(hasattr(number, "detach") for number in numbers):
            detached = (number.detach() if hasattr(number, "detach") else float(number) for number in numbers)
            self._unread.append((kind, name, tuple(detached)))
        else:
            self._fold(kind, name, *map(float, numbers))

    def _fold(self, kind: str, name: str, value: float, weight: float = 1.0) -> None:
        if kind == "mean":
            old_total, old_weight = self._means.get(name, (0.0, 0.0))
            self._means[name] = (old_total + value, old_weight + weight)
        elif kind == "sum":
            self._sums[name] = self._sums.get(name, 0.0) + value
        elif kind == "max" and value != -math.inf:
            self._max[name] = max(self._max.get(name, -math.inf), value)
        elif kind == "min" and value != math.inf:
            self._min[name] = min(self._min.get(name, math.inf), value)

    def _read(self) -> None:
        """Bring what is on devices to the host, in one transfer for each of them, and fold it in the order it came."""
        if not self._unread:
            return
        import torch

        unread, self._unread = self._unread, []
        tensors: dict[Any, list[Tensor]] = {}
        for _, _, numbers in unread:
            for number in numbers:
                if not isinstance(number, float):
                    tensors.setdefault(number.device, []).append(number.double().reshape(()))
        read = {device: iter(torch.stack(scalars).tolist()) for device, scalars in tensors.items()}
        for kind, name, numbers in unread:
            self._fold(kind, name, *(n if isinstance(n, float) else next(read[n.device]) for n in numbers))
