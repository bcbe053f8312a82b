"""What a model's config.json says about its shape: enough to see whether a parallel layout can divide it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll.configs.catalog.family_table import family_of

RECURRENT_LAYERS = ("linear_attention", "mamba", "conv")
"""Types of layers with a state that goes through the row in place of attention, as config.json has them."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder; None where the model doesn't say."""

    model_type: str | None = None
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values."""
    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    """Width of the MLP; of one expert where there are experts."""
    vocab: int | None = None
    positions: int | None = None
    """Longest sequence."""
    experts: int = 0
    """Experts per layer; 0: a dense model."""
    shared_expert: bool = False
    """Whether every token also passes an expert of its own."""
    attending: float = 1.0
    """Share of the layers that are attention; a recurrent one takes a token as long wherever it stands."""
    places: tuple[int, ...] = ()
    """Tokens that stand for pictures and videos, of a model that is given pictures."""

    @property
    def attention_share(self) -> float:
        """Return c, where the FLOPs of a sequence of l tokens are proportional to l + c l^2; 0 where sizes aren't
        known.

        Matrices take 2 FLOPs per weight and token: 2 (2 h^2 + 2 h k + 3 h m) per layer, with hidden size h, width k of
        keys, width m of a gated MLP; causal attention 2 h l per token of a sequence of l, in the layers that have it.
        Experts count as one, recurrent layers as attention without the square.
        """
        if not (self.hidden and self.heads and self.kv_heads and self.intermediate):
            return 0.0
        keys = self.hidden * self.kv_heads / self.heads
        return self.attending / (2 * self.hidden + 2 * keys + 3 * self.intermediate)


def read_shape(name: str, overrides: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a local model folder, or of a hub model that is in the hub's cache; None when that isn't
    known.

    `overrides` are the user's `model_config_kwargs`.
    """
    file = config_file(name)
    if file is None:
        return None
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None  # transformers says it better when it loads the model
    if not isinstance(tree, dict):
        return None
    text = tree.get("text_config")
    shape = shape_of({**tree, **(text if isinstance(text, dict) else {}), **overrides})
    if family_of(tree.get("model_type")).pictures is None:
        return shape
    places = (tree.get(name) for name in ("image_token_id", "video_token_id"))
    return replace(shape, places=tuple(place for place in places if isinstance(place, int)))


def config_file(name: str) -> Path | None:
    """Return the config.json of a local model folder, or of a hub model that is in the hub's cache; None without."""
    folder = Path(name).expanduser()
    if folder.exists():
        file = folder / "config.json"
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None  # not a hub id; `model_checks` says so
    return Path(cached) if isinstance(cached, str) else None


def shape_of(tree: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a decoder's configuration describes."""

    def size(*keys: str) -> int | None:
        values = (tree.get(key) for key in keys)
        return next((value for value in values if type(value) is int), None)

    heads = size("num_attention_heads")
    kinds = tree.get("layer_types") or tree.get("layers_block_type")
    kinds = kinds if isinstance(kinds, list) and kinds else ["full_attention"]
    experts = size("num_local_experts", "num_experts", "n_routed_experts") or 0
    return ModelShape(
        model_type=tree.get("model_type"),
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        layers=size("num_hidden_layers"),
        hidden=size("hidden_size"),
        intermediate=(size("moe_intermediate_size") if experts else None) or size("intermediate_size"),
        vocab=size("vocab_size"),
        positions=size("max_position_embeddings"),
        experts=experts,
        attending=sum(kind not in (*RECURRENT_LAYERS, "mlp", "moe") for kind in kinds) / len(kinds),
        shared_expert=bool(size("shared_expert_intermediate_size", "n_shared_experts")),
    )
