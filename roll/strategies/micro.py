"""Cutting a rank's rows into micro-batches, and laying one out for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.strategies.base import LossFn
from roll.types.batch import Denominators, TokenBatch


def plan_micro_batches(lengths: Sequence[int], *, max_rows: int | None, max_tokens: int | None) -> list[list[int]]:
    """Rows sorted by length and cut so that a padded micro-batch stays within the limits.

    Args:
        lengths: tokens per row.
        max_rows: rows in a micro-batch, or None.
        max_tokens: padded tokens in a micro-batch, or None; a row longer than that is alone in its micro-batch.

    Returns:
        Row positions per micro-batch, longest rows first: a run that would not fit in memory fails at its start.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts: list[list[int]] = []
    for i in order:
        part = parts[-1] if parts else None
        # The first row of a part is its longest, so it sets the padded width.
        fits = part is not None and (max_rows is None or len(part) < max_rows)
        if fits and part is not None and max_tokens is not None:
            fits = lengths[part[0]] * (len(part) + 1) <= max_tokens
        if fits and part is not None:
            part.append(i)
        else:
            parts.append([i])
    return parts


@dataclass(frozen=True)
class PaddedLayout:
    """A right-padded micro-batch and which of its tokens are scored."""

    ids: Tensor
    """int64 [B, T]"""
    mask: Tensor
    """int64 [B, T]"""
    positions: Tensor
    """int64 [B, T]"""
    index: Tensor
    """int64 [S], flattened [B * T] position whose hidden state predicts each scored token."""
    targets: Tensor
    """int64 [S], the scored tokens."""
    flat: Tensor
    """int64 [S], where each scored token stands in the ragged columns."""


def lay_out(batch: TokenBatch, device: torch.device) -> PaddedLayout:
    """Right-padded layout in which every action token is scored."""
    ids = batch.pad("token_ids")
    valid = batch.valid()
    acting = batch.pad("action_mask", False)
    assert not acting[:, 0].any(), "the first token of a row has no context to be chosen in"
    flat_position = torch.zeros(valid.shape, dtype=torch.int64)
    flat_position[valid] = torch.arange(batch.num_tokens)
    rows, columns = acting.nonzero(as_tuple=True)
    return PaddedLayout(
        ids=ids.to(device),
        mask=valid.long().to(device),
        positions=torch.arange(ids.shape[1]).expand_as(ids).to(device),
        index=(rows * ids.shape[1] + columns - 1).to(device),
        targets=ids[rows, columns].to(device),
        flat=flat_position[rows, columns].to(device),
    )


def filler(batch: TokenBatch) -> TokenBatch:
    """A row without any meaning, for a rank that must take part in a collective pass but has nothing to compute."""
    return TokenBatch(
        row_ids=("filler",),
        group_ids=("filler",),
        offsets=torch.tensor([0, 2]),
        token_ids=torch.zeros(2, dtype=batch.token_ids.dtype),
        action_mask=torch.tensor([False, True]),
    )


def rows_to_compute(batch: TokenBatch, loss_fn: LossFn) -> list[int]:
    """Rows that a training step must run: those with a gradient, and at least one to report on."""
    if loss_fn.has_gradient is None:
        return list(range(len(batch)))
    return loss_fn.has_gradient(batch).nonzero()[:, 0].tolist() or [0]


def denominators(batch: TokenBatch) -> Denominators:
    """This rank's share of the mini-batch's tokens and sequences; rows of weight 0 don't count."""
    counted = batch.loss_mask if batch.loss_mask is not None else batch.action_mask
    rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    per_row = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, rows, counted.double())
    if batch.loss_weight is not None:
        per_row = torch.where(batch.loss_weight != 0, per_row, torch.zeros_like(per_row))
    return Denominators(tokens=float(per_row.sum()), sequences=float((per_row > 0).sum()))
