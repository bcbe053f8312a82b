"""Which tokens carry the entropy away: those whose log-prob and advantage are high together (arXiv:2505.22617).

The covariance of a token is (log p - mean log p) (A - mean A), with means over all tokens of the mini-batch, and log p
from before the update. What is selected depends on the whole mini-batch, so it is done before that is cut into parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.masking import require_shape


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the covariance of each token, float64 [N], -inf outside `mask`; all [N]."""
    require_shape("logprobs", logprobs, tuple(mask.shape), "[N]")
    require_shape("advantages", advantages, tuple(mask.shape), "[N]")
    result = torch.full(mask.shape, -torch.inf, dtype=torch.float64)
    p, a = logprobs[mask].double(), advantages[mask].double()
    result[mask] = (p - p.mean()) * (a - a.mean())
    return result


def clip_cov(
    covariance: Tensor, mask: Tensor, generator: torch.Generator, *, cov_ratio: float, cov_low: float, cov_high: float
) -> Tensor:
    """Return bool [N]: tokens with a covariance between the bounds, drawn; `cov_ratio` of all, at least one."""
    fit = ((covariance > cov_low) & (covariance < cov_high) & mask).nonzero()[:, 0]
    drawn = fit[torch.randperm(len(fit), generator=generator)[: _count(mask, cov_ratio)]]
    return torch.zeros_like(mask).index_fill(0, drawn, True)


def kl_cov(covariance: Tensor, mask: Tensor, generator: torch.Generator, *, cov_ratio: float) -> Tensor:
    """Return bool [N]: the tokens with the highest covariances, `cov_ratio` of all, at least one; ties: the first."""
    del generator
    order = covariance.argsort(descending=True, stable=True)[: min(_count(mask, cov_ratio), int(mask.sum()))]
    return torch.zeros_like(mask).index_fill(0, order, True)


def _count(mask: Tensor, ratio: float) -> int:
    return max(1, int(ratio * int(mask.sum())))
