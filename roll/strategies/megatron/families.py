"""From a Hugging Face configuration to the architecture that Megatron builds, for the families it can express."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.configs.schema.model_shape import MEGATRON_MODEL_TYPES
from roll.strategies.training.pretrained import head_size


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder of pre-norm layers with rotary, grouped-query attention and gated SiLU MLPs, dense or of experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """The head is the embedding."""
    padding: int | None
    """A token whose embedding gets no gradient as an input; None: there is none."""
    norm_eps: float
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMS norm of every query and key head before the rotation."""
    windows: tuple[int | None, ...]
    """Of each layer: a token attends to itself and window - 1 before it; None: to all before it."""
    ffn: int
    """Width of the dense MLPs."""
    sparse: tuple[bool, ...]
    """Which layers have experts."""
    experts: int = 0
    expert_ffn: int = 0
    experts_per_token: int = 0
    normalised: bool = True
    """The chosen experts' weights sum to 1."""
    shared_ffn: int = 0
    """Width of a gated expert that every token passes; 0: none."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    qkv_bias: bool | str = False  # a fixed answer, or the field that has it
    qk_norm: bool = False
    window: str | None = None
    """layer_types: each layer says whether its window slides; sliding_window: all of them do if it is set."""
    experts: str | None = None
    expert_ffn: str = "moe_intermediate_size"
    shared_ffn: str | None = None
    normalised: str | None = None  # field that says whether the chosen experts' weights are normalised; None: they are
    must_be_off: tuple[str, ...] = ()


_FAMILIES = {
    "llama": _Family(must_be_off=("attention_bias", "mlp_bias")),
    "qwen2": _Family(qkv_bias=True, window="layer_types"),
    "qwen3": _Family(qk_norm=True, window="layer_types", must_be_off=("attention_bias",)),
    "mistral": _Family(window="sliding_window"),
    "mixtral": _Family(window="sliding_window", experts="num_local_experts", expert_ffn="intermediate_size"),
    "qwen2_moe": _Family(
        qkv_bias="qkv_bias",
        window="layer_types",
        experts="num_experts",
        shared_ffn="shared_expert_intermediate_size",
        normalised="norm_topk_prob",
    ),
    "qwen3_moe": _Family(
        qk_norm=True,
        window="sliding_window",
        experts="num_experts",
        normalised="norm_topk_prob",
        must_be_off=("attention_bias",),
    ),
}
assert tuple(_FAMILIES) == MEGATRON_MODEL_TYPES


def architecture(config: Any) -> Architecture:
    """Return what a transformers configuration describes; `ValueError` for what Megatron can't build."""
    if config.model_type not in _FAMILIES:
        raise ValueError(
            f"megatron can't build models of type {config.model_type!r}; it knows {', '.join(_FAMILIES)}. fsdp2_* and "
            "deepspeed_* take any model of transformers"
        )
    family = _FAMILIES[config.model_type]
    _check_supported(config, family)
    layers: int = config.num_hidden_layers
    return Architecture(
        layers=layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_size(config),
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        padding=None if config.pad_token_id is None else config.pad_token_id % config.vocab_size,
        norm_eps=config.rms_norm_eps,
        qkv_bias=_answer(config, family.qkv_bias),
        qk_norm=family.qk_norm,
        windows=_windows(config, family),
        ffn=config.intermediate_size,
        sparse=_sparse(config, family),
        experts=getattr(config, family.experts) if family.experts else 0,
        expert_ffn=getattr(config, family.expert_ffn) if family.experts else 0,
        experts_per_token=config.num_experts_per_tok if family.experts else 0,
        normalised=_answer(config, family.normalised or True),
        shared_ffn=getattr(config, family.shared_ffn) if family.shared_ffn else 0,
    )


def _answer(config: Any, field: bool | str) -> bool:
    return bool(getattr(config, field)) if isinstance(field, str) else field


def _windows(config: Any, family: _Family) -> tuple[int | None, ...]:
    window = config.sliding_window or None if family.window else None
    if family.window != "layer_types":
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _sparse(config: Any, family: _Family) -> tuple[bool, ...]:
    layers = range(config.num_hidden_layers)
    if family.experts is None or config.model_type == "mixtral":
        return tuple(family.experts is not None for _ in layers)
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def _check_supported(config: Any, family: _Family) -> None:
    def refuse(field: str, expected: str) -> None:
        raise ValueError(
            f"megatron can't build this {config.model_type} model: its configuration has {field} = "
            f"{config.to_dict().get(field)!r}, expected {expected}; use fsdp2_* or deepspeed_*, which take any model"
        )

    for field in family.must_be_off:
        if getattr(config, field):
            refuse(field, "false: linear layers have no bias but that of query, key and value in Qwen2")
    if config.hidden_act != "silu":
        refuse("hidden_act", "silu")
    if config.to_dict().get("quantization_config") is not None:
        refuse("quantization_config", "none: quantised weights can't be trained")
    rope = config.rope_parameters
    if "rope_type" not in rope:
        refuse("rope_parameters", "one set for all layers, with a rope_type")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("rope_parameters", "a partial_rotary_factor of 1: this family rotates whole heads")
    if family.window == "layer_types" and set(config.layer_types) - {"full_attention", "sliding_attention"}:
        refuse("layer_types", "full_attention and sliding_attention only")
    if config.num_attention_heads % config.num_key_value_heads:
        refuse("num_key_value_heads", f"a divisor of num_attention_heads = {config.num_attention_heads}")
    if family.experts and family.normalised is None and config.num_experts_per_tok == 1:
        refuse("num_experts_per_tok", "2 or more: the weight of a single expert, normalised, is always 1")
    if family.normalised and config.num_experts_per_tok == 1 and _answer(config, family.normalised):
        refuse("norm_topk_prob", "false with one expert per token: its weight would always be 1")
