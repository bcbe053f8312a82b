"""Log-probs and entropy from logits, a slice of rows at a time.

A vocabulary of 150,000 makes a float32 copy of the logits the largest tensor of the step. Here the upcast,
the softmax and their gradients exist for one slice only: the forward keeps the logits as they are and one
number per token, the backward makes the one gradient that can't be avoided, in the logits' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

SLICE_ELEMENTS = 1 << 24
"""float32 numbers per slice, 64 MiB."""

_CHUNK_ELEMENTS = 1 << 25
"""Logits computed at a time: 128 MiB of float32."""


class _TokenStatistics(torch.autograd.Function):
    """(logits [N, V], tokens [N]) -> (log p(token), entropy), both float32 [N]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, rows: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(logits.shape[0], dtype=wide, device=logits.device)
        entropy = torch.zeros_like(logprobs)
        normalizer = torch.empty_like(logprobs)
        for part in _slices(logits.shape[0], rows):
            scaled = logits[part].to(wide) / temperature
            lse = scaled.logsumexp(-1)
            normalizer[part] = lse
            logprobs[part] = scaled.gather(-1, tokens[part, None]).squeeze(-1) - lse
            if with_entropy:
                logp = scaled - lse[:, None]
                entropy[part] = -_p_log_p(logp).sum(-1)
        ctx.save_for_backward(logits, tokens, normalizer, entropy)
        ctx.temperature, ctx.rows, ctx.with_entropy = temperature, rows, with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, tokens, normalizer, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in _slices(logits.shape[0], ctx.rows):
            logp = logits[part].to(normalizer.dtype) / ctx.temperature - normalizer[part, None]
            # d log p(token) / d z = onehot - p
            piece = logp.exp() * -grad_logprobs[part, None]
            piece.scatter_add_(-1, tokens[part, None], grad_logprobs[part, None])
            if ctx.with_entropy:
                # d H / d z_v = -p_v (log p_v + H)
                p_log_p = _p_log_p(logp) + logp.exp() * entropy[part, None]
                piece -= p_log_p * grad_entropy[part, None]
            grad[part] = (piece / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None


def _p_log_p(logp: Tensor) -> Tensor:
    """Return p log p with 0 log 0 = 0: a token ruled out by a logit of -inf adds nothing."""
    return torch.where(logp > -torch.inf, logp.exp() * logp, torch.zeros_like(logp))


def _slices(total: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, total)) for start in range(0, total, rows)]


def _statistics(
    logits: Tensor, tokens: Tensor, temperature: float, slice_rows: int | None, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; log-probs of greedy sampling are taken at 1")
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} need tokens {tuple(logits.shape[:-1])}, got {tuple(tokens.shape)}"
        )
    vocabulary = logits.shape[-1]
    rows = slice_rows if slice_rows is not None else max(SLICE_ELEMENTS // vocabulary, 1)
    logprobs, entropy = _TokenStatistics.apply(
        logits.reshape(-1, vocabulary), tokens.reshape(-1), temperature, rows, with_entropy
    )
    if tokens.dim() == 1:  # as they are: FSDP warns about outputs that are views
        return logprobs, entropy
    return logprobs.reshape(tokens.shape), entropy.reshape(tokens.shape)


def logprobs_from_logits(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, slice_rows: int | None = None
) -> Tensor:
    """Return log softmax(logits / temperature) at `tokens`.

    Args:
        logits: [..., V], any float dtype; half precision is upcast slice by slice.
        tokens: int64 [...], each in 0..V-1.
        temperature: > 0, the same as at sampling.
        slice_rows: tokens per slice; None fits a slice into 64 MiB.

    Returns:
        [...], float32 (float64 for float64 logits).
    """
    return _statistics(logits, tokens, temperature, slice_rows, with_entropy=False)[0]


def logprobs_and_entropy(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, slice_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return `logprobs_from_logits`, and the entropy of each distribution in nats; both [...]."""
    return _statistics(logits, tokens, temperature, slice_rows, with_entropy=True)


@torch.no_grad()
def likeliest(hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
    """Return float32 [N]: 1 where no logit of `head(hidden)` [N, V] is larger than that of `targets` [N], else 0."""
    rows = _chunk_rows(head)
    parts = []
    for start in range(0, len(hidden), rows):
        logits = head(hidden[start : start + rows])
        own = logits.gather(-1, targets[start : start + rows, None]).squeeze(-1)
        parts.append((own >= logits.amax(-1)).float())
    return torch.cat(parts) if parts else targets.new_zeros(0, dtype=torch.float32)


def _chunk_rows(head: Any) -> int:
    vocabulary = getattr(head, "out_features", None) or 1 << 17
    return max(1, _CHUNK_ELEMENTS // vocabulary)


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    temperature: float,
    softcap: float | None = None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of `targets` [N] under head(hidden) / temperature, in chunks of `hidden` [N, D].

    Returns:
        (log-probs [N], entropies [N] or None), float32. With gradients on, more than one chunk means that each chunk's
        logits are recomputed in the backward pass.
    """

    def score(part: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = head(part)
        if softcap is not None:
            logits = torch.tanh(logits.float() / softcap) * softcap
        if with_entropy:
            return logprobs_and_entropy(logits, wanted, temperature=temperature)
        return logprobs_from_logits(logits, wanted, temperature=temperature), None

    rows = _chunk_rows(head)
    if len(hidden) <= rows:
        return score(hidden, targets)
    parts: list[tuple[Tensor, Tensor | None]] = []
    for start in range(0, len(hidden), rows):
        piece = (hidden[start : start + rows], targets[start : start + rows])
        recompute = torch.is_grad_enabled() and hidden.requires_grad
        parts.append(checkpoint(score, *piece, use_reentrant=False) if recompute else score(*piece))
    entropies = [entropy for _, entropy in parts if entropy is not None]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat(entropies) if with_entropy else None
