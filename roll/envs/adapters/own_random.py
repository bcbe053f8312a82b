"""Global random generators, lent to one environment at a time.

Many packages draw from `random` and `numpy.random` as they are. Environments of one process would then take each
other's numbers, and the same seed would play another episode beside others. So each has the generators' states to
itself: they are put in before its code runs and taken out after it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from roll.utils.seeding import stable_hash


def narrow_seed(seed: int, bits: int) -> int:
    """Return a seed that fits `bits` bits. A smaller one is itself, so it plays what it plays without this project.

    A larger one is hashed: two of n seeds play the same episode with a chance of about n^2 / 2^(bits + 1).
    """
    return seed if 0 <= seed < 1 << bits else stable_hash("environment-seed", seed, bits=64) >> (64 - bits)


class OwnRandom:
    """The states of `random` and `numpy.random` (if it is imported) that belong to one environment."""

    def __init__(self, seed: int = 0) -> None:
        self._seed: int | None = seed
        self._states: tuple[Any, Any] = (None, None)

    def seed(self, seed: int) -> None:
        """Begin anew, with a seed of 32 bits."""
        self._seed = seed

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Run a block with these states; those of everybody else are back after it."""
        others = _states()
        try:
            if self._seed is not None:
                random.seed(self._seed)
                if "numpy.random" in sys.modules:
                    sys.modules["numpy.random"].seed(self._seed)
                self._seed = None
            else:
                _put(self._states)
            yield
        finally:
            self._states = _states()
            _put(others)


def _states() -> tuple[Any, Any]:
    numpy_random = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy_random is None else numpy_random.get_state()


def _put(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])
