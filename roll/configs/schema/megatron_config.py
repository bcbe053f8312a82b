"""Options of `megatron_train` and `megatron_infer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.schema.acts_if import TRAINS, acting, needs
from roll.configs.schema.fields import number
from roll.configs.schema.strategy_options import StrategyConfig

RECOMPUTED = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts")
"""What `recompute_modules` may name."""

UNEVEN = frozenset(
    (
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
)
"""`additional_configs` that give pipeline stages different numbers of layers; Megatron compares these itself."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(StrategyConfig):
    """Megatron-core. Data-parallel ranks = the role's ranks / (tensor x pipeline x context parallel size)."""

    tensor_model_parallel_size: int = number(1, ge=1)
    """Ranks that share every matrix; divides the attention heads, the MLP's width and the vocabulary (padded to it)."""
    pipeline_model_parallel_size: int = number(1, ge=1)
    """Ranks that share the layers, one stage each."""
    virtual_pipeline_model_parallel_size: int | None = number(None, ge=1)
    """Virtual pipeline stages per rank, interleaved: shorter bubbles, more messages. null: one."""
    context_parallel_size: int = number(1, ge=1)
    """Ranks that share every sequence; attention exchanges heads for tokens between them."""
    expert_model_parallel_size: int = number(1, ge=1)
    """Ranks that share the experts of a mixture-of-experts model; divides their number. This size x
    `expert_tensor_parallel_size` x `pipeline_model_parallel_size` divides the role's ranks."""
    expert_tensor_parallel_size: int | None = number(None, ge=1)
    """Ranks that share the matrices of one expert. null: `tensor_model_parallel_size`."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence. Needs tensor parallelism; models with
    experts need it as soon as they have tensor parallelism."""
    recompute_granularity: Literal["full", "selective"] | None = acting(None, TRAINS)
    """Recompute activations in the backward pass: whole layers, or `recompute_modules`. null: `full` unless
    `model_args.disable_gradient_checkpointing`."""
    recompute_method: Literal["uniform", "block"] | None = acting(None, TRAINS)
    """With `full`: chunks of `recompute_num_layers` layers, which divides the layers of a stage, or only the first so
    many of each stage. null: uniform."""
    recompute_num_layers: int | None = number(None, ge=1, acts_if=(TRAINS,))
    """See `recompute_method`. null: 1."""
    recompute_modules: tuple[str, ...] | None = acting(None, TRAINS)
    """With `selective`: any of core_attn, mlp (not that of layers with experts), layernorm, moe, moe_act (needs
    `moe_grouped_gemm`), shared_experts. null: core_attn, or with `moe_layer_recompute` nothing else."""
    moe_layer_recompute: bool = acting(False, TRAINS)
    """Recompute the expert layers, and besides only `recompute_modules`. Needs `recompute_granularity: selective` or
    `model_args.disable_gradient_checkpointing`, because whole layers are recomputed otherwise."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens reach their experts on other ranks."""
    moe_grouped_gemm: bool = acting(False, accelerator={True: "grouped_gemm"})
    """Compute all experts of a rank in one grouped kernel. Needs an accelerator."""
    moe_shared_expert_overlap: bool = acting(
        False, needs("moe_token_dispatcher_type", "alltoall", why="the overlap is with the all-to-all"),
        accelerator={True: None},
    )  # fmt: skip
    """Compute the shared expert while tokens travel. Needs an accelerator."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Type of the router's computation. null: that of the model."""
    moe_aux_loss_coeff: float = number(0.0, ge=0, acts_if=(TRAINS,))
    """Weight of the load-balancing loss (arXiv:2101.03961), a mean over the tokens of a mini-batch, padding included.
    Loads are those of a micro-batch, so it depends on how rows are cut into them. 0: off."""
    overlap_grad_reduce: bool = acting(False, TRAINS)
    """Sum gradients over ranks while the backward pass goes on."""
    overlap_param_gather: bool = acting(False, TRAINS, needs("use_distributed_optimizer"), needs("overlap_grad_reduce"))
    """Gather updated parameters while the forward pass goes on."""
    use_distributed_optimizer: bool = True
    """Keep each optimizer state on one of the ranks that hold the same weights (data and context parallelism) only."""
    optimizer_cpu_offload: bool = acting(False, TRAINS, accelerator={True: None})
    """Keep optimizer states in host memory. Needs an accelerator."""
    transformer_impl: Literal["local", "transformer_engine"] = acting(
        "local", accelerator={"transformer_engine": "transformer_engine"}
    )
    """Layers of Megatron itself, or fused ones of Transformer Engine (needs its package and an accelerator)."""
    additional_configs: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's `TransformerConfig`, those of the list in docs/backends.md: they act in the layers
    that are built and leave the model's numbers as they are. Every other one is refused."""

    @property
    def parallel_sizes(self) -> Mapping[str, int]:
        return {
            "tp": self.tensor_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "cp": self.context_parallel_size,
        }
