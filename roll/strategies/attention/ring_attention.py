"""Ring attention (arXiv:2310.01889) over packed rows in zigzag pieces (`roll.strategies.attention.zigzag`).

Every rank keeps its queries. Keys and values travel from rank to rank, each step's while the step before is computed,
and what a rank has found so far is merged with what it finds next by the log-sum-exp of the scores. In the backward
pass they travel again, and behind them their gradients, to which every rank adds its share until they are home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.strategies.attention.zigzag import RingPlan

_SCORES = 1 << 24
"""Scores of queries and keys that are in memory together: 64 MB in float32."""


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, *, scale: float, window: int | None = None
) -> Tensor:
    """Return causal attention within rows of a line of which every rank of the ring holds two pieces: [S, H, E].

    This rank's tokens in the order of `zigzag_order`: `query` [S, H, D], `key` [S, K, D], `value` [S, K, E]; K divides
    H. With a `window` a query sees itself and `window - 1` tokens before. Scores are float32 at least. A rank receives
    keys and values `ranks - 1` times forward; backward again, and their gradients `ranks` times in float32.
    """
    out: Tensor = _RingAttention.apply(query, key, value, plan, scale, window)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, scale: float, window: int | None
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:2], value.shape[-1], dtype=wide)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=wide)
        with torch.autocast(query.device.type, enabled=False):
            for source, k, v in _travelling(key, value, plan):
                for block in plan.blocks(source, window):
                    mine, theirs = block.queries, block.keys
                    attended = block_attention(query[mine], k[theirs], v[theirs], block.offset, scale, window)
                    out[mine], lse[mine] = merge(out[mine], lse[mine], *attended)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale, ctx.window = plan, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        grad = grad.to(lse.dtype)
        # Softmax's gradient needs the mean of the values' gradients over all keys, which is in the output.
        mean = (grad * out).sum(-1)
        dq = torch.zeros_like(query, dtype=lse.dtype)
        behind: _Message | None = None
        for source, k, v in _travelling(key, value, plan):
            dk, dv = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
            for block in plan.blocks(source, ctx.window):
                mine, theirs = block.queries, block.keys
                arguments = query[mine], k[theirs], v[theirs], block.offset, ctx.scale, ctx.window
                parts = block_gradients(grad[mine], mean[mine], lse[mine], *arguments)
                for total, part in zip((dq[mine], dk[theirs], dv[theirs]), parts, strict=True):
                    total += part
            if behind is not None:
                for total, part in zip((dk, dv), behind.receive(), strict=True):
                    total += part
            behind = _Message((dk, dv), plan)
        assert behind is not None
        dk, dv = behind.receive()
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None, None


# --- what travels ----------------------------------------------------------------------------------------------------


class _Message:
    """Two tensors on their way to the next rank of the ring, while the one before sends its own of the same shapes."""

    def __init__(self, tensors: tuple[Tensor, Tensor], plan: RingPlan) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._sent = torch.cat([tensor.flatten() for tensor in tensors])  # kept until it is gone
        self._received = torch.empty_like(self._sent)
        self._works = _exchange(self._sent, self._received, plan) if plan.ranks > 1 else []
        if plan.ranks == 1:
            self._received = self._sent

    def receive(self) -> tuple[Tensor, Tensor]:
        """Wait for those of the rank before and return them."""
        for work in self._works:
            work.wait()
        first, second = self._received.split([shape.numel() for shape in self._shapes])
        return first.view(self._shapes[0]), second.view(self._shapes[1])


def _exchange(sent: Tensor, received: Tensor, plan: RingPlan) -> list[dist.Work]:
    group: ProcessGroup | None = plan.group
    there, before = (plan.rank + 1) % plan.ranks, (plan.rank - 1) % plan.ranks
    send = dist.P2POp(dist.isend, sent, group=group, group_peer=there)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=before)
    return dist.batch_isend_irecv([send, receive])


def _travelling(key: Tensor, value: Tensor, plan: RingPlan) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (rank, its keys, its values), this one's first. The next are on their way while the caller computes."""
    for step in range(plan.ranks):
        message = _Message((key, value), plan) if step < plan.ranks - 1 else None
        yield (plan.rank - step) % plan.ranks, key, value
        if message is not None:
            key, value = message.receive()


# --- one block -------------------------------------------------------------------------------------------------------


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs, log-sum-exp of scores) over two sets of keys from those over each: [Q, H, E], [Q, H].

    `lse` may be -inf where nothing was seen yet, `other_lse` not.
    """
    both = torch.logaddexp(lse, other_lse)
    return (lse - both).exp()[..., None] * out + (other_lse - both).exp()[..., None] * other, both


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, offset: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return (outputs [Q, H, E], log-sum-exp of the scores [Q, H]) of queries over some of the keys they see.

    `query` [Q, H, D], `key` [T, K, D], `value` [T, K, E], in one row; the first query stands `offset` tokens behind the
    first key.
    """
    outs, sums = [], []
    for queries, keys, mask in _chunks(query, key, offset, window):
        scores = _scores(query[queries], key[keys], mask, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append(torch.einsum("kgqt,tke->qkge", (scores - lse).exp(), value[keys].to(scores.dtype)).flatten(1, 2))
        sums.append(lse[..., 0].flatten(0, 1).T)
    return torch.cat(outs), torch.cat(sums)


def block_gradients(
    grad: Tensor, mean: Tensor, lse: Tensor,
    query: Tensor, key: Tensor, value: Tensor, offset: int, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what these queries and keys add to the gradients of `query`, `key` and `value`.

    `grad` [Q, H, E] is the gradient of the whole output, `mean` [Q, H] its product with that output, `lse` [Q, H] over
    all keys; the rest as of `block_attention`.
    """
    dq, dk, dv = (torch.zeros_like(tensor, dtype=grad.dtype) for tensor in (query, key, value))
    heads = key.shape[1]
    for queries, keys, mask in _chunks(query, key, offset, window):
        q, out = (tensor[queries].to(grad.dtype).unflatten(1, (heads, -1)) for tensor in (query, grad))
        k, v = key[keys].to(grad.dtype), value[keys].to(grad.dtype)
        over, middle = (tensor[queries].T.unflatten(0, (heads, -1))[..., None] for tensor in (lse, mean))
        weights = (_scores(query[queries], key[keys], mask, scale) - over).exp()
        dv[keys] += torch.einsum("kgqt,qkge->tke", weights, out)
        scores = weights * (torch.einsum("qkge,tke->kgqt", out, v) - middle) * scale
        dq[queries] = torch.einsum("kgqt,tkd->qkgd", scores, k).flatten(1, 2)
        dk[keys] += torch.einsum("kgqt,qkgd->tkd", scores, q)
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return [K, H / K, Q, T]: query heads beside each other share a key head."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("qkgd,tkd->kgqt", grouped, key.to(wide)) * scale
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _chunks(
    query: Tensor, key: Tensor, offset: int, window: int | None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield some of the queries, the keys that any of them sees, and which each sees, bool [Q, T]; None: all."""
    queries, keys, device = len(query), len(key), query.device
    count = max(1, _SCORES // (query.shape[1] * keys))
    for start in range(0, queries, count):
        stop = min(start + count, queries)
        first = 0 if window is None else max(0, offset + start - window + 1)
        last = min(keys, offset + stop)
        mask = None
        if offset + start < last - 1 or (window is not None and offset + stop - 1 - first >= window):
            at = torch.arange(start, stop, device=device)[:, None] + offset
            distance = at - torch.arange(first, last, device=device)
            mask = distance >= 0
            if window is not None:
                mask &= distance < window
        yield slice(start, stop), slice(first, last), mask
