"""Options and architecture together: Megatron's `TransformerConfig`."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from typing import Any

import torch
import torch.nn.functional as F

from roll.configs.megatron import UNEVEN, MegatronConfig
from roll.strategies.megatron.families import Architecture

_OF_ATTENTION = (
    "apply_query_key_layer_scaling",
    "apply_rope_fusion",
    "attention_backend",
    "attention_softmax_in_fp32",
    "cp_comm_type",
    "flash_decode",
    "fused_single_qkv_rope",
    "masked_softmax_fusion",
    "no_rope_freq",
    "rotary_interleaved",
    "softmax_type",
    "window_attn_skip_freq",
    "window_size",
)
"""Fields that Megatron's own attention would read; the one used here follows the model's configuration."""

_OF_SCHEDULE = (
    "batch_p2p_comm",
    "finalize_model_grads_func",
    "grad_scale_func",
    "grad_sync_func",
    "no_sync_func",
    "overlap_p2p_comm",
    "param_sync_func",
    "timers",
    "variable_seq_lengths",
)
"""Fields that the strategy sets, because they depend on how it calls the schedule."""

_OF_ACCELERATORS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
)

_OF_TRANSFORMER_ENGINE = ("cpu_offloading", "fp4", "fp8")
"""Beginnings of the names of fields that only its layers act on."""


def transformer_config(
    arch: Architecture, options: MegatronConfig, *, dtype: torch.dtype, trains: bool, recompute: bool
) -> Any:
    """The `TransformerConfig` of a role.

    Raises:
        ValueError: a size doesn't divide the model, or `additional_configs` has a field that doesn't exist, that
            another key sets, or that would have no effect.
    """
    check_divisible(arch, options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|full scope|core_attn).*")
        from megatron.core.transformer import TransformerConfig

        fields = {
            **_model_fields(arch),
            **_layout_fields(options, dtype),
            **_expert_fields(arch, options),
            **_recompute_fields(options, wanted=trains and recompute),
        }
        _check_additional(options, fields, TransformerConfig)
        return TransformerConfig(**fields, **options.additional_configs)


def _model_fields(arch: Architecture) -> dict[str, Any]:
    return {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        # Dropout would make the ratio of old and new log-probs noise.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _layout_fields(options: MegatronConfig, dtype: torch.dtype) -> dict[str, Any]:
    virtual = options.virtual_pipeline_model_parallel_size
    return {
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": None if virtual == 1 else virtual,
        "context_parallel_size": options.context_parallel_size,
        "expert_model_parallel_size": options.expert_model_parallel_size,
        "expert_tensor_parallel_size": options.expert_tensor_parallel_size,
        "sequence_parallel": options.sequence_parallel,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        # Every parameter is loaded.
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Losses come divided by global sizes; nothing else may divide them.
        "calculate_per_token_loss": True,
    }


def _expert_fields(arch: Architecture, options: MegatronConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "moe_token_dispatcher_type": options.moe_token_dispatcher_type,
        "moe_grouped_gemm": options.moe_grouped_gemm,
        "moe_shared_expert_overlap": options.moe_shared_expert_overlap,
        "moe_router_dtype": options.moe_router_dtype,
        "moe_aux_loss_coeff": options.moe_aux_loss_coeff,
        "moe_router_load_balancing_type": "aux_loss" if options.moe_aux_loss_coeff > 0 else "none",
        "num_moe_experts": arch.experts or None,
    }
    if arch.experts:
        fields |= {
            "moe_layer_freq": [int(sparse) for sparse in arch.sparse],
            "moe_ffn_hidden_size": arch.expert_ffn,
            "moe_router_topk": arch.experts_per_token,
            # Softmax over the chosen experts is softmax over all of them, normalised.
            "moe_router_pre_softmax": not arch.normalised,
            "moe_shared_expert_intermediate_size": arch.shared_ffn or None,
            "moe_shared_expert_gate": arch.shared_ffn > 0,
        }
    return fields


def _recompute_fields(options: MegatronConfig, *, wanted: bool) -> dict[str, Any]:
    granularity = options.recompute_granularity
    if options.moe_layer_recompute and granularity is None:
        granularity = "selective"
    if granularity is None and wanted:
        granularity = "full"
    full = granularity == "full"
    modules = list(options.recompute_modules or (() if options.moe_layer_recompute else ("core_attn",)))
    if options.moe_layer_recompute:
        modules.append("moe")
    return {
        "recompute_granularity": granularity,
        "recompute_method": (options.recompute_method or "uniform") if full else None,
        "recompute_num_layers": (options.recompute_num_layers or 1) if full else None,
        "recompute_modules": modules if granularity == "selective" else None,
        "moe_layer_recompute": False,  # deprecated spelling of recompute_modules
    }


def _check_additional(options: MegatronConfig, taken: dict[str, Any], config: type) -> None:
    known = [field.name for field in dataclasses.fields(config)]
    for name, value in options.additional_configs.items():
        path = f"strategy_config.additional_configs.{name}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{path}: Megatron's TransformerConfig has no such field{hint}")
        if name in taken or name in _OF_SCHEDULE:
            raise ValueError(
                f"{path}: already set, by a key of strategy_config or by the model's own configuration; remove it"
            )
        if name in _OF_ATTENTION:
            raise ValueError(
                f"{path}: would have no effect, because attention follows the model's own configuration; remove it"
            )
        if name.startswith("moe_") and not taken["num_moe_experts"]:
            raise ValueError(f"{path}: would have no effect, because the model has no experts; remove it")
        if name.startswith(_OF_TRANSFORMER_ENGINE) and options.transformer_impl != "transformer_engine":
            raise ValueError(f"{path}: needs transformer_impl=transformer_engine, whose layers act on it; remove it")
        if name in _OF_ACCELERATORS and value and not torch.cuda.is_available():
            raise ValueError(f"{path}: needs an accelerator, and there is none; expected false")


def check_divisible(arch: Architecture, options: MegatronConfig) -> None:
    """Raise `ValueError` unless every parallel size divides what it splits."""
    tensor, expert = options.tensor_model_parallel_size, options.expert_model_parallel_size
    expert_tensor = options.expert_tensor_parallel_size or tensor
    stages = options.pipeline_model_parallel_size * (options.virtual_pipeline_model_parallel_size or 1)
    context = options.context_parallel_size

    def divides(size: int, key: str, number: int, what: str) -> None:
        if number % size:
            raise ValueError(f"strategy_config.{key} = {size} doesn't divide the model's {number} {what}")

    divides(tensor, "tensor_model_parallel_size", arch.heads, "attention heads")
    if arch.kv_heads % tensor and tensor % arch.kv_heads:
        raise ValueError(
            f"strategy_config.tensor_model_parallel_size = {tensor} neither divides the model's {arch.kv_heads} "
            "key-value heads nor is a multiple of them"
        )
    divides(context * tensor, "context_parallel_size * tensor_model_parallel_size", arch.heads, "attention heads")
    if not all(arch.sparse):
        divides(tensor, "tensor_model_parallel_size", arch.ffn, "MLP columns (intermediate_size)")
    if not options.additional_configs.keys() & UNEVEN:
        divides(stages, "pipeline_model_parallel_size * virtual_pipeline_model_parallel_size", arch.layers, "layers")
    if not arch.experts:
        if expert > 1:
            raise ValueError(f"strategy_config.expert_model_parallel_size = {expert}, but the model has no experts")
        return
    divides(expert, "expert_model_parallel_size", arch.experts, "experts")
    divides(expert_tensor, "expert_tensor_parallel_size", arch.expert_ffn, "columns of an expert")
    if arch.shared_ffn:
        divides(tensor, "tensor_model_parallel_size", arch.shared_ffn, "columns of the shared expert")
    if tensor > 1 and not options.sequence_parallel:
        raise ValueError(
            f"strategy_config.sequence_parallel: models with experts need it with tensor_model_parallel_size = {tensor}"
        )
