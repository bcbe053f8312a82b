"""Where an engine sent tokens, from responses to turns and from turns to training rows (router replay)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.strategies.base import Completion
from roll.types.trajectory import Turn


def routed_before(completion: Completion, prompt_tokens: int) -> np.ndarray | None:
    """Return `Turn.routed_experts` of a turn that adds so many tokens of prompt to its context."""
    found = completion.routed_experts
    if found is None:
        return None
    size = prompt_tokens + completion.num_tokens
    if size == len(found):  # a context begins: before its first token there is none
        return np.concatenate([np.full_like(found[:1], -1), found[:-1]])
    return found[len(found) - size - 1 : -1].copy()  # what came before it belongs to other turns


def with_unrouted(found: np.ndarray | None, tokens: int) -> np.ndarray | None:
    """Return `Turn.routed_experts` of a turn that has so many more tokens in front, of which nobody has told."""
    if found is None or not tokens:
        return found
    return np.concatenate([np.full((tokens, *found.shape[1:]), -1, found.dtype), found])


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
    found = np.full((sum(lengths), *size), -1, np.int16)
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        at = start - 1  # a turn tells of the tokens before its own
        for turn in row:
            tokens = turn.num_tokens
            if turn.routed_experts is not None:
                skipped = max(0, start - at)
                found[at + skipped : at + tokens] = turn.routed_experts[skipped:]
            at += tokens
        start += length
    return found
