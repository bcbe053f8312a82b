"""Log-probabilities and entropies of chosen tokens without holding positions x vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_ELEMENTS = 1 << 25
"""Logits computed at a time: 128 MiB of float32."""


def logprobs_and_entropy(logits: Tensor, targets: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-prob of `targets` [N] and entropy of each row of `logits` [N, V], computed in float32 (float64 stays).

    Entropy is logsumexp(x) - sum(softmax(x) x), which needs no second [N, V] of log-probs.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not with_entropy:
        return logprobs, None
    probs = (logits - normaliser[:, None]).exp()
    # 0 * -inf of a masked-out token would be NaN; its limit is 0.
    weighted = torch.where(probs > 0, probs * logits, torch.zeros_like(probs))
    return logprobs, normaliser - weighted.sum(-1)


def token_scores(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    temperature: float,
    softcap: float | None = None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Apply `head` to `hidden` [N, D] in chunks and score `targets` [N] under logits / temperature.

    Returns:
        (log-probs [N], entropies [N] or None), float32. With gradients on, more than one chunk means that each chunk's
        logits are recomputed in the backward pass.
    """

    def score(part: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = head(part).float()
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logprobs_and_entropy(logits / temperature, wanted, with_entropy=with_entropy)

    vocabulary = getattr(head, "out_features", None) or 1 << 17
    rows = max(1, _CHUNK_ELEMENTS // vocabulary)
    if len(hidden) <= rows:
        return score(hidden, targets)
    parts: list[tuple[Tensor, Tensor | None]] = []
    for start in range(0, len(hidden), rows):
        piece = (hidden[start : start + rows], targets[start : start + rows])
        recompute = torch.is_grad_enabled() and hidden.requires_grad
        parts.append(checkpoint(score, *piece, use_reentrant=False) if recompute else score(*piece))
    entropies = [entropy for _, entropy in parts if entropy is not None]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat(entropies) if with_entropy else None
