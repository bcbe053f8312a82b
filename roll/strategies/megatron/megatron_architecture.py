"""From a Hugging Face configuration to the architecture that Megatron builds, for the families it can express."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.configs.catalog.family_table import FAMILIES, Decoder, Experts, family_of
from roll.strategies.training.pretrained import head_size


@dataclass(frozen=True, kw_only=True)
class MegatronArchitecture:
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


def architecture(config: Any) -> MegatronArchitecture:
    """Return what a transformers configuration describes; `ValueError` for what Megatron can't build."""
    family = family_of(config.model_type)
    decoder, experts = family.decoder, family.experts
    if not family.megatron or decoder is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.megatron)
        why = f": {family.megatron_lacks}" if family.megatron_lacks else ""
        raise ValueError(
            f"megatron can't build models of type {config.model_type!r}{why}; it knows {known}. fsdp2_* and "
            "deepspeed_* take any model of transformers"
        )
    _check_supported(config, decoder, experts)
    layers: int = config.num_hidden_layers
    return MegatronArchitecture(
        layers=layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_size(config),
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        padding=None if config.pad_token_id is None else config.pad_token_id % config.vocab_size,
        norm_eps=config.rms_norm_eps,
        qkv_bias=_answer(config, decoder.qkv_bias),
        qk_norm=decoder.qk_norm is not None,
        windows=_windows(config, decoder),
        ffn=config.intermediate_size,
        sparse=_sparse(config, experts),
        experts=getattr(config, experts.count[0]) if experts else 0,
        expert_ffn=getattr(config, experts.width) if experts else 0,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        normalised=_answer(config, (experts and experts.normalised) or True),
        shared_ffn=getattr(config, experts.shared_width) if experts and experts.shared_width else 0,
    )


def _answer(config: Any, field: bool | str) -> bool:
    return bool(getattr(config, field)) if isinstance(field, str) else field


def _windows(config: Any, decoder: Decoder) -> tuple[int | None, ...]:
    window = config.sliding_window or None if decoder.window else None
    if decoder.window != "layer_types":
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _sparse(config: Any, experts: Experts | None) -> tuple[bool, ...]:
    layers = range(config.num_hidden_layers)
    if experts is None or experts.every_layer:
        return tuple(experts is not None for _ in layers)
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def _check_supported(config: Any, decoder: Decoder, experts: Experts | None) -> None:
    def refuse(field: str, expected: str) -> None:
        raise ValueError(
            f"megatron can't build this {config.model_type} model: its configuration has {field} = "
            f"{config.to_dict().get(field)!r}, expected {expected}; use fsdp2_* or deepspeed_*, which take any model"
        )

    for field in (decoder.output_bias, decoder.mlp_bias):
        if isinstance(field, str) and getattr(config, field):
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
    if decoder.window == "layer_types" and set(config.layer_types) - {"full_attention", "sliding_attention"}:
        refuse("layer_types", "full_attention and sliding_attention only")
    if config.num_attention_heads % config.num_key_value_heads:
        refuse("num_key_value_heads", f"a divisor of num_attention_heads = {config.num_attention_heads}")
    if experts and experts.normalised is None and config.num_experts_per_tok == 1:
        refuse("num_experts_per_tok", "2 or more: the weight of a single expert, normalised, is always 1")
    if experts and experts.normalised and config.num_experts_per_tok == 1 and _answer(config, experts.normalised):
        refuse("norm_topk_prob", "false with one expert per token: its weight would always be 1")
