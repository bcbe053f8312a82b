"""Drawing tokens: one uniform number per token, from the request's own key, through the inverse distribution.

A draw depends on the logits of its row and on its key alone, never on the other draws of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roll.strategies.base import SamplingParams


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[Sequence[float]],
    previous: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Draw tokens of every row, one for each of its uniforms: (tokens int64 [B, N], log-probs float32 [B, N] under the
    very distribution drawn from). N are the most draws of a row; behind the draws of other rows there is anything.

    Without penalty, top-k and top-p that is what the trainer computes. A greedy token has the log-prob of temperature
    1. `logits` are [B, V], computed on in float32; uniforms are in [0, 1), and `previous` has the token ids of a row's
    context, needed only where `repetition_penalty` != 1.
    """
    scaled = logits.float()
    scaled = _penalised(scaled, params, previous)
    temperature = [p.temperature if p.temperature > 0 else 1.0 for p in params]
    if any(t != 1.0 for t in temperature):
        scaled = scaled / torch.tensor(temperature, device=logits.device)[:, None]
    all_logprobs = scaled.log_softmax(-1)
    most = max(map(len, uniforms))
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if len(drawn) < len(params):  # by the logits: close ones may round to the same log-prob
        tokens = scaled.argmax(-1)[:, None].repeat(1, most)
    if not drawn:
        return tokens, all_logprobs.gather(-1, tokens)
    rows = slice(None) if len(drawn) == len(params) else torch.tensor(drawn, device=logits.device)
    probs = _truncated(all_logprobs[rows].exp(), [params[i] for i in drawn])
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    padded = [[*uniforms[i], *[0.0] * (most - len(uniforms[i]))] for i in drawn]
    points = torch.tensor(padded, dtype=torch.float64, device=logits.device)
    # right=True finds the first entry above the point, so a token of probability 0 is never drawn.
    columns = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    columns = columns.clamp(max=logits.shape[-1] - 1)
    if len(drawn) == len(params):
        tokens = columns
    else:
        tokens[rows] = columns
    logprobs = all_logprobs.gather(-1, tokens)
    for row, i in enumerate(drawn):
        if _truncates(params[i], logits.shape[-1]):
            logprobs[i] -= cumulative[row, -1].log().float()
    return tokens, logprobs


def _truncates(params: SamplingParams, vocabulary: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocabulary


def _penalised(logits: Tensor, params: Sequence[SamplingParams], previous: Sequence[Tensor | None]) -> Tensor:
    """Apply the repetition penalty of CTRL (arXiv:1909.05858): positive logits divided, negative ones multiplied."""
    if all(p.repetition_penalty == 1.0 for p in params):
        return logits
    logits = logits.clone()
    for i, (p, context) in enumerate(zip(params, previous, strict=True)):
        if p.repetition_penalty != 1.0 and context is not None:
            picked = logits[i, context]
            logits[i, context] = torch.where(picked > 0, picked / p.repetition_penalty, picked * p.repetition_penalty)
    return logits


def _truncated(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zero what top-k and top-p exclude. Ties at the edge of top-k go to the lower token id."""
    rows = [i for i, p in enumerate(params) if _truncates(p, probs.shape[-1])]
    if not rows:
        return probs
    probs = probs.clone()
    for i in rows:
        ordered, index = probs[i].sort(descending=True, stable=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if params[i].top_k > 0:
            keep[params[i].top_k :] = False
        if params[i].top_p < 1.0:
            probabilities_left = ordered * keep
            # A token stays while the mass before it is below top_p, so at least one always does.
            before = probabilities_left.cumsum(-1, dtype=torch.float64) - probabilities_left
            keep &= before < params[i].top_p * probabilities_left.sum(dtype=torch.float64)
        probs[i, index[~keep]] = 0.0
    return probs
