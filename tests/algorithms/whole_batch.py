"""Losses and sums of a batch that is all here, so that its own mask gives the denominators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from roll.algorithms.aggregation import AggMode, aggregate
from roll.algorithms.losses import PolicyLoss, PolicyLossInputs
from roll.algorithms.masking import as_bool, require_shape, zero_outside
from roll.algorithms.shaping import place_on_last_token
from roll.configs.catalog.entries import implementation
from roll.configs.catalog.loss_table import LOSSES
from roll.types.batch import Denominators


def policy_loss(name: str, inputs: PolicyLossInputs, options: Mapping[str, Any] | None = None) -> PolicyLoss:
    """Return the loss that the catalog calls `name`, with these options."""
    return implementation(LOSSES, name, key="policy_loss")(inputs, **(options or {}))


def denominators_of(mask: Tensor, row_weights: Tensor | None = None) -> Denominators:
    """Return the sizes of a batch that is all here: masked tokens, rows with at least one, not those of weight 0."""
    mask = as_bool(mask)
    if row_weights is not None:
        require_shape("row_weights", row_weights, (mask.shape[0],), "[B]")
        mask = mask & (row_weights != 0).unsqueeze(1)
    rows = float(mask.any(1).sum())
    return Denominators(tokens=float(mask.sum()), sequences=rows, units=rows)


def aggregate_whole(
    loss: Tensor, mask: Tensor, *, mode: AggMode, norm_length: float | None = None, row_weights: Tensor | None = None
) -> Tensor:
    """Aggregate a batch that is all here: the denominators come from its own mask."""
    require_shape("mask", mask, tuple(loss.shape), "the shape of loss")
    sizes = denominators_of(mask, row_weights)
    return aggregate(loss, mask, sizes, mode=mode, norm_length=norm_length, row_weights=row_weights)


def token_rewards(rewards: Tensor, action_mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Return the row's reward on its last action token, minus `kl_coef` * KL on every action token; [B, T]."""
    placed = place_on_last_token(rewards, action_mask)
    return placed if kl is None else placed - kl_coef * zero_outside(kl.detach(), action_mask)
