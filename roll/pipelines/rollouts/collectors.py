"""Collectors give the groups of each training step, generated while training waits or ahead of it.

A collector owns the cursor of the training tasks, and is a part of every checkpoint.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.configs.schema.rl_config import RLConfig
from roll.pipelines.rollouts.workload import TrainingSource, Workload
from roll.rollout.async_scheduler import AsyncPlan, AsyncRolloutScheduler, AsyncState
from roll.rollout.buffer import load_groups, save_groups
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.progress import RolloutProgress
from roll.rollout.scheduler import Collected, CollectPlan, RolloutScheduler
from roll.strategies.base import SamplingParams
from roll.types.trajectory import Group, Task

logger = logging.getLogger(__name__)

READY_GROUPS = "ready_groups.parquet"
OnDrop = Callable[[Group, str], None]


class Collector(ABC):
    """Turns training tasks into the groups of one step after another."""

    @abstractmethod
    def collect(self, step: int) -> Collected:
        """Return the groups of a training step; fewer than it needs when the tasks have ended."""

    @abstractmethod
    def state(self, folder: Path) -> dict[str, Any]:
        """Return the cursor, JSON-able, after a step; what is large goes into files in `folder`."""

    @abstractmethod
    def restore(self, state: dict[str, Any], folder: Path) -> None:
        """Continue from a checkpoint; `state` is that of `state` and the checkpoint's `step`."""

    @property
    def progress(self) -> RolloutProgress:
        """Return how far the playing is, for other threads. Default: nothing is played."""
        return RolloutProgress()

    def set_version(self, version: int) -> None:
        """Note that the engines sample with weights of this version from now on. Default: nobody asks."""


def make_collector(
    config: RLConfig,
    driver: EngineDriver,
    player: EpisodePlayer,
    workload: Workload,
    *,
    params: SamplingParams,
    total_steps: int,
    on_drop: OnDrop,
) -> Collector:
    """Return the collector that `async_generation_ratio` asks for."""
    source = workload.source
    assert source is not None, "only val_only does without training data"
    shared: dict[str, Any] = {
        "groups": config.groups_per_step,
        "group_size": config.group_size,
        "params": params,
        "max_prompts": config.task_budget,
        "min_survivors": config.min_survivors,
        "redundancy": config.redundancy,
        "max_open_groups": config.max_open_groups,
    }
    options: dict[str, Any] = {"seed": config.seed, "keep": workload.keep, "on_drop": on_drop}
    if config.async_generation_ratio > 0:
        ahead = AsyncPlan(ratio=config.async_generation_ratio, last_step=total_steps, **shared)
        return AsyncCollector(AsyncRolloutScheduler(driver, player, source, ahead, **options), source)
    extra = config.max_additional_running_prompts if config.is_use_additional_prompts else 0
    plan = CollectPlan(step=0, purpose="train", extra_prompts=extra, **shared)
    return SyncCollector(RolloutScheduler(driver, player, **options), source, plan)


class SyncCollector(Collector):
    """Generates the groups of a step while training waits; `plan` is that of every step but for its number."""

    def __init__(self, scheduler: RolloutScheduler, source: TrainingSource, plan: CollectPlan) -> None:
        self._scheduler = scheduler
        self._source = source
        self._plan = plan

    @property
    def progress(self) -> RolloutProgress:
        return self._scheduler.progress

    def collect(self, step: int) -> Collected:
        return self._scheduler.collect(self._source, replace(self._plan, step=step))

    def state(self, folder: Path) -> dict[str, Any]:
        del folder
        return {"tasks": self._source.state_dict()}

    def restore(self, state: dict[str, Any], folder: Path) -> None:
        """Play the prompts of groups that an asynchronous run had ready again."""
        self._source.load_state_dict(state["tasks"])
        if (folder / READY_GROUPS).is_file():
            tasks = [ready.group.task for ready in load_groups(folder / READY_GROUPS, self._source.task)]
            self._source.put_back(tasks)
            logger.info("%d groups of the earlier, asynchronous run are played again", len(tasks))


class AsyncCollector(Collector):
    """Generates ahead of training, from the first `collect` on; see rollout/async_scheduler.py."""

    def __init__(self, scheduler: AsyncRolloutScheduler, source: TrainingSource) -> None:
        self._scheduler = scheduler
        self._source = source

    @property
    def progress(self) -> RolloutProgress:
        return self._scheduler.progress

    def collect(self, step: int) -> Collected:
        return self._scheduler.collect(step)

    def set_version(self, version: int) -> None:
        self._scheduler.set_version(version)

    def state(self, folder: Path) -> dict[str, Any]:
        state = self._scheduler.state()
        save_groups(folder / READY_GROUPS, state.ready)
        return {"tasks": state.cursor, "started": state.started}

    def restore(self, state: dict[str, Any], folder: Path) -> None:
        self._source.load_state_dict(state["tasks"])
        ready = load_groups(folder / READY_GROUPS, self._source.task) if (folder / READY_GROUPS).is_file() else []
        self._scheduler.restore(AsyncState(version=state["step"], started=state.get("started", 0), ready=ready))
        logger.info("%d finished groups wait for the next steps", len(ready))


class NoCollector(Collector):
    """Stands for the collector in a run that only validates."""

    def collect(self, step: int) -> Collected:
        raise AssertionError(f"step {step} of a run that only validates")

    def state(self, folder: Path) -> dict[str, Any]:
        del folder
        return {}

    def restore(self, state: dict[str, Any], folder: Path) -> None:
        pass


class FixedTasks:
    """A finite list of tasks, in order; what is put back is played again."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = list(tasks)

    def take(self, n: int) -> list[Task]:
        """Return the next `n`, or what is left."""
        taken, self._tasks = self._tasks[:n], self._tasks[n:]
        return taken

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Put tasks to the front."""
        self._tasks = [*tasks, *self._tasks]


def play_all(
    scheduler: RolloutScheduler,
    tasks: Sequence[Task],
    *,
    step: int,
    purpose: str,
    group_size: int,
    params: SamplingParams,
) -> list[Group]:
    """Play every task under the current weights; return all groups in the order of the tasks, failed ones included."""
    plan = CollectPlan(
        step=step,
        purpose=purpose,
        groups=len(tasks),
        group_size=group_size,
        params=params,
        max_prompts=len(tasks),
        min_survivors=0,
    )
    return scheduler.collect(FixedTasks(tasks), plan).groups
