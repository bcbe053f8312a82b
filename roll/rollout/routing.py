"""Which engine gets which request. O(log n) per request.

An engine that has read a prompt should get the other requests with that prompt too: a request goes to the engine that
has seen its prefix, or else to the least loaded. When every engine is full, slots become free one by one all over the
engines; in plain order of the plan, siblings would end up everywhere. So a slot that becomes free goes to the first
request whose prefix that engine has; else to the first whose prefix no engine has; else to the first of all.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

_Entry = tuple[tuple[int, ...], int, str]  # (plan position, arrival, request id)


class Router:
    """Holds the requests that wait, and counts what runs where.

    Args:
        capacity: requests that one engine works on at once.
    """

    def __init__(self, engines: int, capacity: int) -> None:
        self.load = [0] * engines
        self._capacity = capacity
        self._up = [True] * engines
        # (load, rank) of every change since the heap was made; entries that no longer hold are skipped.
        self._loads = [(0, rank) for rank in range(engines)]
        self._homes: OrderedDict[str, int] = OrderedDict()  # The engine that has seen a prefix
        self._most_homes = 4 * engines * capacity + 1024
        self._waiting: dict[str, str] = {}
        """Affinities by request id. Heaps may hold more; entries that aren't here are skipped."""
        self._all: list[_Entry] = []
        self._fresh: list[_Entry] = []  # Those whose prefix no engine has
        self._siblings: dict[str, dict[str, _Entry]] = {}
        """The same by affinity and request id, until one of them is placed or none waits any more."""
        self._at_home: dict[int, list[_Entry]] = {}  # Those whose prefix this engine has
        self._arrivals = 0

    def add(self, request_id: str, order: tuple[int, ...], affinity: str) -> None:
        """Add a request that waits."""
        self._arrivals += 1
        entry = (order, self._arrivals, request_id)
        self._waiting[request_id] = affinity
        heapq.heappush(self._all, entry)
        home = self._homes.get(affinity)
        if home is None:
            self._add_fresh(entry, affinity)
        else:
            heapq.heappush(self._at_home.setdefault(home, []), entry)

    def discard(self, request_id: str) -> None:
        """Remove a request that was placed or given up."""
        affinity = self._waiting.pop(request_id, "")
        siblings = self._siblings.get(affinity)
        if siblings is not None:
            siblings.pop(request_id, None)
            if not siblings:
                del self._siblings[affinity]

    def place(self, freed: int | None = None) -> tuple[str, int] | None:
        """Return the next request and its engine, which then has it; None when nothing waits or no engine has room.

        Args:
            freed: an engine that has just got room. Prefixes with a home elsewhere keep it when a request comes here.
        """
        rank: int | None
        if freed is not None and self._has_room(freed):
            chosen, rank = self._first_for(freed), freed
            home = None if chosen is None else self._homes.get(self._waiting[chosen], freed)
        else:
            chosen = self._top(self._all)
            home = rank = None if chosen is None else self._best_for(self._waiting[chosen])
        if chosen is None or rank is None or home is None:
            return None
        affinity = self._waiting[chosen]
        self.discard(chosen)
        for entry in self._siblings.pop(affinity, {}).values():
            heapq.heappush(self._at_home.setdefault(rank, []), entry)
        if affinity:
            self._homes[affinity] = home
            self._homes.move_to_end(affinity)
            if len(self._homes) > self._most_homes:
                self._homes.popitem(last=False)
        self._change(rank, 1)
        return chosen, rank

    def release(self, rank: int) -> None:
        """Note that a request of this engine is over."""
        assert self.load[rank] > 0, f"engine {rank} has nothing to release"
        self._change(rank, -1)

    def down(self, rank: int) -> None:
        """Send nothing to this engine until `up`, and forget what it had cached."""
        self._up[rank] = False
        for affinity in [a for a, home in self._homes.items() if home == rank]:
            del self._homes[affinity]
        for entry in self._at_home.pop(rank, ()):
            affinity_now = self._waiting.get(entry[2])
            if affinity_now is not None:
                self._add_fresh(entry, affinity_now)

    def up(self, rank: int) -> None:
        """Note that this engine is there (again)."""
        self._up[rank] = True
        heapq.heappush(self._loads, (self.load[rank], rank))

    @property
    def up_ranks(self) -> Iterable[int]:
        """Return engines that are up."""
        return (rank for rank, up in enumerate(self._up) if up)

    def _add_fresh(self, entry: _Entry, affinity: str) -> None:
        heapq.heappush(self._fresh, entry)
        if affinity:
            self._siblings.setdefault(affinity, {})[entry[2]] = entry

    def _has_room(self, rank: int) -> bool:
        return self._up[rank] and self.load[rank] < self._capacity

    def _best_for(self, affinity: str) -> int | None:
        """Return the engine that has seen this prefix if it has room, or else the least loaded."""
        home = self._homes.get(affinity)
        if home is not None and self._has_room(home):
            return home
        while self._loads:
            load, rank = self._loads[0]
            if load == self.load[rank] and self._up[rank]:
                return rank if load < self._capacity else None
            heapq.heappop(self._loads)
        return None

    def _first_for(self, rank: int) -> str | None:
        return self._top(self._at_home.get(rank, [])) or self._top_fresh() or self._top(self._all)

    def _top(self, heap: list[_Entry]) -> str | None:
        while heap and heap[0][2] not in self._waiting:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _top_fresh(self) -> str | None:
        """Return the first request whose prefix no engine has; drop siblings of placed ones on the way."""
        while (top := self._top(self._fresh)) is not None:
            affinity = self._waiting[top]
            if not affinity or affinity in self._siblings:
                return top
            heapq.heappop(self._fresh)
        return None

    def _change(self, rank: int, by: int) -> None:
        self.load[rank] += by
        heapq.heappush(self._loads, (self.load[rank], rank))
        if len(self._loads) > 4 * len(self.load) + 64:
            self._loads = [(load, r) for r, load in enumerate(self.load) if self._up[r]]
            heapq.heapify(self._loads)
