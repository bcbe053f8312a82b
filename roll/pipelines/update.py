"""From a finished batch to optimizer steps: passes, mini-batches, actor and critic."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roll.configs.rl import RLConfig
from roll.distributed.cluster import Cluster
from roll.pipelines.assemble import with_fillers
from roll.pipelines.off_policy import old_logprobs_source
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics
from roll.utils.seeding import keyed_shuffle
from roll.workers.train import TrainWorker


def mini_batches(batch: TokenBatch, rows: int, min_rows: int, *key: int | str) -> Iterator[TokenBatch]:
    """The batch in pieces of `rows`, shuffled by `key`; each has at least `min_rows`, by fillers if need be."""
    count = math.ceil(len(batch) / rows)
    order = list(range(len(batch))) if count == 1 else keyed_shuffle(range(len(batch)), *key)
    for i in range(count):
        yield with_fillers(batch.select(sorted(order[i * rows : (i + 1) * rows])), min_rows)


def train(cluster: Cluster, config: RLConfig, batch: TokenBatch, step: int) -> Metrics:
    """Every optimizer step that this batch is good for, on the actor's or the critic's cluster.

    The actor's first forward pass is under the weights before the update. Where no other pass was, it measures the
    train/infer mismatch; later passes meet other weights, where a difference is learning and not a mismatch.
    """
    metrics = Metrics()
    rows = config.batch.of(cluster.role).mini_batch
    measures = cluster.role == "actor_train" and old_logprobs_source(config).source != "forward"
    version = step - 1 if measures and batch.sampling_logprobs is not None else None
    for epoch in range(config.ppo_epochs):
        key = (config.seed, "mini_batches", cluster.role, step, epoch)
        for piece in mini_batches(batch, rows, cluster.dp_size, *key):
            metrics.merge(cluster.call(TrainWorker.train_step, piece, version))
            version = None
    return metrics
