"""Spread work evenly: partition by cost, bins of limited capacity, cuts of tensors. Deterministic, plain Python."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(order=True)
class _Part:
    cost: float
    items: list[int] = field(default_factory=list)


def partition_balanced(costs: Sequence[float], k: int, equal_size: bool = False) -> list[list[int]]:
    """Split items into `k` parts of nearly equal total cost (Karmarkar-Karp, largest differencing).

    With `equal_size` the numbers of items per part differ by at most one. Returns k lists of item positions, each
    ascending, ordered by their first item; no part is empty when there are at least `k` items.
    """
    if k < 1:
        raise ValueError(f"a partition needs k >= 1 parts, got {k}")
    _check_costs(costs)
    parts = _differencing(costs, k, equal_size) if len(costs) else [[] for _ in range(k)]
    return sorted((sorted(part) for part in parts), key=lambda part: (not part, part[:1]))


def _check_costs(costs: Sequence[float]) -> None:
    for item, cost in enumerate(costs):
        if not cost >= 0:  # this way round NaN is caught too
            raise ValueError(f"costs must be >= 0, item {item} costs {cost}")


def _differencing(costs: Sequence[float], k: int, equal_size: bool) -> list[list[int]]:
    """Repeatedly join the two partial solutions with the widest spread, heavy ends to light ones.

    Empty parts sort last, so p and q parts in use join to min(k, p + q): k items leave no part empty.
    """
    order = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    width = k if equal_size else 1
    queue: list[tuple[float, int, list[_Part]]] = []
    # With equal sizes a partial solution starts with one item in each part; the first may lack some, all others don't.
    first = len(order) % width or width
    cuts = [0, *range(first, len(order) + 1, width)]
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        parts = [_Part(costs[i], [i]) for i in order[start:end]]
        parts += [_Part(0) for _ in range(k - len(parts))]
        parts.sort(reverse=True)
        heapq.heappush(queue, (parts[-1].cost - parts[0].cost, number, parts))
    while len(queue) > 1:
        _, number, wide = heapq.heappop(queue)
        _, _, other = heapq.heappop(queue)
        for heavy, light in zip(wide, reversed(other), strict=True):
            heavy.cost += light.cost
            heavy.items += light.items
        wide.sort(reverse=True)
        heapq.heappush(queue, (wide[-1].cost - wide[0].cost, number, wide))
    return [part.items for part in queue[0][2]]


def pack_first_fit_decreasing(costs: Sequence[float], capacity: float) -> list[list[int]]:
    """Pack items into as few bins of `capacity` as first-fit-decreasing finds (<= 11/9 of the optimum + 6/9).

    An item above the capacity gets a bin of its own. Returns lists of item positions, each ascending, ordered by their
    first item.
    """
    if not capacity > 0:
        raise ValueError(f"bins need a capacity > 0, got {capacity}")
    _check_costs(costs)
    bins: list[list[int]] = []
    used: list[float] = []
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost = costs[item]
        target = next((b for b, load in enumerate(used) if load + cost <= capacity), None)
        if target is None:
            bins.append([item])
            used.append(cost)
        else:
            bins[target].append(item)
            used[target] += cost
    return sorted((sorted(items) for items in bins), key=lambda items: items[0])


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the dimension along which `ranks` cut a tensor of this shape.

    It is the first one, but the rows of stacked experts where there are fewer experts than ranks, or where some ranks
    would get more of them than others. Other dimensions than the first have to be divisible.
    """
    return 1 if len(shape) == 3 and shape[0] % ranks and shape[1] % ranks == 0 else 0
