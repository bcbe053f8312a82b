"""The part of the loop that pipelines with rollouts share: engines, scheduler, weight updates, validation, cursor.

What is played, and how, is a `Workload`: prompts of data sets with reward functions (rlvr.py), or environments
(agentic.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from roll.configs.schema.reward_config import QueryFilterConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.worker_config import GeneratingArgs
from roll.distributed.errors import WorkerFailed
from roll.pipelines.assemble import Rollouts, assemble
from roll.pipelines.base import Pipeline
from roll.pipelines.clusters import Clusters
from roll.pipelines.eval_table import write_eval_files
from roll.pipelines.generation import (
    AsyncCollector,
    TrainingSource,
    engine_metrics,
    make_engine_driver,
    put_back_ready_groups,
)
from roll.pipelines.loop import OutOfTasks
from roll.rollout.continuous_driver import ContinuousDriver
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode import EpisodePlayer
from roll.rollout.groups import REPLACED
from roll.rollout.scheduler import Collected, CollectPlan, RolloutScheduler
from roll.strategies.base import SamplingParams
from roll.tracking.base import Sample
from roll.types.episode import Group, Task
from roll.types.metrics import Metrics
from roll.workers.infer import engine_died

Split = Literal["train", "val"]


class Workload(Protocol):
    """What is played, and how: all that one pipeline with rollouts doesn't share with another."""

    source: TrainingSource | None
    """Training tasks; None for a mere validation."""
    validation_tasks: Sequence[Task] | None
    """None without validation."""
    validation_group_size: int

    def player(self, engines: EngineDriver, split: Split) -> EpisodePlayer:
        """Plays training or validation tasks."""

    def keep(self, group: Group) -> str | None:
        """Why the group isn't worth training on; None to keep it."""

    def notice(self, groups: Sequence[Group]) -> None:
        """Warn of what is odd about the groups of a step."""

    def first_metrics(self) -> Metrics:
        """What is to be said once about the training tasks."""

    def take_metrics(self) -> Metrics:
        """What happened while episodes were played, since the last call."""

    def validation_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Of finished validation groups."""

    def samples(self, step: int, groups: Sequence[Group]) -> list[Sample]:
        """A few of them for people."""

    def close(self) -> None:
        """Release what the workload itself has started."""


def sampling_params(args: GeneratingArgs, response_length: int) -> SamplingParams:
    """The engine's form of `generating_args`."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens or response_length,
        temperature=args.temperature if args.do_sample else 0.0,
        top_p=args.top_p,
        top_k=args.top_k or -1,
        repetition_penalty=args.repetition_penalty,
        stop_strings=args.stop_strings,
        ignore_eos=args.ignore_eos,
    )


class FixedTasks:
    """A finite list of tasks, in order; what is put back is played again."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = list(tasks)

    def take(self, n: int) -> list[Task]:
        """The next `n`, or what is left."""
        taken, self._tasks = self._tasks[:n], self._tasks[n:]
        return taken

    def put_back(self, tasks: Sequence[Task]) -> None:
        """To the front."""
        self._tasks = [*tasks, *self._tasks]


class RolloutPipeline(Pipeline):
    """See the module docstring."""

    def __init__(
        self, config: RLConfig, clusters: Clusters, tokenizer: Any, *, workload: Workload, total_steps: int
    ) -> None:
        super().__init__(config, clusters, tokenizer, total_steps=total_steps)
        self.workload = workload
        self._engines = make_engine_driver(config, clusters.actor_infer, self.resend_weights)
        self._ahead: AsyncCollector | None = None
        if workload.source is not None:
            player = workload.player(self._engines, "train")
            self._training = self._scheduler(player)
            if config.async_generation_ratio > 0:
                self._ahead = AsyncCollector(
                    config,
                    self._engines,
                    player,
                    workload.source,
                    self._params,
                    total_steps=total_steps,
                    keep=workload.keep,
                    on_drop=self._drop,
                )
        if workload.validation_tasks is not None:
            self._validation = self._scheduler(workload.player(self._engines, "val"))

    @property
    def _params(self) -> SamplingParams:
        return sampling_params(self.config.actor_infer.generating_args, self.config.response_length)

    def _scheduler(self, player: EpisodePlayer) -> RolloutScheduler:
        return RolloutScheduler(
            self._engines, player, seed=self.config.seed, keep=self.workload.keep, on_drop=self._drop
        )

    def _drop(self, group: Group, reason: str) -> None:
        if reason == REPLACED:
            self.report.failed(group)
        else:
            self.report.dropped(group, reason)

    # --- training -------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> Collected:
        """See the base class."""
        collected = self._collect_now(step) if self._ahead is None else self._ahead.collect(step)
        if len(collected.groups) < self.config.groups_per_step:
            raise OutOfTasks(
                f"num_train_epochs are over; {len(collected.groups)} last groups don't fill a batch of "
                f"{self.config.groups_per_step}"
            )
        if isinstance(self._engines, ContinuousDriver):
            collected.metrics.merge(engine_metrics(self._engines, self.clusters.actor_infer))
        collected.metrics.merge(self.workload.take_metrics())
        for group in collected.groups:
            self.report.failed(group)
        self.workload.notice(collected.groups)
        if step == 1:
            collected.metrics.merge(self.workload.first_metrics())
        return collected

    def _collect_now(self, step: int) -> Collected:
        config = self.config
        plan = CollectPlan(
            step=step,
            purpose="train",
            groups=config.groups_per_step,
            group_size=config.group_size,
            params=self._params,
            extra_prompts=config.max_additional_running_prompts if config.is_use_additional_prompts else 0,
            max_prompts=config.task_budget,
            min_survivors=config.min_survivors,
            redundancy=config.redundancy,
            max_open_groups=config.max_open_groups,
        )
        assert self.workload.source is not None, "only val_only does without training data"
        return self._training.collect(self.workload.source, plan)

    def greedy_scores(self, step: int, rollouts: Rollouts) -> torch.Tensor:
        """See the base class."""
        args = self.config.actor_infer.generating_args
        tasks = list({task.id: task for task in rollouts.tasks}.values())
        plan = CollectPlan(
            step=step,
            purpose="greedy",
            groups=len(tasks),
            group_size=1,
            params=sampling_params(replace(args, do_sample=False), self.config.response_length),
            max_prompts=len(tasks),
            min_survivors=0,
        )
        with self.timers.span("generate_greedy", waits=True):
            groups = self._training.collect(FixedTasks(tasks), plan).groups
        scores = {group.task.id: t.reward if t.trainable else math.nan for group in groups for t in group.trajectories}
        return torch.tensor([scores[task.id] for task in rollouts.tasks], dtype=torch.float32)

    def sync_weights(self, version: int) -> None:
        """See the base class; groups that are started from now on carry the new version."""
        while True:
            try:
                if isinstance(self._engines, ContinuousDriver):
                    self._engines.run(self._engines.wait_all_up())
                super().sync_weights(version)
                break
            except WorkerFailed as error:
                # An engine that died before or during the sync is replaced as often as engine_restarts allows, then
                # all engines get the weights again.
                if not isinstance(self._engines, ContinuousDriver) or not engine_died(error):
                    raise
                self._engines.run(self._engines.mark_dead(error.rank, error))
        if self._ahead is not None:
            self._ahead.set_version(version)

    # --- validation -----------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, float]:
        """See the base class."""
        groups = self.validation_groups(step)
        self.report.samples(step, self.workload.samples(step, groups))
        if self.config.val_only:
            about = {"model": self.config.model_path("actor_infer"), "step": step, "seed": self.config.seed}
            self.report.eval_results(write_eval_files(self.config.output_path, groups, self.tokenizer, about))
            self.report.rollouts(step, assemble(groups))
        return self.workload.validation_metrics(groups)

    def validation_groups(self, step: int) -> list[Group]:
        """All validation tasks played under the current weights."""
        config, tasks = self.config, self.workload.validation_tasks
        assert tasks is not None, "configuration checks refuse validation without tasks"
        assert config.validation_sampling is not None
        chunk = config.validation_chunk or len(tasks)
        groups: list[Group] = []
        for start in range(0, len(tasks), chunk):
            part = tasks[start : start + chunk]
            plan = CollectPlan(
                step=step,
                purpose="val",
                groups=len(part),
                group_size=self.workload.validation_group_size,
                params=sampling_params(config.validation_sampling[1], config.response_length),
                max_prompts=len(part),
                min_survivors=0,
            )
            groups += self._validation.collect(FixedTasks(part), plan).groups
        return groups

    # --- state ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the event loop that episodes were played on."""
        self._engines.close()
        self.workload.close()

    def save_state(self, folder: Path) -> dict[str, Any]:
        """The cursor of the training tasks, and groups that are ready ahead of training."""
        assert self.workload.source is not None, "a run without training data saves no checkpoint"
        return {"tasks": self.workload.source.state_dict()} if self._ahead is None else self._ahead.save(folder)

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """See the base class."""
        if self.config.val_only:
            return
        source = self.workload.source
        assert source is not None
        if self._ahead is not None:
            self._ahead.load(state, folder)
        else:
            source.load_state_dict(state["tasks"])
            put_back_ready_groups(source, folder)


def query_filter(group: Group, rule: QueryFilterConfig) -> str | None:
    """Why a domain's filter drops this group; None to keep it."""
    scores = torch.tensor([t.reward for t in group.survivors], dtype=torch.float64)
    args = rule.filter_args
    if rule.type == "mean_filter":
        mean = float(scores.mean())
        if not args.threshold_down < mean < args.threshold_up:
            return f"filtered: mean score outside ({args.threshold_down:g}, {args.threshold_up:g})"
    if rule.type == "std_filter":
        spread = float(scores.std()) if len(scores) > 1 else 0.0
        if spread <= args.std_threshold:
            return f"filtered: standard deviation of scores not above {args.std_threshold:g}"
    return None
