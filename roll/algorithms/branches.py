"""Episodes that branch: some turns are continued more than once, by retries, parallel agents or edited histories.

    turn 0 -- turn 1          branches: 0 1 and 0 2. Turn 0 is in both of them
          +-- turn 2

Whatever goes from one token or turn to the next sees each branch as a sequence of its own, with the episode's reward at
its end; a token that branches share gets the mean of what they say. B rows (episodes) of T tokens or N turns, S
branches of at most L of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.masking import at_least_float32


@dataclass(frozen=True, eq=False)
class Branches:
    """The branches of rows [B, T] (or [B, N]), each a sequence of places in its row."""

    row: Tensor
    """int64 [S], the row of each branch, ascending."""
    position: Tensor
    """int64 [S, L], where in the row each entry is; negative behind the last."""
    width: int
    """T, or N."""

    @classmethod
    def of(cls, walks: Sequence[Sequence[Sequence[int]]], width: int) -> Branches:
        """Return the branches of rows, each row a list of walks and each walk a list of positions."""
        flat = [(row, walk) for row, each in enumerate(walks) for walk in each]
        length = max((len(walk) for _, walk in flat), default=0)
        position = [[*walk, *[-1] * (length - len(walk))] for _, walk in flat]
        return cls(torch.tensor([row for row, _ in flat]), torch.tensor(position).reshape(len(flat), length), width)

    @property
    def mask(self) -> Tensor:
        """Return where there is an entry, bool [S, L]."""
        return self.position >= 0

    def spread(self, column: Tensor) -> Tensor:
        """Lay out a column by branch, [B, T] -> [S, L], 0 behind the last entry."""
        spread_out = column[self.row[:, None], self.position.clamp(min=0)]
        return torch.where(self.mask, spread_out, torch.zeros_like(spread_out))

    def mean(self, along: Tensor) -> Tensor:
        """Return the mean over the branches that have an entry, [S, L] -> [B, T]; 0 where none has it."""
        index = (self.row[:, None] * self.width + self.position)[self.mask]
        rows = int(self.row.max()) + 1 if len(self.row) else 0
        total = along.new_zeros(rows * self.width, dtype=torch.float64)
        total.index_add_(0, index, along[self.mask].to(torch.float64))
        count = torch.bincount(index, minlength=rows * self.width).clamp(min=1)
        return (total / count).to(at_least_float32(along).dtype).view(rows, self.width)

    def mean_total(self, column: Tensor) -> Tensor:
        """Return [B, T] -> [B]: sums along each branch, and their mean over the row's branches."""
        totals = self.spread(at_least_float32(column)).to(torch.float64).sum(1)
        count = torch.bincount(self.row).clamp(min=1)
        return (totals.new_zeros(len(count)).index_add_(0, self.row, totals) / count).to(at_least_float32(column).dtype)

    def ends(self) -> Tensor:
        """Mark the last entry of each branch, bool [B, T]."""
        rows = int(self.row.max()) + 1 if len(self.row) else 0
        marked = torch.zeros(rows, self.width, dtype=torch.bool)
        last = self.mask.sum(1) - 1
        there = last >= 0
        marked[self.row[there], self.position[there, last[there]]] = True
        return marked


def over_branches(
    branches: Branches | None, mask: Tensor, compute: Callable[..., tuple[Tensor, ...]], *columns: Tensor
) -> tuple[Tensor, ...]:
    """Return `compute(*columns, mask)`, columns and mask [B, T]: over each branch by itself, and the means of that.

    None: rows have no branches.
    """
    if branches is None:
        return compute(*columns, mask)
    return tuple(branches.mean(result) for result in compute(*map(branches.spread, columns), branches.spread(mask)))
