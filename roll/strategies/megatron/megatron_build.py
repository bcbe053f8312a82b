"""Options and architecture together: Megatron's `TransformerConfig`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

from roll.configs.rules.megatron_fields import ON_ACCELERATORS, refused_fields
from roll.configs.schema.megatron_config import MegatronConfig
from roll.strategies.megatron.megatron_architecture import MegatronArchitecture
from roll.strategies.megatron.parallel import sizes


def transformer_config(
    arch: MegatronArchitecture, options: MegatronConfig, *, dtype: torch.dtype, trains: bool, recompute: bool
) -> Any:
    """Return the `TransformerConfig` of a role.

    Raises `ValueError` if tensor parallelism doesn't divide an MLP, or a field of `additional_configs` isn't
    one of those that are handed on, or doesn't fit the layout. `shape_rules` have checked the other sizes.
    """
    _check_layers(arch, options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|full scope|core_attn).*")
        from megatron.core.transformer import TransformerConfig

        fields = {
            **_model_fields(arch),
            **_layout_fields(options, dtype),
            **_expert_fields(arch, options),
            **_recompute_fields(options, wanted=trains and recompute),
        }
        _check_additional(options, experts=bool(fields["num_moe_experts"]))
        try:
            return TransformerConfig(**fields, **options.additional_configs)
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            if not options.additional_configs:
                raise
            names = ", ".join(options.additional_configs)
            raise ValueError(f"strategy_config.additional_configs: Megatron refuses {names} here: {error}") from error


def _model_fields(arch: MegatronArchitecture) -> dict[str, Any]:
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
    return {
        **sizes(options),
        "sequence_parallel": options.sequence_parallel,
        "transformer_impl": options.transformer_impl,
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


def _expert_fields(arch: MegatronArchitecture, options: MegatronConfig) -> dict[str, Any]:
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


def _check_layers(arch: MegatronArchitecture, options: MegatronConfig) -> None:
    """Raise `ValueError` for what only shows in the layers themselves: their MLPs, and which of them have experts."""
    tensor = options.tensor_model_parallel_size
    for width, what in ((0 if all(arch.sparse) else arch.ffn, "an MLP"), (arch.shared_ffn, "the shared expert")):
        if width % tensor:
            raise ValueError(
                f"strategy_config.tensor_model_parallel_size = {tensor} doesn't divide the {width} columns of {what}"
            )
    if "mlp" in (options.recompute_modules or ()) and all(arch.sparse):
        raise ValueError(
            "strategy_config.recompute_modules: mlp would have no effect, because every layer of the model has "
            "experts; use moe"
        )


def _check_additional(options: MegatronConfig, *, experts: bool) -> None:
    """Raise `ValueError` for a field that rules refuse, or that has nothing to act on here."""
    path = "strategy_config.additional_configs"
    for name, message in refused_fields(options.additional_configs).items():
        raise ValueError(f"{path}.{name}: {message}; remove it")
    for name, value in options.additional_configs.items():
        if name.startswith("moe_") and not experts:
            raise ValueError(f"{path}.{name}: would have no effect, because the model has no experts; remove it")
        if name in ON_ACCELERATORS and value and not torch.cuda.is_available():
            raise ValueError(f"{path}.{name}: needs an accelerator, and there is none; expected false")
