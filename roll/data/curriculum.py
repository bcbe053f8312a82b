"""The order of a domain's rows within an epoch: random, by a column's difficulty, or by recent success."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.configs.schema.worker_config import CurriculumArgs
from roll.utils.rows import DataError, column_value
from roll.utils.seeding import keyed_rng, stable_hash

_MEMORY = 0.5
"""Weight of the last group in a row's running success rate."""


def difficulty_of(row: Mapping[str, Any], column: str) -> float:
    """Return a row's difficulty; raises `DataError` unless it is a number, or the text of one."""
    value = column_value(row, column)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"the difficulty (curriculum column {column!r}) is {value!r:.60}, expected a number")
    return number


def shuffled(count: int, seed: int, domain: str, epoch: int) -> NDArray[np.int64]:
    """Return the positions 0 to `count` - 1 in the random order of an epoch."""
    return keyed_rng(seed, "shuffle", domain, epoch).permutation(count)


def by_difficulty(difficulty: Sequence[float], window: float, seed: int, domain: str, epoch: int) -> NDArray[np.int64]:
    """Return positions by ascending difficulty, each at most about `window` x count ranks from its own.

    Equal difficulties are in random order, another in every epoch.
    """
    count = len(difficulty)
    mixed = shuffled(count, seed, domain, epoch)
    ranked = mixed[np.argsort(np.asarray(difficulty, dtype=np.float64)[mixed], kind="stable")]
    if not window:
        return ranked
    moved = np.arange(count) + keyed_rng(seed, "curriculum", domain, epoch).uniform(0.0, window * count, count)
    return ranked[np.argsort(moved, kind="stable")]


class SuccessRates:
    """Running success rates of the rows that were played, and which rows they pass over.

    What was observed since the last `apply` doesn't act yet: a step's draws don't depend on which group was ready
    first.
    """

    def __init__(self, args: CurriculumArgs, seed: int) -> None:
        self._min_share, self._seed = args.min_share, seed
        self._rates: dict[str, float] = {}
        self._pending: list[tuple[str, float]] = []
        self._lock = threading.Lock()  # groups end in the engines' thread

    def observe(self, task_id: str, success: float) -> None:
        """Note which share of a group's responses solved the row with this base id."""
        with self._lock:
            self._pending.append((task_id, success))

    def apply(self) -> None:
        """Let what was observed act from the next draw on; the order of the observations doesn't matter."""
        with self._lock:
            pending, self._pending = sorted(self._pending), []
        for task_id, success in pending:
            before = self._rates.get(task_id, success)
            self._rates[task_id] = before + _MEMORY * (success - before)

    def passes_over(self, task_id: str, epoch: int) -> bool:
        """Return whether a row is left out of an epoch."""
        rate = self._rates.get(task_id)
        if rate is None:
            return False
        share = max(self._min_share, 4 * rate * (1 - rate))
        return stable_hash(self._seed, "curriculum", task_id, epoch) >= share * 2.0**64

    @property
    def mean(self) -> float | None:
        """Mean rate of the rows that were played."""
        return math.fsum(self._rates.values()) / len(self._rates) if self._rates else None

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain JSON values."""
        return {"rates": dict(self._rates), "pending": [list(item) for item in self._pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._rates = {str(task_id): float(rate) for task_id, rate in state["rates"].items()}
        self._pending = [(str(task_id), float(success)) for task_id, success in state["pending"]]
