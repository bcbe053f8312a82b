"""`head_outputs` of logits that are split over ranks by vocabulary, as in Megatron-LM (arXiv:1909.08053).

Every rank holds the columns of its own tokens; what crosses ranks are a few numbers per position, never logits. Logits
exist for one chunk of positions at a time and are computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from roll.strategies.attention.attention import all_gathered
from roll.strategies.training.logits import HeadOutputs, HeadRequest, add_at, chunk_elements, require_tokens, top_tokens


def vocab_parallel_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    request: HeadRequest,
    *,
    temperature: float,
    group: ProcessGroup | None,
    vocab_start: int,
    vocab: int,
    chunk_rows: int | None = None,
) -> HeadOutputs:
    """Return what is asked about softmax(hidden @ weight.T / temperature), the rows of `weight` spread over `group`.

    Args:
        hidden: [S, D], the same on every rank; its gradient comes back summed over the group.
        weight: [V / ranks, D], the head's rows of tokens `vocab_start`, `vocab_start` + 1, ...
        targets: int64 [S], the scored tokens, or [S, 1 + K] with K other tokens beside each; below `vocab`, and the
            same on every rank.
        request: what else is wanted. `correct`, `logit_gradients` and `top_k` have no gradient.
        temperature: > 0, the same as at sampling.
        group: process group of the tensor-parallel ranks; None for one rank without any.
        vocab_start: first token of this rank.
        vocab: number of real tokens: rows beyond it are padding, which no distribution contains.
        chunk_rows: positions whose logits exist at a time; None: as `chunk_elements` says.

    Returns:
        The same on every rank, in float32 (float64 for float64 weights); entropies in nats.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; log-probs of greedy sampling are taken at 1")
    require_tokens(request.top_k, vocab)
    rows = chunk_rows or max(1, chunk_elements(hidden.device) // max(1, len(weight)))
    shard = _Shard(group, vocab_start, max(0, min(len(weight), vocab - vocab_start)), temperature, rows)
    targets = targets if targets.dim() > 1 else targets[:, None]
    scores, entropy, correct, gradients, ids = _Scores.apply(hidden, weight, targets, shard, request)
    return HeadOutputs.of_scores(
        scores,
        ids,
        targets.shape[1],
        entropy=entropy if request.entropy else None,
        correct=correct if request.correct else None,
        logit_gradients=gradients if request.logit_gradients else None,
    )


class _Shard:
    """This rank's part of the vocabulary."""

    def __init__(self, group: ProcessGroup | None, start: int, real: int, temperature: float, rows: int) -> None:
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.start, self.real, self.temperature, self.rows = start, real, temperature, rows

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place, over the ranks that share the vocabulary."""
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return [R, real tokens of this rank], scaled, in float32 or wider."""
        product = hidden @ weight[: self.real].T
        return product.to(torch.promote_types(product.dtype, torch.float32)).div_(self.temperature)

    def top(self, logits: Tensor, k: int) -> Tensor:
        """Return int64 [R, k], the likeliest tokens of all ranks, in the order of `top_tokens`."""
        own = min(k, self.real)
        ids = top_tokens(logits, own) if own else logits.new_zeros(len(logits), 0, dtype=torch.int64)
        if self.group is None:
            return ids
        # A rank with fewer tokens fills up behind all others'.
        values = F.pad(logits.gather(-1, ids), (0, k - own), value=-torch.inf)
        ids = torch.cat([ids + self.start, ids.new_full((len(ids), k - own), torch.iinfo(torch.int64).max)], dim=1)
        values, ids = (torch.cat(all_gathered(part, self.group), dim=1) for part in (values, ids))
        ids, order = ids.sort(dim=1)
        return ids.gather(1, top_tokens(values.gather(1, order), k))

    def mine(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (column of each target, whether it is one of this rank's tokens: where not, the column is made up)."""
        column = targets - self.start
        inside = (column >= 0) & (column < self.real)
        return column.clamp(0, max(0, self.real - 1)), inside

    def slices(self, total: int) -> list[slice]:
        """Return chunks of positions; as many on every rank."""
        return [slice(i, min(i + self.rows, total)) for i in range(0, total, self.rows)]


class _Scores(torch.autograd.Function):
    """(hidden [S, D], weight [V / ranks, D]) -> (log p(id) [S, J + top_k], entropy [S], hits [S], squared gradients
    [S], these ids)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: _Shard, request: HeadRequest
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(weight.dtype, torch.float32)
        normalizer, entropy, correct, gradients = torch.zeros(4, len(hidden), dtype=wide, device=hidden.device).unbind()
        ids = F.pad(targets, (0, request.top_k))
        scores = torch.zeros(ids.shape, dtype=wide, device=hidden.device)
        for part in shard.slices(len(hidden)):
            logits = shard.logits(hidden[part], weight)
            if request.top_k:
                ids[part, targets.shape[1] :] = shard.top(logits, request.top_k)
            # A rank may hold nothing but padding.
            own = logits.amax(-1) if shard.real else torch.full_like(normalizer[part], -torch.inf)
            largest = shard.reduce(own, dist.ReduceOp.MAX)
            shifted = logits.sub_(largest[:, None])
            column, inside = shard.mine(ids[part])
            picked = torch.zeros_like(scores[part])
            if shard.real:
                picked = torch.where(inside, shifted.gather(-1, column), picked)
            weights = shifted.exp()
            sums = [weights.sum(-1, keepdim=True), picked]
            if request.logit_gradients:
                sums.append(weights.square().sum(-1, keepdim=True))
            if request.entropy:
                # 0 log 0 = 0: a token ruled out by a logit of -inf adds nothing.
                sums.append(weights.mul_(shifted.clamp_min_(torch.finfo(wide).min)).sum(-1, keepdim=True))
            total, picked, rest = shard.reduce(torch.cat(sums, dim=1)).tensor_split((1, 1 + ids.shape[1]), dim=1)
            if request.logit_gradients:
                squares, rest = rest[:, 0] / total[:, 0].square(), rest[:, 1:]
                gradients[part] = (1 - 2 * picked[:, 0].exp() / total[:, 0] + squares).clamp(min=0)
            log_total = total.log()
            scores[part] = picked - log_total
            normalizer[part] = largest + log_total[:, 0]
            correct[part] = (picked[:, 0] >= 0).to(wide)
            if request.entropy:
                entropy[part] = (log_total - rest / total)[:, 0]
        ctx.save_for_backward(hidden, weight, ids, normalizer, entropy)
        ctx.mark_non_differentiable(correct, gradients, ids)
        ctx.shard, ctx.with_entropy = shard, request.entropy
        return scores, entropy, correct, gradients, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor, grad_entropy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, normalizer, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        real = weight[: shard.real]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=normalizer.dtype) if ctx.needs_input_grad[1] else None
        for part in shard.slices(len(hidden)):
            logp = shard.logits(hidden[part], weight).sub_(normalizer[part, None])
            p = logp.exp()
            # d log p(id) / d z = onehot - p;  d H / d z_v = -p_v (log p_v + H)
            factor = -grad_scores[part].sum(-1, keepdim=True)
            if ctx.with_entropy:
                logp = logp.clamp_min_(torch.finfo(logp.dtype).min)
                factor = factor - grad_entropy[part, None] * (logp + entropy[part, None])
            grad = p.mul_(factor)
            column, inside = shard.mine(ids[part])
            if shard.real:
                add_at(grad, column, grad_scores[part] * inside)
            grad = grad.div_(shard.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = shard.reduce(grad @ real)
            if grad_weight is not None:
                grad_weight[: shard.real] += grad.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
