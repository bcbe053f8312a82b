"""Causal attention over rows laid end to end, and its split over ranks by heads (DeepSpeed-Ulysses, arXiv:2309.14509).

Both training on Hugging Face modules and on Megatron use it. Rows are separate calls of the kernel or separate
segments of a variable-length one, so no query can see another row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention within each row.

    Args:
        query: [N, H, D], rows end to end.
        key: [N, K, D], K divides H: consecutive query heads share one (grouped-query attention).
        value: [N, K, E].
        lengths: tokens of each row, summing to N.
        scale: factor of the scores.
        window: a query sees itself and `window - 1` tokens before it; None: all before it.

    Returns:
        [N, H, E].
    """
    assert sum(lengths) == len(query), f"rows of {sum(lengths)} tokens, but {len(query)} queries"
    rows = zip(*(tensor.split(list(lengths)) for tensor in (query, key, value)), strict=True)
    parts = [_row_attention(q, k, v, scale, window) for q, k, v in rows]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _row_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    heads = query.shape[1] // key.shape[1]
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    if heads > 1:
        k, v = k.repeat_interleave(heads, dim=1), v.repeat_interleave(heads, dim=1)
    mask = None
    if window is not None and len(query) > window:
        distance = torch.arange(len(query), device=query.device)
        distance = distance[:, None] - distance
        mask = (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[0].transpose(0, 1)


class _AllToAll(torch.autograd.Function):
    """Chunk r along `scatter` goes to rank r; what arrives is joined along `gather`. Its own inverse, swapped."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, scatter: int, gather: int) -> Tensor:
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        return _exchange(tensor, group, scatter, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchange(grad, ctx.group, ctx.gather, ctx.scatter), None, None, None


def _exchange(tensor: Tensor, group: Any, scatter: int, gather: int) -> Tensor:
    size = dist.get_world_size(group)
    sent = torch.stack([part.contiguous() for part in tensor.chunk(size, dim=scatter)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), dim=gather)


def sequence_to_heads(tensor: Tensor, group: Any) -> Tensor:
    """[N / ranks, H, D], every rank a stretch of the sequence -> [N, H / ranks, D], every rank some of the heads."""
    return _AllToAll.apply(tensor, group, 1, 0)


def heads_to_sequence(tensor: Tensor, group: Any) -> Tensor:
    """The way back: [N, H / ranks, D] -> [N / ranks, H, D]."""
    return _AllToAll.apply(tensor, group, 0, 1)


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    group: Any,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`varlen_attention` where every rank of `group` holds an equal stretch of the sequence: tensors [N / ranks, ., .].

    `lengths` are those of the whole sequence. Fewer key heads than ranks are repeated.
    """
    size = dist.get_world_size(group)
    if key.shape[1] % size:
        assert size % key.shape[1] == 0, f"{key.shape[1]} key heads can't be spread over {size} ranks"
        key, value = (t.repeat_interleave(size // t.shape[1], dim=1) for t in (key, value))
    query, key, value = (sequence_to_heads(tensor, group) for tensor in (query, key, value))
    return heads_to_sequence(varlen_attention(query, key, value, lengths, scale=scale, window=window), group)


class _Gather(torch.autograd.Function):
    """All ranks' stretches joined; every rank computes the same loss from them, so each keeps its part's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def gather_sequence(tensor: Tensor, group: Any) -> Tensor:
    """[N / ranks, ...] -> [N, ...] on every rank. Summing parameter gradients over the ranks gives the whole one."""
    return _Gather.apply(tensor, group)
