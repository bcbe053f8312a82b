"""Train/infer mismatch: importance weights and rejection filters between trainer's and engine's log-probs.

TIS (fengyao.notion.site/off-policy-rl) truncates the weight at a cap; MIS and IcePop (arXiv:2510.18855) drop
what lies outside [low, high]. The log-ratio is taken at one of four levels:

    token      log pi_train(t) - log pi_infer(t)
    segment    mean over the turn's response (a run of consecutive action tokens)
    geometric  mean over the row's action tokens
    sequence   sum over the row's action tokens

Everything is constant in the loss (detached). A filter returns the tokens to keep: they make the loss mask,
and so the denominators as well, not just the numerator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from roll.algorithms.masking import as_bool, bounded_exp, masked_sum, require_shape, zero_outside
from roll.types.metrics import Metrics

Level = Literal["token", "segment", "geometric", "sequence"]


def log_ratio_of(train_logprobs: Tensor, infer_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi_train - log pi_infer, [B, T], zero outside `mask`."""
    require_shape("infer_logprobs", infer_logprobs, tuple(train_logprobs.shape), "[B, T]")
    require_shape("mask", mask, tuple(train_logprobs.shape), "[B, T]")
    return zero_outside(train_logprobs, mask) - zero_outside(infer_logprobs, mask)


def at_level(log_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    """The log-ratio of each token's unit at `level`, on every token of the unit; [B, T], zero outside `mask`.

    Differentiable, so the policy losses use it too.
    """
    if level not in get_args(Level):
        raise ValueError(f"unknown ratio level {level!r}; expected one of {', '.join(get_args(Level))}")
    require_shape("mask", mask, tuple(log_ratio.shape), "[B, T]")
    mask = as_bool(mask)
    log_ratio = zero_outside(log_ratio, mask)
    if level == "token":
        return log_ratio
    if level == "segment":
        return _segment_mean(log_ratio, mask)
    total = log_ratio.sum(1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(1, keepdim=True).clamp(min=1)
    return zero_outside(total.expand(log_ratio.shape), mask)


def _segment_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    segment = (mask & ~before).cumsum(1)  # [B, T]; tokens after a segment keep its number but are masked
    sums = log_ratio.new_zeros(mask.shape[0], mask.shape[1] + 1)
    counts = sums.scatter_add(1, segment, mask.to(sums.dtype))
    sums = sums.scatter_add(1, segment, log_ratio)
    return zero_outside((sums / counts.clamp(min=1)).gather(1, segment), mask)


def importance_weights(log_ratio: Tensor, mask: Tensor, *, level: Level, cap: float) -> Tensor:
    """min(ratio, cap) at `level`: truncated importance sampling; [B, T], detached, zero outside `mask`."""
    if cap <= 0:
        raise ValueError(f"the cap of the importance weight must be > 0, got {cap}")
    return zero_outside(bounded_exp(at_level(log_ratio.detach(), mask, level)).clamp(max=cap), mask)


def keep_by_ratio(log_ratio: Tensor, mask: Tensor, *, level: Level, low: float, high: float) -> Tensor:
    """Tokens whose unit has low <= ratio <= high; bool [B, T], a subset of `mask`."""
    _check_bounds(low, high)
    unit = at_level(log_ratio.detach(), mask, level)
    at_least = -math.inf if low <= 0 else math.log(low)
    return as_bool(mask) & (unit >= at_least) & (unit <= math.log(high))


def keep_by_difference(
    train_logprobs: Tensor, infer_logprobs: Tensor, mask: Tensor, *, level: Level, low: float, high: float
) -> Tensor:
    """Tokens whose unit has low <= pi_train - pi_infer <= high; bool [B, T], a subset of `mask`.

    Levels other than `token` compare the unit's mean difference (a product of probabilities has no
    difference).
    """
    _check_bounds(low, high)
    inside = as_bool(mask)
    difference = (
        zero_outside(train_logprobs.detach(), inside).exp() - zero_outside(infer_logprobs.detach(), inside).exp()
    )
    unit = at_level(difference, inside, "geometric" if level == "sequence" else level)
    return inside & (unit >= low) & (unit <= high)


def _check_bounds(low: float, high: float) -> None:
    if not low < high or high <= 0:
        raise ValueError(f"a rejection filter needs low < high and high > 0, got low={low}, high={high}")


@dataclass(frozen=True, slots=True)
class Filter:
    """One rejection rule."""

    level: Level
    low: float = -math.inf
    high: float = math.inf
    on: Literal["ratio", "difference"] = "ratio"


@dataclass(frozen=True, eq=False)
class Correction:
    """What to do with each token."""

    weights: Tensor
    """[B, T], multiplies the per-token loss; 1 where no weight is asked for, 0 outside the mask."""
    keep: Tensor
    """bool [B, T], the loss mask after the filters: numerator and denominators."""
    metrics: Metrics = field(default_factory=Metrics)


def correct(
    train_logprobs: Tensor,
    infer_logprobs: Tensor,
    mask: Tensor,
    *,
    weight_level: Level | None = None,
    weight_cap: float = 2.0,
    filters: tuple[Filter, ...] = (),
) -> Correction:
    """Weights and keep-mask for a batch, with the mismatch measured.

    Args:
        train_logprobs: [B, T], of the trainer before the update.
        infer_logprobs: [B, T], as sampled.
        mask: bool [B, T].
        weight_level: level of the importance weight; None leaves all weights 1.
        weight_cap: truncation of the weight.
        filters: all must agree to keep a token.
    """
    inside = as_bool(mask)
    log_ratio = log_ratio_of(train_logprobs.detach(), infer_logprobs.detach(), inside)
    weights = inside.to(log_ratio.dtype)
    metrics = mismatch_metrics(log_ratio, inside)
    tokens = float(inside.sum())
    if weight_level is not None:
        weights = importance_weights(log_ratio, inside, level=weight_level, cap=weight_cap)
        metrics.add_mean("mismatch/weight_mean", float(masked_sum(weights, inside)), tokens)
        metrics.add_mean("mismatch/weight_capped_share", float((inside & (weights >= weight_cap)).sum()), tokens)
    keep = inside
    for rule in filters:
        keep = keep & _passes(rule, train_logprobs, infer_logprobs, log_ratio, inside)
    if filters:
        metrics.add_mean("mismatch/rejected_share", float((inside & ~keep).sum()), tokens)
        rows = inside.any(1)
        metrics.add_mean("mismatch/rejected_row_share", float((rows & ~keep.any(1)).sum()), float(rows.sum()))
    return Correction(weights=weights, keep=keep, metrics=metrics)


def _passes(rule: Filter, train: Tensor, infer: Tensor, log_ratio: Tensor, mask: Tensor) -> Tensor:
    if rule.on == "ratio":
        return keep_by_ratio(log_ratio, mask, level=rule.level, low=rule.low, high=rule.high)
    return keep_by_difference(train, infer, mask, level=rule.level, low=rule.low, high=rule.high)


def mismatch_metrics(log_ratio: Tensor, mask: Tensor) -> Metrics:
    """How far the engine is from the trainer: KL(infer || train) by k3, mean |log-ratio|, extreme ratios."""
    metrics, inside = Metrics(), as_bool(mask)
    log_ratio = zero_outside(log_ratio.detach(), inside)
    if not bool(inside.any()):
        return metrics
    tokens = float(inside.sum())
    # Tokens were drawn from the engine: E[ratio - 1 - log ratio] under it is KL(infer || train).
    bounded = log_ratio.clamp(-20.0, 20.0)
    metrics.add_mean("mismatch/kl", float((bounded.expm1() - bounded).sum()), tokens)
    metrics.add_mean("mismatch/abs_log_ratio_mean", float(log_ratio.abs().sum()), tokens)
    metrics.add_max("mismatch/ratio_max", float(bounded[inside].max().exp()))
    metrics.add_min("mismatch/ratio_min", float(bounded[inside].min().exp()))
    return metrics
