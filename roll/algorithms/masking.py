"""Masked arithmetic in which nothing under the mask can leak, not even NaN or infinity.

A product with a 0/1 mask keeps `nan * 0`, and `where` after a non-linear function keeps its NaN gradient. So
every function here selects with `torch.where` *before* it computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before `exp`: e^20 is 4.9e8, safe in float32."""


def as_bool(mask: Tensor) -> Tensor:
    """Return `mask` as bool; 0/1 masks of any dtype are accepted."""
    return mask if mask.dtype == torch.bool else mask != 0


def at_least_float32(values: Tensor) -> Tensor:
    """Return half precision and integers as float32; float32 and float64 stay."""
    wide = values.dtype in (torch.float32, torch.float64)
    return values if wide else values.to(torch.float32)


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where `mask`, else 0, in at least float32; the gradient outside is exactly 0."""
    values = at_least_float32(values)
    return torch.where(as_bool(mask), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum over `mask`; 0 where the mask is empty."""
    inside = zero_outside(values, mask)
    return inside.sum() if dim is None else inside.sum(dim)


def masked_moments(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean, unbiased variance) over `mask`, float64 scalars; fewer than two entries have variance 0."""
    inside = values[as_bool(mask)].to(torch.float64)
    if inside.numel() == 0:
        zero = torch.zeros((), dtype=torch.float64, device=values.device)
        return zero, zero.clone()
    mean = inside.mean()
    return mean, (inside - mean).square().sum() / max(inside.numel() - 1, 1)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio clamped to +-20; beyond the bound the gradient is 0."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...], axes: str) -> None:
    """Refuse another shape: broadcasting by accident is how a [B] and a [B, 1] become a [B, B]."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {axes} = {tuple(shape)}")
