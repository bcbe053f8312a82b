"""Statistics of the rows that share a prompt (or a state, or a tag).

A group is given by an int64 index per row. All sums run over sorted values in float64, so a group's
statistics are bit-identical in whatever order, and from whichever engine, its members arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.masking import require_shape


@dataclass(frozen=True, eq=False)
class GroupMoments:
    """Per row, the statistics of its group; all [B]."""

    mean: Tensor
    """float64; exactly the common value when all members agree."""
    std: Tensor
    """float64, unbiased; exactly 0 for a group of one and for a group without spread."""
    size: Tensor
    """int64, members of the row's group."""

    @property
    def has_signal(self) -> Tensor:
        """Return bool [B], False where all members have the same value: nothing to learn from comparing them."""
        return self.std > 0


def index_of(names: Sequence[str]) -> Tensor:
    """Assign numbers to names, int64 [B]: equal names get equal numbers, counted in order of appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)


def batch_index(values: Tensor) -> Tensor:
    """Return int64 [B] of zeros: the whole batch as one group."""
    return torch.zeros(values.shape[0], dtype=torch.int64, device=values.device)


def joint_index(*indices: Tensor) -> Tensor:
    """Assign numbers to rows, int64 [B]: two are equal exactly when they are in all `indices` (each [B])."""
    return torch.unique(torch.stack(indices, dim=1), dim=0, return_inverse=True)[1]


def group_sum(values: Tensor, inverse: Tensor, num_groups: int) -> Tensor:
    """Return the sum of each group, float64 [G], independent of the order of rows."""
    values = values.to(torch.float64)
    order = values.argsort()
    sums = torch.zeros(num_groups, dtype=torch.float64, device=values.device)
    return sums.index_add(0, inverse[order], values[order])


def group_moments(values: Tensor, group_index: Tensor) -> GroupMoments:
    """Return mean, unbiased std and size of each row's group. `values` [B], `group_index` int64 [B]."""
    require_shape("group_index", group_index, tuple(values.shape), "[B]")
    if values.dim() != 1:
        raise ValueError(f"group statistics need one value per row, got shape {tuple(values.shape)}")
    wide = values.to(torch.float64)
    _, inverse, size = torch.unique(group_index, return_inverse=True, return_counts=True)
    groups = len(size)
    mean = group_sum(wide, inverse, groups) / size
    squares = group_sum((wide - mean[inverse]).square(), inverse, groups)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    # n equal float64 values need not average to that value exactly; without this a group without spread gets 1e-11.
    empty = wide.new_zeros(groups)
    low = empty.scatter_reduce(0, inverse, wide, "amin", include_self=False)
    high = empty.scatter_reduce(0, inverse, wide, "amax", include_self=False)
    mean, std = torch.where(low == high, low, mean), torch.where(low == high, empty, std)
    return GroupMoments(mean=mean[inverse], std=std[inverse], size=size[inverse])
