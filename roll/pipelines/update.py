"""From a finished batch to optimizer steps: passes, mini-batches, actor and critic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from roll.configs.schema.rl_config import RLConfig
from roll.distributed.cluster import Cluster
from roll.pipelines.assemble import Rollouts, pad_to_ranks
from roll.pipelines.off_policy import old_logprobs_source
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics
from roll.utils.seeding import keyed_shuffle
from roll.workers.train import TrainWorker


def mini_batches(
    batch: TokenBatch, of: Sequence[int], size: int, min_rows: int, *key: int | str
) -> Iterator[TokenBatch]:
    """Cut the batch into pieces of `size` trajectories, shuffled by `key`; padding rows fill up to `min_rows`.

    A trajectory's rows stay together, so there are as many optimizer steps whatever a row is: schedules of the learning
    rate and the mini-batch's share of a step are the same for every `sample_unit`.

    Args:
        batch: rows of trajectories.
        of: the trajectory of each row, by number.
    """
    rows: dict[int, list[int]] = {}
    for row, trajectory in enumerate(of):
        rows.setdefault(trajectory, []).append(row)
    count = math.ceil(len(rows) / size)
    order = list(rows) if count == 1 else keyed_shuffle(list(rows), *key)
    for i in range(count):
        piece = [row for trajectory in order[i * size : (i + 1) * size] for row in rows[trajectory]]
        yield pad_to_ranks(batch.select(sorted(piece)), min_rows)


def train(cluster: Cluster, config: RLConfig, rollouts: Rollouts, step: int) -> Metrics:
    """Every optimizer step that this batch is good for, on the actor's or the critic's cluster.

    The actor's first forward pass is under the weights before the update. Where no other pass was, it measures the
    train/infer mismatch; later passes meet other weights, where a difference is learning and not a mismatch.
    """
    metrics, batch, of = Metrics(), rollouts.batch, rollouts.row_trajectory.tolist()
    size = config.batch.of(cluster.role).mini_batch
    measures = cluster.role == "actor_train" and old_logprobs_source(config).source != "forward"
    version = step - 1 if measures and batch.sampling_logprobs is not None else None
    for epoch in range(config.ppo_epochs):
        key = (config.seed, "mini_batches", cluster.role, step, epoch)
        for piece in mini_batches(batch, of, size, cluster.dp_size, *key):
            metrics.merge(cluster.call(TrainWorker.train_step, piece, version))
            version = None
    return metrics
