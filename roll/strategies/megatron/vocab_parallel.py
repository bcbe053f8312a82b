"""Log-probs and entropies from logits that are split over ranks by vocabulary, as in Megatron-LM (arXiv:1909.08053).

Every rank holds the columns of its own tokens; what crosses ranks are a few numbers per position, never logits. Logits
exist for one chunk of positions at a time and are computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

_CHUNK_ELEMENTS = 1 << 25
"""Logits of this rank computed at a time: 128 MiB of float32."""


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    group: ProcessGroup | None,
    vocab_start: int,
    vocab: int,
    with_entropy: bool,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Score `targets` under softmax(hidden @ weight.T / temperature), the rows of `weight` spread over `group`.

    Args:
        hidden: [S, D], the same on every rank; its gradient comes back summed over the group.
        weight: [V / ranks, D], the head's rows of tokens `vocab_start`, `vocab_start` + 1, ...
        targets: int64 [S], below `vocab`; the same on every rank.
        temperature: > 0, the same as at sampling.
        group: process group of the tensor-parallel ranks; None for one rank without any.
        vocab_start: first token of this rank.
        vocab: number of real tokens: rows beyond it are padding, which no distribution contains.
        with_entropy: otherwise the second result is None.
        chunk_rows: positions whose logits exist at a time; None: as many as 128 MiB hold.

    Returns:
        (log-probs [S], entropies [S] in nats or None), float32 (float64 for float64 weights), the same on every rank.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; log-probs of greedy sampling are taken at 1")
    rows = chunk_rows or max(1, _CHUNK_ELEMENTS // max(1, len(weight)))
    shard = _Shard(group, vocab_start, max(0, min(len(weight), vocab - vocab_start)), temperature, rows)
    logprobs, entropy = _Scores.apply(hidden, weight, targets, shard, with_entropy)
    return logprobs, entropy if with_entropy else None


@torch.no_grad()
def vocab_parallel_correct(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, group: ProcessGroup | None, vocab_start: int, vocab: int
) -> Tensor:
    """float32 [S]: 1 where no token has a larger logit than the target, else 0. Arguments as above."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, len(weight)))
    shard = _Shard(group, vocab_start, max(0, min(len(weight), vocab - vocab_start)), 1.0, rows)
    correct = torch.zeros(len(hidden), device=hidden.device)
    for part in shard.slices(len(hidden)):
        logits = shard.logits(hidden[part], weight)
        column, inside = shard.mine(targets[part])
        nothing = logits.new_full((len(logits),), -torch.inf)  # a rank may hold nothing but padding
        own = torch.where(inside, logits.gather(-1, column[:, None])[:, 0], nothing) if shard.real else nothing
        best = logits.amax(-1) if shard.real else nothing
        own, best = shard.reduce(torch.stack([own, best]), dist.ReduceOp.MAX)
        correct[part] = (own >= best).float()
    return correct


class _Shard:
    """This rank's part of the vocabulary."""

    def __init__(self, group: ProcessGroup | None, start: int, real: int, temperature: float, rows: int) -> None:
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.start, self.real, self.temperature, self.rows = start, real, temperature, rows

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """In place, over the ranks that share the vocabulary."""
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[R, real tokens of this rank], scaled, in float32 or wider."""
        product = hidden @ weight[: self.real].T
        return product.to(torch.promote_types(product.dtype, torch.float32)).div_(self.temperature)

    def mine(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(column of each target, 1.0 where it is one of this rank's tokens and 0.0 where the column is made up)."""
        column = targets - self.start
        inside = (column >= 0) & (column < self.real)
        return column.clamp(0, max(0, self.real - 1)), inside

    def slices(self, total: int) -> list[slice]:
        """Chunks of positions; as many on every rank."""
        return [slice(i, min(i + self.rows, total)) for i in range(0, total, self.rows)]


class _Scores(torch.autograd.Function):
    """(hidden [S, D], weight [V / ranks, D]) -> (log p(target), entropy), both [S]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: _Shard, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(weight.dtype, torch.float32)
        logprobs, normalizer, entropy = (
            torch.zeros(len(hidden), dtype=wide, device=hidden.device) for _ in range(3)
        )
        for part in shard.slices(len(hidden)):
            logits = shard.logits(hidden[part], weight)
            # A rank may hold nothing but padding.
            own = logits.amax(-1) if shard.real else torch.full_like(normalizer[part], -torch.inf)
            largest = shard.reduce(own, dist.ReduceOp.MAX)
            shifted = logits.sub_(largest[:, None])
            column, inside = shard.mine(targets[part])
            picked = shifted.gather(-1, column[:, None])[:, 0] * inside if shard.real else torch.zeros_like(largest)
            weights = shifted.exp()
            sums = [weights.sum(-1), picked]
            if with_entropy:
                # 0 log 0 = 0: a token ruled out by a logit of -inf adds nothing.
                sums.append(weights.mul_(shifted.clamp_min_(torch.finfo(wide).min)).sum(-1))
            total, picked, *rest = shard.reduce(torch.stack(sums))
            log_total = total.log()
            logprobs[part] = picked - log_total
            normalizer[part] = largest + log_total
            if with_entropy:
                entropy[part] = log_total - rest[0] / total
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.shard, ctx.with_entropy = shard, with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        real = weight[: shard.real]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=normalizer.dtype) if ctx.needs_input_grad[1] else None
        for part in shard.slices(len(hidden)):
            logp = shard.logits(hidden[part], weight).sub_(normalizer[part, None])
            p = logp.exp()
            # d log p(target) / d z = onehot - p;  d H / d z_v = -p_v (log p_v + H)
            factor = -grad_logprobs[part, None]
            if ctx.with_entropy:
                logp = logp.clamp_min_(torch.finfo(logp.dtype).min)
                factor = factor - grad_entropy[part, None] * (logp + entropy[part, None])
            grad = p.mul_(factor)
            column, inside = shard.mine(targets[part])
            if shard.real:
                grad.scatter_add_(-1, column[:, None], (grad_logprobs[part] * inside)[:, None])
            grad = grad.div_(shard.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = shard.reduce(grad @ real)
            if grad_weight is not None:
                grad_weight[: shard.real] += grad.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
