"""Tokens go to the experts that the engine sent them to (router replay, arXiv:2510.11370).

A router's scores are the model's own, and have their gradients; only the choice is the engine's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def replayed(scores: Tensor, own: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scores [N, K] of the experts that count, int64 [N, K] these) for scores [N, E].

    `own` int64 [N, K] are the router's choice, `told` [N, K] the engine's, -1 where it isn't known.
    """
    chosen = torch.where(recorded >= 0, recorded, own)
    return scores.gather(-1, chosen), chosen
