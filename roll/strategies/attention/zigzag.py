"""How a packed line is cut for ring attention: 2n pieces, of which rank r of n holds r and 2n - 1 - r.

A query looks back only, so late pieces are more work than early ones; a rank with one of each has about as much work as
the others. The pieces are cut without regard to rows, so rows of any length need no padding of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.strategies.attention.varlen_kernel import RowPlan


def pieces(rank: int, ranks: int) -> tuple[int, int]:
    """Return the two pieces of the line that a rank of the ring holds, in the order in which it holds them."""
    return rank, 2 * ranks - 1 - rank


def zigzag_order(tokens: int, ranks: int) -> Tensor:
    """Return where in the line each token stands that the ranks hold, rank after rank: int64 [tokens].

    `2 * ranks` divides `tokens`.
    """
    order = torch.arange(tokens).view(2 * ranks, -1)
    return order[[piece for rank in range(ranks) for piece in pieces(rank, ranks)]].flatten()


@dataclass(frozen=True)
class Block:
    """Queries of this rank and keys of another that belong to one row. Each query sees at least one of the keys."""

    queries: slice
    """Among this rank's tokens."""
    keys: slice
    """Among the other rank's tokens."""
    offset: int
    """Tokens of the row from the first key to the first query; 0 where both are the same tokens."""


class RingPlan:
    """The rows of a line that the ranks of a ring share, for all layers of a micro-batch."""

    def __init__(self, rows: Sequence[int], rank: int, ranks: int, group: ProcessGroup | None = None) -> None:
        """Lay out `rows`: tokens of each, padding included; `2 * ranks` divides their sum. `rank`: this one's in
        `group`, the ring."""
        self.rank, self.ranks, self.group = rank, ranks, group
        self._bounds = RowPlan(rows).bounds(torch.device("cpu")).tolist()
        self._width = self._bounds[-1] // (2 * ranks)
        self._blocks: dict[tuple[int, int | None], list[Block]] = {}

    def blocks(self, source: int, window: int | None = None) -> list[Block]:
        """Return what this rank computes with the keys of rank `source`; with its own, every query is in one that is
        the first to name it and has offset 0."""
        if (source, window) not in self._blocks:
            self._blocks[source, window] = list(self._made(source, window))
        return self._blocks[source, window]

    def _made(self, source: int, window: int | None) -> Iterator[Block]:
        width = self._width
        for mine, i in enumerate(pieces(self.rank, self.ranks)):
            for theirs, j in enumerate(pieces(source, self.ranks)):
                for start, end in pairwise(self._bounds) if j <= i else ():
                    first, last = max(start, i * width), min(end, (i + 1) * width)  # queries, as places in the line
                    oldest, newest = max(start, j * width), min(end, (j + 1) * width)  # keys
                    if window is not None:
                        oldest, last = max(oldest, first - window + 1), min(last, newest - 1 + window)
                    if first < last and oldest < newest:
                        here, there = (mine - i) * width, (theirs - j) * width
                        queries, keys = slice(here + first, here + last), slice(there + oldest, there + newest)
                        yield Block(queries, keys, first - oldest)
