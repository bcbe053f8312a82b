"""Which engine gets a request: the one that has seen its prefix, or else the least loaded. O(log E) per request."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable


class Router:
    """Counts what runs where.

    Args:
        capacity: requests that one engine works on at once.
    """

    def __init__(self, engines: int, capacity: int) -> None:
        if engines < 1 or capacity < 1:
            raise ValueError(f"a router needs at least one engine and one slot, got {engines} and {capacity}")
        self.capacity = capacity
        self.load = [0] * engines
        self._up = [True] * engines
        # (load, rank) of every change since the heap was made; entries that no longer hold are skipped.
        self._heap = [(0, rank) for rank in range(engines)]
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._most_homes = 4 * engines * capacity + 1024

    def place(self, affinity: str) -> int | None:
        """Take room on this prefix's engine, or else on the least loaded; return it, None when all are full or down."""
        home = self.home(affinity)
        rank = home if home is not None and self.has_room(home) else self._least_loaded()
        if rank is None:
            return None
        if affinity:
            self._settle(affinity, rank)
        self._change(rank, 1)
        return rank

    def take(self, rank: int, affinity: str) -> None:
        """Count a request on this engine; its prefix stays at home elsewhere if it has a home."""
        if affinity:
            self._settle(affinity, self._homes.get(affinity, rank))
        self._change(rank, 1)

    def home(self, affinity: str) -> int | None:
        """Return the engine that has seen this prefix."""
        return self._homes.get(affinity) if affinity else None

    def has_room(self, rank: int) -> bool:
        """Return whether this engine can take one more."""
        return self._up[rank] and self.load[rank] < self.capacity

    def release(self, rank: int) -> None:
        """Note that a request of this engine is over."""
        assert self.load[rank] > 0, f"engine {rank} has nothing to release"
        self._change(rank, -1)

    def down(self, rank: int) -> None:
        """Send nothing to this engine until `up`, and forget what it had cached."""
        self._up[rank] = False
        for affinity in [a for a, home in self._homes.items() if home == rank]:
            del self._homes[affinity]

    def up(self, rank: int) -> None:
        """Note that this engine is there (again)."""
        self._up[rank] = True
        heapq.heappush(self._heap, (self.load[rank], rank))

    @property
    def up_ranks(self) -> Iterable[int]:
        """Engines that are up."""
        return (rank for rank, up in enumerate(self._up) if up)

    def _settle(self, affinity: str, rank: int) -> None:
        self._homes[affinity] = rank
        self._homes.move_to_end(affinity)
        if len(self._homes) > self._most_homes:
            self._homes.popitem(last=False)

    def _least_loaded(self) -> int | None:
        while self._heap:
            load, rank = self._heap[0]
            if load == self.load[rank] and self._up[rank]:
                return rank if load < self.capacity else None
            heapq.heappop(self._heap)
        return None

    def _change(self, rank: int, by: int) -> None:
        self.load[rank] += by
        heapq.heappush(self._heap, (self.load[rank], rank))
        if len(self._heap) > 4 * len(self.load) + 64:
            self._heap = [(load, r) for r, load in enumerate(self.load) if self._up[r]]
            heapq.heapify(self._heap)
