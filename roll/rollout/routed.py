"""Where an engine sent tokens, from responses to turns and from turns to training rows (router replay)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.strategies.base import Completion
from roll.types.trajectory import Turn


def routed_before(completion: Completion, prompt_tokens: int) -> np.ndarray | None:
    """Return `Turn.routed_experts` of a turn that adds so many tokens of prompt to its context."""
    experts = completion.routed_experts
    if experts is None:
        return None
    size = prompt_tokens + completion.num_tokens
    if size == len(experts):  # a context begins: before its first token there is none
        return np.concatenate([np.full_like(experts[:1], -1), experts[:-1]])
    return experts[len(experts) - size - 1 : -1].copy()  # what came before it belongs to other turns


def with_unrouted(experts: np.ndarray | None, tokens: int) -> np.ndarray | None:
    """Return `Turn.routed_experts` of a turn that has so many more tokens in front, of which nobody has told."""
    if experts is None or not tokens:
        return experts
    return np.concatenate([np.full((tokens, *experts.shape[1:]), -1, experts.dtype), experts])


def routed_rows(rows: Sequence[Sequence[Turn]]) -> np.ndarray | None:
    """Return int16 [N, L, K], `TokenBatch.routed_experts` of rows that are these turns; None: no turn says any.

    Raises `ValueError` where turns come from models of other sizes.
    """
    sizes = {turn.routed_experts.shape[1:] for row in rows for turn in row if turn.routed_experts is not None}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise ValueError(f"turns name the experts of different models, [layers, experts per token] {sorted(sizes)}")
    (size,) = sizes
    lengths = [sum(turn.num_tokens for turn in row) for row in rows]
    routed = np.full((sum(lengths), *size), -1, np.int16)
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        at = start - 1  # a turn tells of the tokens before its own
        for turn in row:
            tokens = turn.num_tokens
            if turn.routed_experts is not None:
                skipped = max(0, start - at)
                routed[at + skipped : at + tokens] = turn.routed_experts[skipped:]
            at += tokens
        start += length
    return routed
