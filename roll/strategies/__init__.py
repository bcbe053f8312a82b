"""Backends behind `TrainStrategy` and `InferEngine`, by name. Importing this loads none of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.distributed.worker import WorkerInfo
    from roll.strategies.base import TrainSpec, TrainStrategy

_TRAIN = {
    "fsdp2_train": "roll.strategies.fsdp2:Fsdp2Strategy",
    "fsdp2_infer": "roll.strategies.fsdp2:Fsdp2Strategy",
    "deepspeed_train": "roll.strategies.deepspeed.strategy:DeepSpeedStrategy",
    "deepspeed_infer": "roll.strategies.deepspeed.strategy:DeepSpeedStrategy",
    "megatron_train": "roll.strategies.megatron.strategy:MegatronStrategy",
    "megatron_infer": "roll.strategies.megatron.strategy:MegatronStrategy",
}


def build_train_strategy(spec: TrainSpec, info: WorkerInfo) -> TrainStrategy:
    """The backend that `spec.worker.strategy_args` names, on this rank."""
    module, name = _TRAIN[spec.worker.strategy_args.strategy_name].split(":")
    strategy: TrainStrategy = getattr(import_module(module), name)(spec, info)
    return strategy
