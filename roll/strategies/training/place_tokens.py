"""Tokens that stand for pictures in a row: no model says them, whoever samples or scores.

One that was sampled would have no features to stand for. The head gives them the logit -inf, so that sampler and
trainer have the same distribution over all other tokens.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

_IDS = ("image_token_id", "video_token_id")
"""Fields of configurations."""


class PlaceMaskingHead(nn.Linear):
    """An output head that never says the tokens in `places`."""

    places: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        """Return logits [..., V]."""
        logits = super().forward(input)
        for place in self.places:
            if place < logits.shape[-1]:  # a small model for proofs has fewer tokens
                logits[..., place] = -math.inf
        return logits


def place_tokens(config: Any) -> tuple[int, ...]:
    """Return the ids that stand for pictures and videos, by a model's configuration."""
    return tuple(getattr(config, name) for name in _IDS if getattr(config, name, None) is not None)


def forbid_places(model: Any) -> None:
    """Let a transformers model never say its places. Its parameters stay the same ones, under the same names."""
    head = model.get_output_embeddings()
    assert type(head) in (nn.Linear, PlaceMaskingHead), type(head)
    head.__class__ = PlaceMaskingHead
    head.places = place_tokens(model.config)
