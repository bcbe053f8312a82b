"""Backends behind `TrainStrategy` and `InferEngine`, by name. Importing this loads none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from roll.configs.catalog.entries import implementation
from roll.configs.catalog.strategy_table import STRATEGIES
from roll.utils.importing import long_imports

if TYPE_CHECKING:
    from roll.configs.schema.worker_config import ModelArgs, WorkerConfig
    from roll.distributed.worker import WorkerInfo
    from roll.strategies.base import EngineSettings, ForwardStrategy, InferEngine, TrainSpec

_KEY = "strategy_args.strategy_name"


def build_train_strategy(spec: TrainSpec, info: WorkerInfo) -> ForwardStrategy:
    """Return the backend that `spec.worker.strategy_args` names, a `TrainStrategy` for a role that trains."""
    made: ForwardStrategy = _implementation(spec.worker.strategy_args.strategy_name)(spec, info)
    return made


def build_engine(worker: WorkerConfig, args: ModelArgs, settings: EngineSettings) -> InferEngine:
    """Return the engine that `worker.strategy_args` names, with the role's model, whose name `args` has resolved."""
    build = _implementation(worker.strategy_args.strategy_name)
    engine: InferEngine = build(args, worker.strategy_args.strategy_config, settings)
    return engine


def _implementation(name: str) -> Callable[..., Any]:
    with long_imports():
        made: Callable[..., Any] = implementation(STRATEGIES, name, key=_KEY)
    return made
