"""Backends behind `TrainStrategy` and `InferEngine`, by name. Importing this loads none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.configs.catalog.entries import implementation
from roll.configs.catalog.strategy_table import STRATEGIES

if TYPE_CHECKING:
    from roll.configs.schema.worker_config import ModelArgs, WorkerConfig
    from roll.distributed.worker import WorkerInfo
    from roll.strategies.base import EngineSettings, ForwardStrategy, InferEngine, TrainSpec

_KEY = "strategy_args.strategy_name"


def build_train_strategy(spec: TrainSpec, info: WorkerInfo) -> ForwardStrategy:
    """Return the backend that `spec.worker.strategy_args` names, a `TrainStrategy` for a role that trains."""
    made: ForwardStrategy = implementation(STRATEGIES, spec.worker.strategy_args.strategy_name, key=_KEY)(spec, info)
    return made


def build_engine(worker: WorkerConfig, args: ModelArgs, settings: EngineSettings) -> InferEngine:
    """Return the engine that `worker.strategy_args` names, with the role's model, whose name `args` has resolved."""
    build = implementation(STRATEGIES, worker.strategy_args.strategy_name, key=_KEY)
    engine: InferEngine = build(args, worker.strategy_args.strategy_config, settings)
    return engine
