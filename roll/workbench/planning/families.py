"""Model types whose weights are known, and what a config.json means in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_PRE = ("input_layernorm", "post_attention_layernorm")
_SANDWICH = (*_PRE, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the weights of one model type follow from its configuration."""

    norms: tuple[str, ...] = _PRE
    """Norms of a layer besides those of its queries and keys."""
    qk_norm: Literal["head", "all"] | None = None
    """Norms of queries and keys: of each head, or of all together."""
    qkv_bias: bool | str = False
    """A fixed answer, or the field that has it."""
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    fused: bool = False
    """One matrix for queries, keys and values, one for gate and up."""
    experts: tuple[str, ...] = ()
    """Fields with the number of experts; none: the model is dense."""
    expert_width: str = "moe_intermediate_size"
    shared_width: str | None = None
    router_last: bool = False
    softcap: bool = False
    """Logits are soft-capped, which makes a float32 copy of them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers assumes where config.json doesn't say."""


_TIED = {"tie_word_embeddings": True}


def _with_biases(**more: Any) -> Family:
    """Return a family whose configuration says whether its attention has biases."""
    return Family(qkv_bias="attention_bias", output_bias="attention_bias", **more)


FAMILIES: dict[str, Family] = {
    "llama": _with_biases(mlp_bias="mlp_bias"),
    "qwen2": Family(qkv_bias=True),
    "qwen3": _with_biases(qk_norm="head", defaults={"head_dim": 128}),
    "mistral": Family(),
    "mixtral": Family(experts=("num_local_experts", "num_experts"), expert_width="intermediate_size"),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        experts=("num_experts", "num_local_experts"),
        shared_width="shared_expert_intermediate_size",
        defaults={"qkv_bias": True},
    ),
    "qwen3_moe": _with_biases(qk_norm="head", experts=("num_experts", "num_local_experts"), router_last=True),
    "gemma": _with_biases(defaults={**_TIED, "head_dim": 256}),
    "gemma2": _with_biases(norms=_SANDWICH, softcap=True, defaults={**_TIED, "head_dim": 256}),
    "gemma3_text": _with_biases(norms=_SANDWICH, qk_norm="head", defaults={**_TIED, "head_dim": 256}),
    "phi3": Family(fused=True),
    "granite": _with_biases(mlp_bias="mlp_bias", defaults=_TIED),
    "olmo2": _with_biases(norms=_SANDWICH[1::2], qk_norm="all"),
    "smollm3": _with_biases(mlp_bias="mlp_bias", defaults=_TIED),
}
"""By `model_type`."""
