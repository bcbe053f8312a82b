"""Requests that wait for a slot on an engine, and which of them gets a slot that becomes free. O(log n) each.

An engine that has read a prompt should get the other requests with that prompt too. When every engine is full, slots
become free one by one all over the engines; in plain order of the plan, siblings would end up everywhere.
"""

from __future__ import annotations

import heapq

_Entry = tuple[tuple[int, ...], int, str]  # (plan position, arrival, request id)


class WaitingRequests:
    """Waiting requests by position in the plan, by the engine that has their prefix, and those that no engine knows."""

    def __init__(self) -> None:
        self._affinities: dict[str, str] = {}
        """Of what waits, by request id. Heaps may hold more; entries that aren't here are skipped."""
        self._all: list[_Entry] = []
        self._fresh: list[_Entry] = []  # Those whose prefix no engine has
        self._siblings: dict[str, dict[str, _Entry]] = {}
        """The same by affinity and request id, until one of them is placed or none waits any more."""
        self._at_home: dict[int, list[_Entry]] = {}  # Those whose prefix this engine has
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._affinities)

    def add(self, request_id: str, order: tuple[int, ...], affinity: str, home: int | None) -> None:
        """Add a request; `home` is the engine that has the prefix, None if there is none."""
        self._arrivals += 1
        entry = (order, self._arrivals, request_id)
        self._affinities[request_id] = affinity
        heapq.heappush(self._all, entry)
        if home is not None:
            heapq.heappush(self._at_home.setdefault(home, []), entry)
            return
        heapq.heappush(self._fresh, entry)
        if affinity:
            self._siblings.setdefault(affinity, {})[request_id] = entry

    def discard(self, request_id: str) -> None:
        """Remove a request that was placed or given up."""
        affinity = self._affinities.pop(request_id, "")
        siblings = self._siblings.get(affinity)
        if siblings is not None:
            siblings.pop(request_id, None)
            if not siblings:
                del self._siblings[affinity]

    def settle(self, affinity: str, home: int) -> None:
        """Note that this engine has the prefix from now on: what waits with it belongs there."""
        for entry in self._siblings.pop(affinity, {}).values():
            heapq.heappush(self._at_home.setdefault(home, []), entry)

    def lose(self, home: int) -> None:
        """Note that this engine is gone, and the prefixes it had."""
        for entry in self._at_home.pop(home, ()):
            affinity = self._affinities.get(entry[2])
            if affinity is not None:
                heapq.heappush(self._fresh, entry)
                if affinity:
                    self._siblings.setdefault(affinity, {})[entry[2]] = entry

    def first(self) -> str | None:
        """Return the first in the plan."""
        return self._top(self._all)

    def first_for(self, rank: int) -> str | None:
        """Return what should get a free slot on this engine.

        That is the first whose prefix it has; else the first whose prefix no engine has; else the first of all.
        """
        return self._top(self._at_home.get(rank, [])) or self._top_fresh() or self.first()

    def _top(self, heap: list[_Entry]) -> str | None:
        while heap and heap[0][2] not in self._affinities:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _top_fresh(self) -> str | None:
        """Return the first request whose prefix no engine has; drop siblings of placed ones on the way."""
        while (top := self._top(self._fresh)) is not None:
            affinity = self._affinities[top]
            if not affinity or affinity in self._siblings:
                return top
            heapq.heappop(self._fresh)
        return None
