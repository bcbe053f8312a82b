"""Backends by name, each with typed options. A new one adds a dataclass and a line in `STRATEGIES`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.configs.schema.engine_config import SglangConfig, VllmConfig
from roll.configs.schema.fields import choice, number, typed_by
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.strategy_options import StrategyConfig

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Fsdp2Config(StrategyConfig):
    """torch FSDP2 (`fully_shard`); a role with one rank uses no process group."""

    fsdp_size: int | None = number(None, ge=1)
    """Ranks that share one copy of the weights; must divide the role's world size. The rest replicate (HSDP).
    null: all ranks of the role."""

    param_dtype: Dtype | None = None
    """Type of the gathered weights and of the forward pass. null: `model_args.dtype`."""

    reduce_dtype: Dtype = "fp32"
    """Type in which gradients are summed over ranks. Acts with two ranks or more."""

    reshard_after_forward: bool = True
    """Free the gathered weights between forward and backward: less memory, one more gather. Acts with two
    ranks or more."""

    offload_policy: bool = False
    """Keep sharded weights, gradients and optimizer states in host memory and bring them in layer by layer.
    Needs an accelerator, acts with two ranks or more."""


@dataclass(frozen=True, kw_only=True)
class HfInferConfig(StrategyConfig):
    """Batched generation in PyTorch with a Hugging Face model; `max_running_requests` is its batch size."""


STRATEGIES: dict[str, type[StrategyConfig]] = {
    "fsdp2_train": Fsdp2Config,
    "fsdp2_infer": Fsdp2Config,
    "deepspeed_train": DeepSpeedConfig,
    "deepspeed_infer": DeepSpeedConfig,
    "megatron_train": MegatronConfig,
    "megatron_infer": MegatronConfig,
    "hf_infer": HfInferConfig,
    "vllm": VllmConfig,
    "sglang": SglangConfig,
}


@dataclass(frozen=True, kw_only=True)
class StrategyArgs:
    """Which backend a role runs on."""

    strategy_name: str = field(metadata=choice(STRATEGIES))
    """Backend: one that ends in `_train` for roles that train, in `_infer` for forward passes only; `hf_infer`, `vllm`
    or `sglang` for generation. Roles may differ."""

    strategy_config: StrategyConfig = field(
        default_factory=StrategyConfig, metadata=typed_by("strategy_name", STRATEGIES)
    )
    """Options of that backend, see below. Default: the backend's own defaults."""

    def __post_init__(self) -> None:
        if type(self.strategy_config) is StrategyConfig and self.strategy_name in STRATEGIES:
            object.__setattr__(self, "strategy_config", STRATEGIES[self.strategy_name]())
