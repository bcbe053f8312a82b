"""The training loop of reinforcement learning. One of the six files to read first; loop.py is what stands around it.

    groups  = collect      tasks -> episodes -> groups of trajectories     (rollout/scheduler.py)
    batch   = assemble     ragged rows with ids
    batch   = logprobs     reference and old log-probs, values             (strategies, on their clusters)
    batch   = credit       rewards -> advantages, masks, weights           (algorithms/)
    metrics = update       critic, actor: epochs x mini-batches            (strategies + losses)
              sync         train -> infer weights, versioned
              evaluate, log, save

`offloader` frees the accelerators that roles share for the role that works next; elsewhere it does nothing.

`RolloutPipeline` (rollouts.py) collects; its `Workload` says where tasks come from and how an episode is played:
prompts (rlvr.py) or environments (agentic.py). Nothing else differs between the two.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch

from roll.configs.schema.rl_config import RLConfig
from roll.pipelines.assemble import Rollouts, assemble
from roll.pipelines.clusters import Clusters
from roll.pipelines.credit import CreditAssigner
from roll.pipelines.loop import Loop
from roll.pipelines.offload import ENGINE
from roll.pipelines.rollout_metrics import rollout_metrics
from roll.pipelines.sync import WeightSync
from roll.pipelines.update import old_logprobs_source, train
from roll.rollout.scheduler import Collected
from roll.types.metrics import Metrics

logger = logging.getLogger(__name__)


class Pipeline(Loop):
    """Walks the loop over its clusters: `run`, then `close`."""

    config: RLConfig

    def __init__(self, config: RLConfig, clusters: Clusters, tokenizer: Any, *, total_steps: int) -> None:
        super().__init__(config, clusters, tokenizer, total_steps=total_steps)
        self.credit = CreditAssigner(config)
        self.old_logprobs = old_logprobs_source(config)
        self.weight_sync = WeightSync(config, clusters, tokenizer)
        self.version = 0
        """Of the weights that the engines have."""

    # --- what a pipeline defines ----------------------------------------------------------------------------------

    @abstractmethod
    def collect(self, step: int) -> Collected:
        """Groups for one training step; raises `OutOfTasks` when there are not enough left."""

    @abstractmethod
    def greedy_scores(self, step: int, rollouts: Rollouts) -> torch.Tensor:
        """float32 [R], the score of one greedy response to each trajectory's task (`remax`); NaN where that failed."""

    # --- the loop -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """All steps that are left."""
        logger.info("old log-probs come from: %s (%s)", self.old_logprobs.source, self.old_logprobs.reason)
        super().train()

    def step(self, step: int) -> None:
        """One step of the loop."""
        with self.timers.span("step"):
            self.offloader.onload(ENGINE)
            with self.timers.span("generate", event_loop=True):
                collected = self.collect(step)
            rollouts = assemble(collected.groups)
            greedy = self.greedy_scores(step, rollouts) if self.config.estimator.needs_greedy else None
            self.offloader.mark_engine_stale()
            self.weight_sync.leave()
            metrics = self.rollout_metrics(rollouts).merge(collected.metrics)
            rollouts = self.compute_logprobs(rollouts)
            with self.timers.span("credit"):
                batch, credit_metrics = self.credit.assign(rollouts, step=step, greedy_scores=greedy)
            rollouts = replace(rollouts, batch=batch)
            metrics.merge(credit_metrics).merge(self.update(rollouts, step))
            self.sync_weights(step)
            metrics.update(self.weight_sync.metrics)
        self.report.rollouts(step, rollouts)
        self.conclude(step, metrics.result())

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        with self.timers.span("save", waits=True):
            credit = self.credit.state_dict()
            self.checkpoints.save(step, lambda folder: {**self.save_state(folder), "credit": credit})

    def compute_logprobs(self, rollouts: Rollouts) -> Rollouts:
        """Add reference log-probs, old log-probs and values of the sampled tokens, joined by row id."""
        batch = rollouts.batch
        if self.clusters.reference is not None or self.config.reference_is_actor:
            with self.timers.span("reference", waits=True):
                cluster = self.clusters.reference or self.clusters.actor_train
                outputs = self.forward(cluster, batch, "logprobs", adapters=not self.config.reference_is_actor)
            batch = batch.join(outputs, ref_logprobs="logprobs")
        if self.old_logprobs.source == "forward":
            with self.timers.span("old_logprobs", waits=True):
                outputs = self.forward(self.clusters.actor_train, batch, "logprobs")
            batch = batch.join(outputs, old_logprobs="logprobs")
        elif self.old_logprobs.source == "sampler":
            batch = batch.with_columns(old_logprobs=batch.sampling_logprobs)
        if self.clusters.critic is not None:
            with self.timers.span("values", waits=True):
                outputs = self.forward(self.clusters.critic, batch, "values")
            batch = batch.join(outputs, values="values")
        return replace(rollouts, batch=batch)

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
        """The engines go on with the trainer's weights; what they sample from now on carries `version`."""
        with self.timers.span("sync_weights", waits=True):
            with self.offloader.while_syncing():
                self.weight_sync(version)
            self.weight_sync.verify(version)
            self.version = version

    def resend_weights(self, rank: int) -> None:
        """Bring one engine, which has just been replaced, to the weights of the others."""
        self.weight_sync.resend(rank)

    def validated(self, step: int) -> dict[str, float]:
        """`evaluate`, timed."""
        self.offloader.onload(ENGINE)
        return super().validated(step)

    @property
    def validates_first(self) -> bool:
        """Whether the starting model is validated."""
        return self.config.val_before_train

    def stop(self) -> None:
        """End what carries weights."""
        self.weight_sync.close()

    def restore(self) -> None:
        """Continue from a checkpoint if the configuration asks for one, and bring the engines to the same weights."""
        loaded = self.checkpoints.load()
        if loaded is not None:
            state, folder = loaded
            self.start_step = state["step"]
            self.credit.load_state_dict(state["credit"])
            self.load_state(state, folder)
        if not self.config.val_only or loaded is not None or self._engines_lack_weights:
            self.sync_weights(self.start_step)

    @property
    def _engines_lack_weights(self) -> bool:
        """Whether the model's folder isn't all that they start with: they slept since, or there are adapters."""
        return bool(self.offloader.offloaded.get(ENGINE)) or self.config.actor_train.model_args.uses_lora

    def rollout_metrics(self, rollouts: Rollouts) -> Metrics:
        """What the step's rows look like; a pipeline may add its own."""
        return rollout_metrics(rollouts)
