"""The training step of reinforcement learning. One of the six files to read first; loop.py is what stands around it.

    groups  = collect      tasks -> episodes -> groups of trajectories     (collectors.py, rollout/scheduler.py)
    batch   = assemble     ragged rows with ids
    batch   = logprobs     reference and old log-probs, values             (strategies, on their clusters)
    batch   = credit       rewards -> advantages, masks, weights           (algorithms/)
    metrics = update       critic, actor: epochs x mini-batches            (strategies + losses)
              sync         train -> infer weights, versioned
              evaluate, log, save

Where a step's rollouts come from, and who gets the new weights, says a subclass: engines that play tasks
(engine_pipeline.py), or the files of a run that has recorded them (replay.py). Nothing else differs between the two.

`offloader` frees the accelerators that roles share for the role that works next; elsewhere it does nothing.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.configs.schema.rl_config import RLConfig
from roll.distributed.cluster import Cluster
from roll.pipelines.credit.credit import CreditAssigner
from roll.pipelines.credit.teaching import vocabulary_of, with_reference, with_reference_kl, with_teacher
from roll.pipelines.rl.update import train
from roll.pipelines.rollouts.assemble import Rollouts
from roll.pipelines.rollouts.off_policy import old_logprobs_source
from roll.pipelines.rollouts.rollout_rows import recorded_outputs
from roll.pipelines.run.clusters import Clusters
from roll.pipelines.run.loop import Loop
from roll.pipelines.run.recording import recorded_update
from roll.strategies.base import Output
from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.metrics import Metrics

logger = logging.getLogger(__name__)


class RLPipeline(Loop):
    """Walks the loop over its clusters: `run`, then `close`."""

    config: RLConfig

    def __init__(self, config: RLConfig, clusters: Clusters, tokenizer: Any, *, total_steps: int) -> None:
        super().__init__(config, clusters, tokenizer, total_steps=total_steps)
        self.credit = CreditAssigner(config)
        self.old_logprobs = old_logprobs_source(config)

    # --- what a subclass says -------------------------------------------------------------------------------------

    @abstractmethod
    def rollouts(self, step: int) -> tuple[Rollouts, Metrics]:
        """Return what a step trains on, and what to log about it; raises `OutOfTasks` when there is nothing left."""

    def publish(self, step: int) -> Mapping[str, float]:  # noqa: ARG002 - for subclasses
        """Give the weights after a step to whoever samples the next one; return what to log. Default: nobody does."""
        return {}

    # --- the step -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        logger.info("old log-probs come from: %s (%s)", self.old_logprobs.source, self.old_logprobs.reason)
        super().train()

    def step(self, step: int) -> None:
        with self.timers.span("step"):
            rollouts, metrics = self.rollouts(step)
            rollouts = self.compute_logprobs(rollouts)
            with self.timers.span("credit"):
                rollouts, credit_metrics = self.credit.assign(rollouts, step=step, greedy_scores=rollouts.greedy_scores)
            with recorded_update(rollouts.trajectories, step):
                metrics.merge(credit_metrics).merge(self.update(rollouts, step))
            metrics.update(self.publish(step))
        self.report.rollouts(step, rollouts)
        self.conclude(step, metrics.result())

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

    def forward(self, cluster: Cluster, batch: TokenBatch, *outputs: Output, adapters: bool = True) -> TokenOutputs:
        """Run one forward pass over all rows; only the policy that learns goes by the engine's experts."""
        if cluster is not self.clusters.actor_train or not adapters:
            batch = batch.with_columns(routed_experts=None)
        return super().forward(cluster, batch, *outputs, adapters=adapters)

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

    # --- state ----------------------------------------------------------------------------------------------------

    def save_state(self, folder: Path) -> dict[str, Any]:
        del folder
        return {"credit": self.credit.state_dict()}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        del folder
        self.credit.load_state_dict(state["credit"])
