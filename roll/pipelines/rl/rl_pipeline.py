"""The training step of reinforcement learning. One of the six files to read first; loop.py is what stands around it.

    rollouts   tasks -> episodes -> groups of trajectories -> ragged rows   (rollouts/collectors.py, assemble.py)
    models     reference and old log-probs, values                          (credit/model_outputs.py)
    credit     rewards -> advantages, masks, weights                        (credit/credit.py, algorithms/)
    update     critic, actor: epochs x mini-batches                         (update.py, strategies and losses)
    publish    train -> infer weights, versioned                            (sync.py)
    conclude   evaluate, log, save                                          (run/loop.py)

`models` and `credit` are lists of stages that the configuration builds; docs/your_own_algorithm.md adds one.

Where a step's rollouts come from, and who gets the new weights, says a subclass: engines that play tasks
(engine_pipeline.py), or the files of a run that has recorded them (replay_pipeline.py). Nothing else
differs between the two.

`offloader` frees the accelerators that roles share for the role that works next; elsewhere it does nothing.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.configs.schema.rl_config import RLConfig
from roll.distributed.cluster import Cluster
from roll.pipelines.credit.credit import credit_stages
from roll.pipelines.credit.model_outputs import model_stages
from roll.pipelines.credit.stages import Stages, StepData
from roll.pipelines.rl.update import train
from roll.pipelines.rollouts.assemble import Rollouts
from roll.pipelines.rollouts.off_policy import old_logprobs_source
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
        self.old_logprobs = old_logprobs_source(config)
        self.credit = credit_stages(config)
        self.models = Stages(model_stages(self, self.credit.needed))

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
            data = self.models(StepData(rollouts, step))
            with self.timers.span("credit"):
                self.credit(data)
            with recorded_update(rollouts.trajectories, step):
                metrics.merge(data.metrics).merge(self.update(data.rollouts, step))
            metrics.update(self.publish(step))
        self.report.rollouts(step, data.rollouts)
        self.conclude(step, metrics.result())

    def forward(self, cluster: Cluster, batch: TokenBatch, *outputs: Output, adapters: bool = True) -> TokenOutputs:
        """Run one forward pass over all rows; only the policy that learns goes by the engine's experts."""
        if cluster is not self.clusters.actor_train or not adapters:
            batch = batch.with_columns(routed_experts=None)
        return super().forward(cluster, batch, *outputs, adapters=adapters)

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
