"""Normalisation of rewards and advantages: mean and std each over batch, group or a running estimate.

Penalties and shaping come before normalisation. A std of 0 (a group of one, or without spread) never divides:
such values are centred only, so they stay bounded.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from roll.algorithms.groups import batch_index, group_moments
from roll.algorithms.masking import as_bool, at_least_float32, masked_moments, require_shape, zero_outside

Source = Literal["batch", "group", "running"]
GroupMethod = Literal["mean_std", "mean", "asym_clip", "identity"]


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Mean and spread of everything seen so far (Chan et al.). Immutable: `update` returns a new one."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared deviations from the mean."""

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Tensor) -> RunningMoments:
        """Fold in all entries of `values`."""
        wide = values.detach().to(torch.float64).flatten()
        if wide.numel() == 0:
            return self
        mean = wide.mean()
        return self.merge(RunningMoments(wide.numel(), float(mean), float((wide - mean).square().sum())))

    def merge(self, other: RunningMoments) -> RunningMoments:
        """Return the moments of both sets of values together."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return RunningMoments(count, mean, self.m2 + other.m2 + delta**2 * self.count * other.count / count)

    def state(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint; `RunningMoments(**state)` restores."""
        return asdict(self)


def normalize_rewards(
    rewards: Tensor,
    group_index: Tensor,
    *,
    mean: Source | None,
    std: Source | None,
    running: RunningMoments | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Return (r - mean) / (std + eps), [B], mean and std each from its own source (None: none); unbiased std.

    A std of 0 divides by nothing. `running` has been updated with these rewards; the source `running` needs it.
    """
    centre, _ = _moments(rewards, group_index, mean, running)
    _, spread = _moments(rewards, group_index, std, running)
    shifted = rewards.to(torch.float64) - centre
    scaled = torch.where(spread > 0, shifted / (spread + eps), shifted)
    return scaled.to(at_least_float32(rewards).dtype)


def _moments(
    rewards: Tensor, group_index: Tensor, source: Source | None, running: RunningMoments | None
) -> tuple[Tensor, Tensor]:
    """Return (mean, std) per row, float64 [B]; zeros for no source."""
    if source is None:
        zeros = torch.zeros(rewards.shape, dtype=torch.float64, device=rewards.device)
        return zeros, zeros
    if source == "running":
        if running is None:
            raise ValueError("normalisation over a running estimate needs `running`, got None")
        ones = torch.ones(rewards.shape, dtype=torch.float64, device=rewards.device)
        return ones * running.mean, ones * running.std
    if source not in get_args(Source):
        raise ValueError(f"unknown source of normalisation {source!r}; expected one of {get_args(Source)} or None")
    moments = group_moments(rewards, batch_index(rewards) if source == "batch" else group_index)
    return moments.mean, moments.std


def normalize_grouped(scores: Tensor, group_index: Tensor | None, *, method: GroupMethod, eps: float = 1e-6) -> Tensor:
    """Normalise agentic rewards (RAGEN, arXiv:2504.20073).

    The grouping is the index: state, task group (`traj_group`), tag (`tags`, `inductive`), or None for the batch.

    `asym_clip` is `mean_std` clamped to [-1, 3]. Returns [B]; a group of one gives 0 for every method but `identity`.
    """
    if method not in get_args(GroupMethod):
        raise ValueError(f"unknown normalisation method {method!r}; expected one of {get_args(GroupMethod)}")
    if method == "identity":
        return at_least_float32(scores)
    index = batch_index(scores) if group_index is None else group_index
    normed = normalize_rewards(scores, index, mean="group", std=None if method == "mean" else "group", eps=eps)
    return normed.clamp(-1.0, 3.0) if method == "asym_clip" else normed


def whiten(values: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) over all masked entries of the batch; unbiased variance.

    `values` [B, T] -> [B, T], 0 outside `mask`. An empty mask gives zeros.
    """
    require_shape("mask", mask, tuple(values.shape), "the shape of values")
    mean, variance = masked_moments(values, mask)
    whitened = (values.to(torch.float64) - mean) * torch.rsqrt(variance + eps)
    return zero_outside(whitened.to(at_least_float32(values).dtype), mask)


def clip_to(values: Tensor, bound: float, mask: Tensor | None = None) -> tuple[Tensor, float]:
    """Clamp values to [-bound, bound], and return the share of entries (of `mask`) that changed, too."""
    if bound <= 0:
        raise ValueError(f"a clip bound must be > 0, got {bound}; null disables clipping")
    counted = torch.ones_like(values, dtype=torch.bool) if mask is None else as_bool(mask)
    changed = (values.abs() > bound) & counted
    return values.clamp(-bound, bound), float(changed.sum()) / max(int(counted.sum()), 1)
