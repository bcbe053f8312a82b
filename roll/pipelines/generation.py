"""What generates a pipeline's responses: a driver for its engines, and groups in flight if generation runs ahead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from roll.configs.schema.rl_config import RLConfig
from roll.distributed.cluster import Cluster
from roll.rollout.async_scheduler import AsyncPlan, AsyncRolloutScheduler, AsyncState
from roll.rollout.buffer import load_groups, save_groups
from roll.rollout.continuous_driver import ContinuousDriver
from roll.rollout.engine_driver import EngineDriver, LockstepDriver
from roll.rollout.episode import EpisodePlayer
from roll.rollout.groups import FilterFn, ResumableTaskSource
from roll.rollout.scheduler import Collected
from roll.strategies import LOCKSTEP_ENGINES
from roll.strategies.base import SamplingParams
from roll.types.episode import Group, Task
from roll.types.metrics import Metrics
from roll.workers.infer import ClusterEngines, InferWorker, engine_died, uses_lockstep_driver

logger = logging.getLogger(__name__)

READY_GROUPS = "ready_groups.parquet"
_DECODE_STEPS = 16
"""What one poll of a lockstep engine may do."""
_POLL_SECONDS = 1.0
"""How long one poll of another engine waits if nothing finishes."""


class TrainingSource(ResumableTaskSource, Protocol):
    """Training tasks, with a cursor that can be set and tasks that can be found again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""

    def task(self, task_id: str) -> Task:
        """The task with this id."""

    @property
    def remaining(self) -> int | None:
        """Tasks that are left; None without end."""


def make_engine_driver(config: RLConfig, cluster: Cluster, resend: Callable[[int], None]) -> EngineDriver:
    """The driver for the cluster's engines; `resend` brings a new engine's weights up to date."""
    ranks = ClusterEngines(cluster)
    if uses_lockstep_driver(config):
        return LockstepDriver(ranks, round_steps=_DECODE_STEPS, timeout=config.rpc_timeout)
    lockstep = config.actor_infer.strategy_args.strategy_name in LOCKSTEP_ENGINES

    async def restart(rank: int) -> None:
        await cluster.call_rank_async(rank, InferWorker.restart)
        await asyncio.get_running_loop().run_in_executor(None, resend, rank)

    return ContinuousDriver(
        ranks,
        max_running_requests=config.max_running_requests,
        poll_budget=_DECODE_STEPS if lockstep else _POLL_SECONDS,
        timeout=config.rpc_timeout,
        is_death=engine_died,
        restart=restart,
        max_restarts=config.engine_restarts,
    )


def engine_metrics(engines: ContinuousDriver, cluster: Cluster) -> Metrics:
    """What happened to engines, and to responses at weight updates, since the last call."""
    metrics, counts = Metrics(), engines.take_counts()
    metrics.add_sum("rollout/engine_restarts", counts.restarts)
    metrics.add_sum("rollout/reissued_requests", counts.reissued)
    for counters in cluster.call(InferWorker.take_counters):
        metrics.add_sum("rollout/resumed_responses", counters.resumed)
        metrics.add_sum("rollout/restarted_responses", counters.restarted)
        metrics.add_sum("rollout/discarded_tokens", counters.discarded_tokens)
    return metrics


class AsyncCollector:
    """Generation that runs ahead of training, from the first `collect` on; see `rollout/async_scheduler.py`.

    Args:
        config: the run's, with `async_generation_ratio` above 0.
        engines: shared with validation.
        total_steps: of the run.
    """

    def __init__(
        self,
        config: RLConfig,
        engines: EngineDriver,
        player: EpisodePlayer,
        source: TrainingSource,
        params: SamplingParams,
        *,
        total_steps: int,
        keep: FilterFn,
        on_drop: Callable[[Group, str], None],
    ) -> None:
        self._source = source
        self._restored = AsyncState()
        plan = AsyncPlan(
            groups=config.groups_per_step,
            group_size=config.group_size,
            params=params,
            ratio=config.async_generation_ratio,
            max_prompts=config.task_budget,
            min_survivors=config.min_survivors,
            redundancy=config.redundancy,
            max_open_groups=config.max_open_groups,
            last_step=total_steps,
        )
        self._make: Callable[[int], AsyncRolloutScheduler] = lambda version: AsyncRolloutScheduler(
            engines, player, source, plan, seed=config.seed, version=version, keep=keep, on_drop=on_drop
        )
        self._rollouts: AsyncRolloutScheduler | None = None

    def collect(self, step: int) -> Collected:
        """The groups of one training step."""
        if self._rollouts is None:
            self._rollouts = self._make(step - 1)
            self._rollouts.restore(self._restored)
        return self._rollouts.collect(step)

    def set_version(self, version: int) -> None:
        """The engines sample with these weights from now on."""
        if self._rollouts is not None:
            self._rollouts.set_version(version)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the groups that are ready to `folder`; the rest of the state, JSON-able."""
        assert self._rollouts is not None, "a checkpoint is saved after a step"
        state = self._rollouts.state()
        save_groups(folder / READY_GROUPS, state.ready)
        return {"tasks": state.cursor, "started": state.started}

    def load(self, state: dict[str, Any], folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._source.load_state_dict(state["tasks"])
        ready = load_groups(folder / READY_GROUPS, self._source.task) if (folder / READY_GROUPS).is_file() else []
        self._restored = AsyncState(started=state.get("started", 0), ready=ready)
        logger.info("%d finished groups wait for the next steps", len(ready))


def put_back_ready_groups(source: TrainingSource, folder: Path) -> None:
    """A run that no longer generates ahead can't use what an earlier one had ready: its prompts are played again."""
    if (folder / READY_GROUPS).is_file():
        tasks = [ready.group.task for ready in load_groups(folder / READY_GROUPS, source.task)]
        source.put_back(tasks)
        logger.info("%d groups of the earlier, asynchronous run are played again", len(tasks))
