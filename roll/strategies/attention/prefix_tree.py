"""Rows that begin alike as a tree of token segments, each of which is computed once.

The responses of a prompt repeat its tokens, and the rows of an agent's episode those of its earlier turns. Causal
attention gives a token the same hidden state in every row that is equal up to it, so the state, the log-probs that
follow from it and their gradients are those of the rows by themselves. Rows are compared by their token ids alone.
Known as prefix grouper (arXiv:2506.05433) and tree training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from roll.types.batch import TokenBatch

MAX_TREE_SHARE = 0.85
"""Rows are laid out as a tree if it has at most this share of their tokens: attention over it takes more calls."""

LONGEST_BRANCH = 512
"""Tokens of a segment that continues another; a longer one becomes a chain, so that no mask is as large as its
square."""


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Segments in depth-first order, as they lie in a packed line: what follows a segment comes right behind it."""

    lengths: tuple[int, ...]
    """Tokens of each segment."""
    parents: tuple[int, ...]
    """The segment that each continues, which comes before it; -1 where a row begins."""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Place in the line of each segment's first token."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Place in the line after the last token of all that continues a segment, by whatever number of steps."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        for segment in reversed(range(len(ends))):
            if self.parents[segment] >= 0:
                ends[self.parents[segment]] = max(ends[self.parents[segment]], ends[segment])
        return tuple(ends)

    @property
    def num_tokens(self) -> int:
        """Return tokens of the whole line."""
        return sum(self.lengths)

    def ancestors(self, segment: int) -> tuple[int, ...]:
        """Return the segments that come before one in its rows, from their beginning."""
        result = []
        while (segment := self.parents[segment]) >= 0:
            result.append(segment)
        return tuple(reversed(result))

    def with_padding(self, tokens: int) -> PrefixTree:
        """Return the tree with a row of padding by itself at the end."""
        return PrefixTree((*self.lengths, tokens), (*self.parents, -1)) if tokens else self


@dataclass(frozen=True)
class SortedRows:
    """Rows in an order in which those that begin alike are neighbours."""

    rows: list[int]
    """Positions in the batch."""
    lengths: list[int]
    """Tokens of each, in this order."""
    common: list[int]
    """Tokens at the beginning that each has in common with the one before it; 0 for the first."""

    @cached_property
    def _sums(self) -> list[int]:
        added = [length - same for length, same in zip(self.lengths, self.common, strict=True)]
        return list(accumulate(added, initial=0))

    def cost(self, start: int, stop: int) -> int:
        """Return the tokens to compute of a part of the rows; in another than sorted order, no fewer than that."""
        return self._sums[stop] - self._sums[start] + self.common[start]


def sort_rows(batch: TokenBatch, units: Sequence[Sequence[int]] | None = None) -> SortedRows:
    """Sort rows by their token ids; with `units` these, by their first rows in that order, each kept together."""
    ids = batch.token_ids.cpu().numpy()
    bounds = batch.offsets.tolist()
    parts = [ids[start:end] for start, end in pairwise(bounds)]
    # Bytes compare as the ids do, if the highest comes first.
    keys = [part.astype(">u4").tobytes() for part in parts]

    def place(row: int) -> tuple[bytes, int]:
        return keys[row], row

    if units is None:
        order = sorted(range(len(parts)), key=place)
    else:
        inside = sorted((sorted(unit, key=place) for unit in units), key=lambda unit: place(unit[0]))
        order = [row for unit in inside for row in unit]
    common = [0] * len(order)
    for i in range(1, len(order)):
        left, right = parts[order[i - 1]], parts[order[i]]
        shorter = min(len(left), len(right))
        different = (left[:shorter] != right[:shorter]).nonzero()[0]
        common[i] = int(different[0]) if len(different) else shorter
    return SortedRows(order, [len(parts[row]) for row in order], common)


def tree_of(batch: TokenBatch) -> tuple[PrefixTree, Tensor, Tensor]:
    """Return the tree of all rows of a batch, and where their tokens are.

    Returns:
        (tree, int64 [N] the place in the tree's line of each token of the batch, int64 [tree tokens] one token of the
        batch at each place of the line).
    """
    sorted_rows = sort_rows(batch)
    offsets = batch.offsets.tolist()
    position_of = torch.empty(batch.num_tokens, dtype=torch.int64)
    lengths: list[int] = []
    parents: list[int] = []
    source, end = [], 0
    # Rows start..stop-1 of the order, which are equal up to `depth`, where they continue segment `parent`.
    waiting = [(start, stop, 0, -1) for start, stop in _split(sorted_rows.common, 0, len(sorted_rows.rows), 0)]
    waiting.reverse()
    while waiting:
        start, stop, depth, parent = waiting.pop()
        same = min(sorted_rows.common[start + 1 : stop], default=sorted_rows.lengths[start])
        longest = same - depth if parent < 0 else LONGEST_BRANCH
        for first in range(depth, same, max(longest, 1)):
            last = min(same, first + longest)
            here = torch.arange(end, end + last - first)
            for i in range(start, stop):
                at = offsets[sorted_rows.rows[i]]
                position_of[at + first : at + last] = here
            at = offsets[sorted_rows.rows[start]]
            source.append(torch.arange(at + first, at + last))
            lengths.append(last - first)
            parents.append(parent)
            parent, end = len(lengths) - 1, end + last - first
        # Rows that end here come first in the order.
        while start < stop and sorted_rows.lengths[start] == same:
            start += 1
        waiting += [(*part, same, parent) for part in reversed(_split(sorted_rows.common, start, stop, same))]
    return PrefixTree(tuple(lengths), tuple(parents)), position_of, torch.cat(source)


def _split(common: Sequence[int], start: int, stop: int, depth: int) -> list[tuple[int, int]]:
    """Cut rows start..stop-1 where neighbours have no more than `depth` tokens in common."""
    if start == stop:
        return []
    cuts = [start, *(i for i in range(start + 1, stop) if common[i] <= depth), stop]
    return list(pairwise(cuts))


def plan_shared_batches(
    batch: TokenBatch, units: Sequence[Sequence[int]], *, max_rows: int | None, max_tokens: int | None
) -> list[list[int]] | None:
    """Cut rows into micro-batches in which rows that begin alike are together; None if too few tokens are shared.

    Args:
        batch: the rows.
        units: rows that stay together; a unit beyond the limit is alone in its micro-batch.
        max_rows: rows of an ordinary micro-batch: here as many tokens are computed as if each were the longest.
        max_tokens: tokens computed in a micro-batch; counts in place of `max_rows`.

    Returns:
        Row positions per micro-batch, those with most tokens to compute first.
    """
    if len(batch) < 2:
        return None
    sorted_rows = sort_rows(batch, units)
    if sorted_rows.cost(0, len(sorted_rows.rows)) > MAX_TREE_SHARE * sum(sorted_rows.lengths):
        return None
    if max_tokens is None:
        assert max_rows is not None, "a plan needs a limit"
        max_tokens = max_rows * max(sorted_rows.lengths)
    bins: list[list[tuple[int, int]]] = []
    costs: list[int] = []
    for part in _subtrees(sorted_rows, units, max_tokens):
        joined = (bins[-1][-1][0], part[1]) if bins and bins[-1][-1][1] == part[0] else None
        if joined is not None and costs[-1] - sorted_rows.cost(*bins[-1][-1]) + sorted_rows.cost(*joined) <= max_tokens:
            costs[-1] += sorted_rows.cost(*joined) - sorted_rows.cost(*bins[-1][-1])
            bins[-1][-1] = joined
            continue
        own = sorted_rows.cost(*part)
        index = next((i for i, cost in enumerate(costs) if cost + own <= max_tokens), None)
        if index is None:
            bins.append([part])
            costs.append(own)
        else:
            bins[index].append(part)
            costs[index] += own
    order = sorted(range(len(bins)), key=lambda i: (-costs[i], i))
    return [sorted(row for start, stop in bins[i] for row in sorted_rows.rows[start:stop]) for i in order]


def _subtrees(sorted_rows: SortedRows, units: Sequence[Sequence[int]], limit: int) -> list[tuple[int, int]]:
    """Cut the rows into the largest subtrees within the limit, or single units; in order."""
    unit_of = {row: number for number, unit in enumerate(units) for row in unit}
    numbers = [unit_of[row] for row in sorted_rows.rows]
    begins = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]), len(numbers)]
    waiting, cut = [(0, len(begins) - 1)], []
    while waiting:
        first, last = waiting.pop()
        start, stop = begins[first], begins[last]
        if last - first == 1 or sorted_rows.cost(start, stop) <= limit:
            cut.append((start, stop))
            continue
        inner = range(first + 1, last)
        least = min(sorted_rows.common[begins[i]] for i in inner)
        cuts = [first, *(i for i in inner if sorted_rows.common[begins[i]] == least), last]
        waiting += reversed(list(pairwise(cuts)))
    return cut
