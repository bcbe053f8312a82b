"""From a finished batch to optimizer steps: passes, mini-batches, actor and critic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from roll.configs.batch import plan_batches
from roll.configs.rlvr import RLVRConfig
from roll.distributed.cluster import Cluster
from roll.pipelines.assemble import with_fillers
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics
from roll.utils.seeding import keyed_shuffle
from roll.workers.train import TrainWorker


@dataclass(frozen=True, slots=True)
class OldLogprobs:
    """Where the log-probs before the update come from, and why."""

    source: str
    """`update`: the update's own forward pass; `sampler`: the engine's; `forward`: a pass of their own."""
    reason: str


def old_logprobs_source(config: RLVRConfig) -> OldLogprobs:
    """Spend a forward pass on old log-probs only when nobody knows them already."""
    steps = plan_batches(config).of("actor_train").optimizer_steps
    readers = []
    if steps > 1:
        readers.append(f"{steps} optimizer steps per batch")
    if config.add_token_level_kl and config.uses_reference:
        readers.append("the KL in the reward")
    if config.train_infer_correction is not None:
        readers.append("train_infer_correction")
    if not readers:
        return OldLogprobs("update", "one optimizer step per batch: they are those of the update's own forward pass")
    wanted = " and ".join(readers)
    infer, train = config.actor_infer, config.actor_train
    sampling = infer.generating_args
    exact = (
        infer.strategy_args.strategy_name == "hf_infer"
        and infer.model_args.dtype == train.model_args.dtype == "fp32"
        and getattr(train.strategy_args.strategy_config, "param_dtype", None) in (None, "fp32")
        and infer.model_args.model_config_kwargs == train.model_args.model_config_kwargs
        and sampling.repetition_penalty == 1.0
        and config.train_infer_correction is None
    )
    if exact:
        return OldLogprobs("sampler", f"needed for {wanted}; hf_infer in fp32 computes the trainer's own log-probs")
    return OldLogprobs("forward", f"needed for {wanted}; the sampler's log-probs differ from the trainer's")


def mini_batches(batch: TokenBatch, rows: int, min_rows: int, *key: int | str) -> Iterator[TokenBatch]:
    """The batch in pieces of `rows`, shuffled by `key`; each has at least `min_rows`, by fillers if need be.

    The sampler's log-probs stay on the first piece only: later ones meet other weights, where a difference is learning
    and not a mismatch.
    """
    count = math.ceil(len(batch) / rows)
    order = list(range(len(batch))) if count == 1 else keyed_shuffle(range(len(batch)), *key)
    for i in range(count):
        piece = batch.select(sorted(order[i * rows : (i + 1) * rows]))
        if i > 0:
            piece = piece.with_columns(sampling_logprobs=None)
        yield with_fillers(piece, min_rows)


def train(cluster: Cluster, config: RLVRConfig, batch: TokenBatch, step: int) -> Metrics:
    """Every optimizer step that this batch is good for, on the actor's or the critic's cluster."""
    metrics = Metrics()
    rows = plan_batches(config).of(cluster.role).mini_batch
    for epoch in range(config.ppo_epochs):
        source = batch if epoch == 0 else batch.with_columns(sampling_logprobs=None)
        key = (config.seed, "mini_batches", cluster.role, step, epoch)
        for piece in mini_batches(source, rows, cluster.dp_size, *key):
            metrics.merge(cluster.call(TrainWorker.train_step, piece))
    return metrics
