"""Backends behind `TrainStrategy` and `InferEngine`, by name. Importing this loads none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from roll.catalog.entries import implementation
from roll.catalog.strategies import STRATEGIES

if TYPE_CHECKING:
    from roll.configs.schema.worker_config import ModelArgs, WorkerConfig
    from roll.distributed.worker import WorkerInfo
    from roll.strategies.base import InferEngine, TrainSpec, TrainStrategy

_KEY = "strategy_args.strategy_name"


def build_train_strategy(spec: TrainSpec, info: WorkerInfo) -> TrainStrategy:
    """Return the backend that `spec.worker.strategy_args` names, on this rank."""
    made: TrainStrategy = implementation(STRATEGIES, spec.worker.strategy_args.strategy_name, key=_KEY)(spec, info)
    return made


def build_engine(
    worker: WorkerConfig,
    args: ModelArgs,
    *,
    max_running_requests: int,
    max_sequence_length: int,
    seed: int,
    partial_rollout: Literal["resume", "restart"],
    slots: Sequence[int],
    update_buffer_bytes: int,
) -> InferEngine:
    """Return the engine that `worker.strategy_args` names, on these device slots.

    Args:
        args: the role's model, with its name resolved.
        max_running_requests: responses decoded at once.
        max_sequence_length: prompt plus response tokens.
        partial_rollout: what a weight update does to responses on their way.
        update_buffer_bytes: memory through which weights go to an engine's own processes.
    """
    build = implementation(STRATEGIES, worker.strategy_args.strategy_name, key=_KEY)
    engine: InferEngine = build(
        args,
        worker.strategy_args.strategy_config,
        max_running_requests=max_running_requests,
        max_sequence_length=max_sequence_length,
        seed=seed,
        partial_rollout=partial_rollout,
        slots=slots,
        update_buffer_bytes=update_buffer_bytes,
    )
    return engine
