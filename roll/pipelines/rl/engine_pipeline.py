"""Reinforcement learning from episodes that engines play: rollouts, weight sync, validation.

Where tasks come from and how an episode is played says the `Workload`: prompts (rlvr.py) or environments (agentic.py).
Nothing else differs between the two. rl_pipeline.py is what the policy learns from the episodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from roll.checkpoint.files import CheckpointError
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.worker_config import GeneratingArgs
from roll.distributed.worker_errors import WorkerFailed
from roll.pipelines.rl.rl_pipeline import RLPipeline
from roll.pipelines.rl.sync import WeightSync
from roll.pipelines.rollouts.assemble import Rollouts, assemble
from roll.pipelines.rollouts.collectors import Collector, NoCollector, make_collector, play_all
from roll.pipelines.rollouts.drivers import make_engine_driver, sampling_params, template_stops
from roll.pipelines.rollouts.eval_table import ValidationProgress, write_eval_files
from roll.pipelines.rollouts.rollout_metrics import rollout_metrics
from roll.pipelines.rollouts.workload import Workload
from roll.pipelines.run.clusters import Clusters
from roll.pipelines.run.loop import OutOfTasks
from roll.pipelines.run.role_offload import ENGINE
from roll.pipelines.workers.infer_worker import engine_died
from roll.rollout.episode_groups import REPLACED
from roll.rollout.scheduler import Collected, RolloutScheduler
from roll.strategies.base import SamplingParams
from roll.types.metrics import Metrics
from roll.types.trajectory import Group
from roll.utils.memory import return_freed_memory

REPLAYED = "replayed"
"""In the state of a checkpoint that a replay has saved: the run that it replayed."""


class EnginePipeline(RLPipeline):
    """Plays the tasks of a workload on the engines of `actor_infer`."""

    def __init__(
        self, config: RLConfig, clusters: Clusters, tokenizer: Any, *, workload: Workload, total_steps: int
    ) -> None:
        super().__init__(config, clusters, tokenizer, total_steps=total_steps)
        self.workload = workload
        self._stops = template_stops(config, tokenizer)
        self.weight_sync = WeightSync(config, clusters, tokenizer)
        self.driver = make_engine_driver(config, clusters.actor_infer, self.weight_sync.resend)
        self.collector: Collector = NoCollector()
        if not config.only_validates:
            player = workload.player(self.driver, "train")
            self.collector = make_collector(
                config,
                self.driver,
                player,
                workload,
                params=self._params(config.actor_infer.generating_args),
                total_steps=total_steps,
                on_drop=self._report_drop,
            )
            self._greedy = RolloutScheduler(self.driver, player, seed=config.seed)
        if workload.validation_tasks is not None:
            self._progress = ValidationProgress(config, tokenizer, len(workload.validation_tasks))
            self._validation = RolloutScheduler(
                self.driver, workload.player(self.driver, "val"), seed=config.seed, on_group=self._progress.add
            )

    def _params(self, args: GeneratingArgs) -> SamplingParams:
        return sampling_params(args, self.config.response_length, self._stops)

    def gauges(self) -> dict[str, Any]:
        playing = {"train": self.collector.progress.shown()}
        if self.workload.validation_tasks is not None:
            playing["validation"] = self._validation.progress.shown()
        playing = {purpose: shown for purpose, shown in playing.items() if shown}
        return {**super().gauges(), "rollout": playing, "engines": asdict(self.driver.load())}

    # --- episodes -------------------------------------------------------------------------------------------------

    def rollouts(self, step: int) -> tuple[Rollouts, Metrics]:
        self.offloader.onload(ENGINE)
        with self.timers.span("generate", event_loop=True):
            collected = self.collect(step)
        rollouts = assemble(collected.groups)
        if "greedy_rewards" in self.config.estimator.needs:
            rollouts = replace(rollouts, greedy_scores=self.greedy_scores(step, rollouts))
        self.offloader.mark_engine_stale()
        self.weight_sync.leave()
        return_freed_memory(if_scarce=True)  # of the engine, before the trainer needs its own
        return rollouts, rollout_metrics(rollouts).merge(collected.metrics)

    def collect(self, step: int) -> Collected:
        """Return the groups of one training step; raises `OutOfTasks` when there are not enough left."""
        collected = self.collector.collect(step)
        if len(collected.groups) < self.config.groups_per_step:
            raise OutOfTasks(
                f"num_train_epochs are over; {len(collected.groups)} last groups don't fill a batch of "
                f"{self.config.groups_per_step}"
            )
        collected.metrics.merge(self.driver.take_metrics()).merge(self.workload.take_metrics())
        for group in collected.groups:
            self.report.failed(group)
        self.workload.warn(collected.groups)
        if step == 1:
            collected.metrics.merge(self.workload.first_metrics())
        return collected

    def _report_drop(self, group: Group, reason: str) -> None:
        if reason == REPLACED:
            self.report.failed(group)
        else:
            self.report.dropped(group, reason)

    def greedy_scores(self, step: int, rollouts: Rollouts) -> torch.Tensor:
        """Return the reward of one greedy response to each trajectory's task, float32 [R]; NaN where that failed."""
        if any(trajectory.role_rewards for trajectory in rollouts.trajectories):
            raise ValueError(
                "adv_estimator remax compares an episode with a greedy one, and the roles of these are paid apart "
                "(role_rewards): use an estimator that compares the members of a group, such as grpo or rloo"
            )
        config, tasks = self.config, list({task.id: task for task in rollouts.tasks}.values())
        params = self._params(replace(config.actor_infer.generating_args, do_sample=False))
        with self.timers.span("generate_greedy", waits=True):
            groups = play_all(self._greedy, tasks, step=step, purpose="greedy", group_size=1, params=params)
        rewards = {group.task.id: t.reward if t.trainable else math.nan for group in groups for t in group.trajectories}
        return torch.tensor([rewards[task.id] for task in rollouts.tasks], dtype=torch.float32)

    # --- weights --------------------------------------------------------------------------------------------------

    def publish(self, step: int) -> Mapping[str, float]:
        self.sync_weights(step)
        return self.weight_sync.metrics

    def sync_weights(self, version: int) -> None:
        """Bring the engines to the trainer's weights; what they sample from now on carries `version`.

        An engine that died before or during the sync is replaced as often as `engine_restarts` allows, then all engines
        get the weights again.
        """
        while True:
            try:
                self.driver.run(self.driver.wait_all_up())
                with self.timers.span("sync_weights", waits=True):
                    with self.offloader.while_syncing():
                        self.weight_sync(version)
                    self.weight_sync.verify(version)
                break
            except WorkerFailed as error:
                if not engine_died(error):
                    raise
                self.driver.run(self.driver.mark_dead(error.rank, error))
        self.collector.set_version(version)

    # --- validation -----------------------------------------------------------------------------------------------

    @property
    def validates_first(self) -> bool:
        return self.config.val_before_train

    def validated(self, step: int) -> dict[str, float]:
        self.offloader.onload(ENGINE)
        return super().validated(step)

    def evaluate(self, step: int) -> dict[str, float]:
        groups = self.validation_groups(step)
        self.report.samples(step, self.workload.samples(step, groups))
        self.report.validation(step, groups)
        if self.config.val_only:
            about = {"model": self.config.model_path("actor_infer"), "step": step, "seed": self.config.seed}
            self.report.eval_results(write_eval_files(self.config.output_path, groups, self.tokenizer, about))
            self.report.rollouts(step, assemble(groups))
        return self.workload.validation_metrics(groups)

    def validation_groups(self, step: int) -> list[Group]:
        """Play all validation tasks under the current weights."""
        config, tasks = self.config, self.workload.validation_tasks
        assert tasks is not None, "configuration checks refuse validation without tasks"
        assert config.validation_sampling is not None
        params = self._params(config.validation_sampling[1])
        size, chunk = self.workload.validation_group_size, config.validation_chunk or len(tasks)
        groups: list[Group] = []
        self._progress.begin()
        for start in range(0, len(tasks), chunk):
            part = tasks[start : start + chunk]
            groups += play_all(self._validation, part, step=step, purpose="val", group_size=size, params=params)
        return groups

    # --- state ----------------------------------------------------------------------------------------------------

    def save_state(self, folder: Path) -> dict[str, Any]:
        return {**self.collector.state(folder), **super().save_state(folder)}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        super().load_state(state, folder)
        if run := state.get(REPLAYED):
            raise CheckpointError(
                f"{folder} was saved by a replay of {run}, which has no place in the training tasks to go on from: "
                "replay_from goes on with the replay, and checkpoint_config.load_contents=[model,optimizer] starts at "
                "step 1 from its weights"
            )
        self.collector.restore(state, folder)

    def restore(self) -> None:
        """Continue from a checkpoint if the configuration asks for one, and bring the engines to the same weights."""
        super().restore()
        # The model's folder isn't all that engines start with if they were offloaded since, or if there are adapters.
        lacking = bool(self.offloader.offloaded.get(ENGINE)) or self.config.actor_train.model_args.uses_lora
        if not self.config.only_validates or self.checkpoints.loaded or lacking:
            self.sync_weights(self.start_step)

    def stop(self) -> None:
        self.weight_sync.close()

    def close(self) -> None:
        self.workload.stop(self.driver)
        self.driver.close()
        self.workload.close()
