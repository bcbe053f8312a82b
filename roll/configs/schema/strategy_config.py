"""Options of the backends that `roll/configs/catalog/strategy_table.py` lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.catalog import strategy_table as catalog
from roll.configs.schema.acts_if import TRAINS, acting, unless
from roll.configs.schema.fields import number
from roll.configs.schema.strategy_options import StrategyConfig
from roll.utils.importing import load_object

Dtype = Literal["fp32", "bf16", "fp16"]
AutoDtype = Literal["auto", "fp32", "bf16", "fp16"]
DTYPE_NAMES = {
    **{"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"},
    **{"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"},
}
"""Other spellings of types."""
_OFFLOADS = unless("offload_policy", why="it keeps them there all the time")


@dataclass(frozen=True, kw_only=True)
class Fsdp2Config(StrategyConfig):
    """torch FSDP2 (`fully_shard`); a role with one rank uses no process group."""

    fsdp_size: int | None = number(None, ge=1)
    """Ranks that share one copy of the weights; must divide the role's world size. The rest replicate (HSDP).
    null: all ranks of the role."""
    param_dtype: Dtype | None = acting(None, also=DTYPE_NAMES)
    """Type of the gathered weights and of the forward pass. null: `model_args.dtype`."""
    reduce_dtype: Dtype = acting("fp32", also=DTYPE_NAMES)
    """Type in which gradients are summed over ranks. Acts with two ranks or more."""
    reshard_after_forward: bool = True
    """Free the gathered weights between forward and backward: less memory, one more gather. Acts with two
    ranks or more."""
    shard_between_micro_batches: bool = True
    """false: gathered weights and whole gradients (in `reduce_dtype`) stay on every rank from one micro-batch of an
    optimizer step to the next, so gradients travel once per step, and weights, with `reshard_after_forward: false`,
    too (`no_sync`). For small models, or slow networks between machines; acts with two ranks or more, and several
    micro-batches."""
    offload_policy: bool = acting(False, accelerator={True: None})
    """Keep sharded weights, gradients and optimizer states in host memory and bring them in layer by layer.
    Needs an accelerator, acts with two ranks or more."""
    param_offload: bool = acting(False, _OFFLOADS, accelerator={True: None})
    """Keep the weights (this rank's shards) in host memory between the calls that compute with them. Needs an
    accelerator."""
    optimizer_offload: bool = acting(False, TRAINS, _OFFLOADS, accelerator={True: None})
    """Keep the optimizer's states in host memory but for the optimizer step itself: they aren't on the device together
    with activations. Needs an accelerator."""


@dataclass(frozen=True, kw_only=True)
class HfInferConfig(StrategyConfig):
    """Batched generation in PyTorch with a Hugging Face model; `max_running_requests` is its batch size."""


@dataclass(frozen=True, kw_only=True)
class OwnStrategyConfig(StrategyConfig):
    """Options of a backend of your own, which reads them itself."""

    options: dict[str, Any] = field(default_factory=dict, metadata={"open": True})
    """Any keys; they may stand in the section itself."""


STRATEGIES: dict[str, type[StrategyConfig]] = {
    name: load_object(entry.config, key="strategy_name") for name, entry in catalog.STRATEGIES.items()
}
"""Options by name. They are classes of this package: no backend is imported."""


@dataclass(frozen=True, kw_only=True)
class StrategyArgs:
    """Which backend a role runs on."""

    strategy_name: str = field(
        metadata={
            "choices": STRATEGIES, "own": True, "also": {"fsdp_train": "fsdp2_train", "fsdp_infer": "fsdp2_infer"},
        }
    )  # fmt: skip
    """Backend: one that ends in `_train` for roles that train, in `_infer` for forward passes only; `hf_infer`, `vllm`
    or `sglang` for generation; `endpoint` for a teacher behind a service; or your own as `package.module:name` or
    `path/to/file.py:name`, a subclass of `TrainStrategy` or a function that builds an engine. Roles may differ."""
    strategy_config: StrategyConfig = field(
        default_factory=StrategyConfig,
        metadata={"typed_by": "strategy_name", "table": STRATEGIES, "own_table": OwnStrategyConfig},
    )
    """Options of that backend, see below. Default: the backend's own defaults."""

    def __post_init__(self) -> None:
        if type(self.strategy_config) is StrategyConfig:
            object.__setattr__(self, "strategy_config", STRATEGIES.get(self.strategy_name, OwnStrategyConfig)())
