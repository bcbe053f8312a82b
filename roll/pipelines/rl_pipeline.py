"""The training loop of reinforcement learning. One of the six files to read first; loop.py is what stands around it.

    groups  = collect      tasks -> episodes -> groups of trajectories     (collectors.py, rollout/scheduler.py)
    batch   = assemble     ragged rows with ids
    batch   = logprobs     reference and old log-probs, values             (strategies, on their clusters)
    batch   = credit       rewards -> advantages, masks, weights           (algorithms/)
    metrics = update       critic, actor: epochs x mini-batches            (strategies + losses)
              sync         train -> infer weights, versioned
              evaluate, log, save

`offloader` frees the accelerators that roles share for the role that works next; elsewhere it does nothing.

Where tasks come from and how an episode is played says the `Workload`: prompts (rlvr.py) or environments (agentic.py).
Nothing else differs between the two.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from roll.configs.schema.rl_config import RLConfig
from roll.distributed.errors import WorkerFailed
from roll.pipelines.assemble import Rollouts, assemble
from roll.pipelines.clusters import Clusters
from roll.pipelines.collectors import Collector, NoCollector, make_collector, play_all
from roll.pipelines.credit import CreditAssigner
from roll.pipelines.drivers import make_engine_driver, sampling_params
from roll.pipelines.eval_table import write_eval_files
from roll.pipelines.loop import Loop, OutOfTasks
from roll.pipelines.off_policy import old_logprobs_source
from roll.pipelines.offload import ENGINE
from roll.pipelines.recording import recorded_update
from roll.pipelines.rollout_metrics import rollout_metrics
from roll.pipelines.rollout_rows import recorded_outputs
from roll.pipelines.sync import WeightSync
from roll.pipelines.teaching import vocabulary_of, with_reference, with_reference_kl, with_teacher
from roll.pipelines.update import train
from roll.pipelines.validation_progress import ValidationProgress
from roll.pipelines.workload import Workload
from roll.rollout.groups import REPLACED
from roll.rollout.scheduler import Collected, RolloutScheduler
from roll.strategies.base import Output
from roll.types.batch import TokenBatch
from roll.types.episode import Group
from roll.types.metrics import Metrics
from roll.utils.memory import return_freed_memory
from roll.workers.infer import engine_died

logger = logging.getLogger(__name__)


class RLPipeline(Loop):
    """Walks the loop over its clusters: `run`, then `close`."""

    config: RLConfig

    def __init__(
        self, config: RLConfig, clusters: Clusters, tokenizer: Any, *, workload: Workload, total_steps: int
    ) -> None:
        super().__init__(config, clusters, tokenizer, total_steps=total_steps)
        self.workload = workload
        self.credit = CreditAssigner(config)
        self.old_logprobs = old_logprobs_source(config)
        self.weight_sync = WeightSync(config, clusters, tokenizer)
        self.driver = make_engine_driver(config, clusters.actor_infer, self.weight_sync.resend)
        self.collector: Collector = NoCollector()
        if not config.only_validates:
            player = workload.player(self.driver, "train")
            self.collector = make_collector(
                config, self.driver, player, workload, total_steps=total_steps, on_drop=self._report_drop
            )
            self._greedy = RolloutScheduler(self.driver, player, seed=config.seed)
        if workload.validation_tasks is not None:
            self._progress = ValidationProgress(config, tokenizer, len(workload.validation_tasks))
            self._validation = RolloutScheduler(
                self.driver, workload.player(self.driver, "val"), seed=config.seed, on_group=self._progress.add
            )

    def gauges(self) -> dict[str, Any]:
        load = self.driver.load()
        playing = {"train": self.collector.progress.shown()}
        if self.workload.validation_tasks is not None:
            playing["validation"] = self._validation.progress.shown()
        playing = {purpose: shown for purpose, shown in playing.items() if shown}
        return {**super().gauges(), "rollout": playing, "engines": asdict(load)}

    # --- the loop -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        logger.info("old log-probs come from: %s (%s)", self.old_logprobs.source, self.old_logprobs.reason)
        super().train()

    def step(self, step: int) -> None:
        with self.timers.span("step"):
            self.offloader.onload(ENGINE)
            with self.timers.span("generate", event_loop=True):
                collected = self.collect(step)
            rollouts = assemble(collected.groups)
            greedy = self.greedy_scores(step, rollouts) if self.config.estimator.needs_greedy else None
            self.offloader.mark_engine_stale()
            self.weight_sync.leave()
            return_freed_memory()  # of the engine, before the trainer needs its own
            metrics = rollout_metrics(rollouts).merge(collected.metrics)
            rollouts = self.compute_logprobs(rollouts)
            with self.timers.span("credit"):
                rollouts, credit_metrics = self.credit.assign(rollouts, step=step, greedy_scores=greedy)
            with recorded_update(rollouts.trajectories, step):
                metrics.merge(credit_metrics).merge(self.update(rollouts, step))
            self.sync_weights(step)
            metrics.update(self.weight_sync.metrics)
        self.report.rollouts(step, rollouts)
        self.conclude(step, metrics.result())

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
        params = sampling_params(replace(config.actor_infer.generating_args, do_sample=False), config.response_length)
        with self.timers.span("generate_greedy", waits=True):
            groups = play_all(self._greedy, tasks, step=step, purpose="greedy", group_size=1, params=params)
        rewards = {group.task.id: t.reward if t.trainable else math.nan for group in groups for t in group.trajectories}
        return torch.tensor([rewards[task.id] for task in rollouts.tasks], dtype=torch.float32)

    def compute_logprobs(self, rollouts: Rollouts) -> Rollouts:
        """Add reference log-probs, old log-probs and values of the sampled tokens, joined by row id."""
        batch = rollouts.batch
        if self.clusters.reference is not None or self.config.reference_is_actor:
            with self.timers.span("reference", waits=True):
                cluster = self.clusters.reference or self.clusters.actor_train
                forward = functools.partial(self.forward, cluster, adapters=not self.config.reference_is_actor)
                if self.config.full_kl:
                    vocabulary = vocabulary_of(self.config, self.tokenizer)
                    batch = with_reference(batch, forward, top_k=self.config.kl_top_k, vocabulary=vocabulary)
                else:
                    batch = batch.join(forward(batch, "logprobs"), ref_logprobs="logprobs")
        if self.clusters.teachers:
            batch = self.taught(batch, [rollouts.tasks[i].tag for i in rollouts.row_trajectory.tolist()])
        compares = self.config.full_kl_penalty and batch.teacher_logprobs is not None
        gradients = self.config.estimator.reads_logit_gradients
        wanted: list[Output] = ["logprobs"]
        wanted += ["student_logprobs"] if compares else []
        wanted += ["logit_gradients"] if gradients else []
        recorded, own_pass = self.config.rollout_dump_outputs, self.old_logprobs.source == "forward"
        wanted += ["entropy"] if "entropies" in recorded else []
        if own_pass or recorded or len(wanted) > 1:
            with self.timers.span("old_logprobs", waits=True):
                outputs = self.forward(self.clusters.actor_train, batch, *wanted)
            batch = with_reference_kl(batch, outputs) if compares else batch
            batch = batch.join(outputs, logit_gradients="logit_gradients") if gradients else batch
            rollouts = replace(rollouts, recorded=recorded_outputs(batch, outputs, recorded))
        if own_pass:
            batch = batch.join(outputs, old_logprobs="logprobs")
        elif self.old_logprobs.source == "sampler":
            batch = batch.with_columns(old_logprobs=batch.sampling_logprobs)
        if self.clusters.critic is not None:
            with self.timers.span("values", waits=True):
                outputs = self.forward(self.clusters.critic, batch, "values")
            batch = batch.join(outputs, values="values")
        if self.config.full_kl and not self.config.full_kl_loss:
            batch = batch.with_columns(teacher_ids=None, teacher_logprobs=None)
        return replace(rollouts, batch=batch)

    def taught(self, batch: TokenBatch, tags: Sequence[str]) -> TokenBatch:
        """Add what each row's teacher says of its sampled tokens, or of the distributions that they come from."""
        vocabulary = None if self.config.teacher_advantages else vocabulary_of(self.config, self.tokenizer)
        roles = [self.config.teacher_of(tag) for tag in tags]
        parts = []
        with self.timers.span("teacher", waits=True):
            for role, cluster in self.clusters.teachers.items():
                if rows := [row for row, own in enumerate(roles) if own == role]:
                    forward, top_k = functools.partial(self.forward, cluster), self.config.distill.top_k
                    parts.append(with_teacher(batch.select(rows), forward, top_k=top_k, vocabulary=vocabulary))
        return TokenBatch.concat(parts).reorder(batch.row_ids)

    def update(self, rollouts: Rollouts, step: int) -> Metrics:
        """Train the critic, and the actor once the critic's warm-up is over."""
        metrics = Metrics()
        if self.clusters.critic is not None:
            self.offloader.onload("critic")
            with self.timers.span("train_critic", waits=True):
                metrics.merge(train(self.clusters.critic, self.config, rollouts, step))
        if self.clusters.critic is None or step > self.config.critic_warmup:
            self.offloader.onload("actor_train")
            with self.timers.span("train_actor", waits=True):
                metrics.merge(train(self.clusters.actor_train, self.config, rollouts, step))
        return metrics

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
        params = sampling_params(config.validation_sampling[1], config.response_length)
        size, chunk = self.workload.validation_group_size, config.validation_chunk or len(tasks)
        groups: list[Group] = []
        self._progress.begin()
        for start in range(0, len(tasks), chunk):
            part = tasks[start : start + chunk]
            groups += play_all(self._validation, part, step=step, purpose="val", group_size=size, params=params)
        return groups

    # --- state ----------------------------------------------------------------------------------------------------

    def save_state(self, folder: Path) -> dict[str, Any]:
        return {**self.collector.state(folder), "credit": self.credit.state_dict()}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        self.credit.load_state_dict(state["credit"])
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
