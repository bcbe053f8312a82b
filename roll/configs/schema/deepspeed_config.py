"""Options of `deepspeed_train` and `deepspeed_infer`: DeepSpeed's own JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.schema.acts_if import TRAINS, acting
from roll.configs.schema.strategy_options import StrategyConfig

Auto = Literal["auto"]
_AUTO = ("auto",)


_SHARDED, _GATHERED = (1, 2, 3), (3,)

ZERO_KEYS = {
    "stage": (0, 1, 2, 3),
    **dict.fromkeys(
        ("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm", "offload_optimizer"), _SHARDED
    ),
    **dict.fromkeys(
        ("allgather_partitions", "allgather_bucket_size", "use_multi_rank_bucket_allreduce",
         "ignore_unused_parameters", "parameter_alignment"),
        (1, 2),
    ),
    **dict.fromkeys(
        ("offload_param", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
         "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
         "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "zero_hpz_partition_size",
         "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
         "log_trace_cache_warnings", "enable_sanity_checks"),
        _GATHERED,
    ),
}  # fmt: skip
"""Keys of `zero_optimization` that act here with DeepSpeed 0.19, each with the stages in which it does."""

QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
"""Those whose kernels only run on an accelerator."""

OFFLOAD_KEYS = {
    "offload_optimizer": frozenset({"device", "pin_memory", "ratio"}),
    "offload_param": frozenset({"device", "pin_memory"}),
}
"""Keys of its sections for offload to host memory."""

REFUSED_ZERO_KEYS = {
    "cpu_offload": "the old name of offload_optimizer: {device: cpu}",
    "cpu_offload_param": "the old name of offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "the old name of pin_memory in the offload sections",
    "legacy_stage1": "gone from DeepSpeed",
    "zenflow": "it updates weights outside the optimizer steps that runs count and checkpoint",
    "compute_grad_norm": "the gradient norm is always reported",
    "elastic_checkpoint": "checkpoints are written in a format of this project, for every stage",
    "load_from_fp32_weights": "checkpoints are written in a format of this project, in fp32",
    "pipeline_loading_checkpoint": "checkpoints are written in a format of this project",
    "stage3_gather_16bit_weights_on_model_save": "models are exported in fp32, one tensor at a time",
    "stage3_gather_fp16_weights_on_model_save": "models are exported in fp32, one tensor at a time",
    "save_muon_momentum_buffer_in_memory": "the optimizer is AdamW",
    "leaf_module": "modules are sharded as DeepSpeed finds them",
    "stage3_module_granularity_threshold": "modules are sharded as DeepSpeed finds them",
    "round_robin_gradients": "weights are read from ZeRO's partitions in the order of the model",
    "memory_efficient_linear": "models are sharded once they are loaded, not while they are built",
    "override_module_apply": "models are sharded once they are loaded, not while they are built",
}
"""Keys that DeepSpeed knows and that can't act here, and why."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig(StrategyConfig):
    """DeepSpeed's configuration as its documentation describes it. Batch sizes, clipping and types are filled in from
    `training_args`, `max_grad_norm` and `model_args.dtype`; one that contradicts them is refused."""

    zero_optimization: dict[str, Any] = field(default_factory=dict)
    """ZeRO: `stage` 0 to 3, `offload_optimizer`, `offload_param`, bucket sizes and the rest of DeepSpeed's section; a
    key that doesn't act in the stage, or not here, is refused.
    Without an optimizer stages 1 and 2 have nothing to shard: every rank then holds the model, as with stage 0."""
    train_batch_size: int | Auto | None = acting(None, TRAINS, idle=_AUTO)
    """Responses per optimizer step. `auto` or null: per device x accumulation x data-parallel ranks."""
    train_micro_batch_size_per_gpu: int | Auto | None = acting(None, TRAINS, idle=_AUTO)
    """Responses per forward/backward pass. `auto` or null: `training_args.per_device_train_batch_size`."""
    gradient_accumulation_steps: int | Auto | None = acting(None, TRAINS, idle=_AUTO)
    """Passes per optimizer step. `auto` or null: `training_args.gradient_accumulation_steps`."""
    gradient_clipping: float | Auto | None = acting(None, TRAINS, idle=_AUTO)
    """Largest gradient norm. `auto` or null: the pipeline's `max_grad_norm`."""
    bf16: dict[str, Any] | None = None
    """Must agree with `model_args.dtype`, which fills it in: bf16 weights that compute, fp32 weights that are trained
    (stage 0: fp32 weights, bf16 under autocast)."""
    fp16: dict[str, Any] | None = None
    """Likewise, for roles that don't train."""
    optimizer: dict[str, Any] | None = acting(None, TRAINS)
    """Accepted only as far as it repeats `training_args`: AdamW with the same numbers or `auto`."""
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = acting(None, TRAINS)
    """Type in which gradients are summed over ranks. null: fp32."""
    data_types: dict[str, Any] | None = acting(None, TRAINS)
    """`grad_accum_dtype`: type in which gradients of micro-batches are summed; bf16 for stages 1 to 3 with
    `model_args.dtype: bf16`. null: fp32."""
    prescale_gradients: bool | None = acting(None, TRAINS)
    """Divide gradients before they are summed over ranks and not after it, against overflow in half precision. For
    stage 0, and for 1 and 2 with `reduce_scatter: false`; the others always do."""
    gradient_predivide_factor: float | None = acting(None, TRAINS, bounds={"gt": 0})
    """Divide by this much before the sum and by the rest after it. For the same stages; not with
    `prescale_gradients`."""

    @property
    def stage(self) -> int:
        """Return the ZeRO stage; 0 without one."""
        stage = self.zero_optimization.get("stage", 0)
        return stage if isinstance(stage, int) else 0

    @property
    def fills_shares(self) -> bool:
        """Return whether an empty module is sharded and then filled: not if ZeRO 3 makes something else of whole
        weights."""
        zero = self.zero_optimization
        offloaded = zero.get("offload_param") or {}
        again = zero.get("zero_hpz_partition_size", 1) > 1 or zero.get("zero_quantized_nontrainable_weights", False)
        return self.stage < 3 or not (again or offloaded.get("device") == "nvme")

    def offloads(self, section: Literal["offload_optimizer", "offload_param"]) -> bool:
        """Return whether these states live off the device."""
        options = self.zero_optimization.get(section)
        return isinstance(options, dict) and options.get("device", "none") != "none"
