"""From a finished batch to optimizer steps: passes, mini-batches, actor and critic."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from roll.algorithms.aggregation import equal_prompts
from roll.algorithms.covariance import covariances
from roll.configs.schema.rl_config import RLConfig
from roll.distributed.cluster import Cluster
from roll.pipelines.rollouts.assemble import Rollouts
from roll.pipelines.rollouts.off_policy import old_logprobs_source
from roll.pipelines.workers.train_worker import TrainWorker
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics
from roll.utils.importing import load_object
from roll.utils.seeding import keyed_shuffle, stable_hash


def mini_batches(batch: TokenBatch, size: int, *key: int | str) -> Iterator[TokenBatch]:
    """Cut the batch into pieces of `size` units, shuffled by `key`.

    A trajectory is a unit, so there are as many optimizer steps whatever a row is: schedules of the learning rate and
    the mini-batch's share of a step are the same for every `sample_unit`.
    """
    units = batch.units()
    count = math.ceil(len(units) / size)
    order = units if count == 1 else keyed_shuffle(units, *key)
    for i in range(count):
        yield batch.select(sorted(row for unit in order[i * size : (i + 1) * size] for row in unit))


def with_batch_columns(config: RLConfig, piece: TokenBatch, role: str, *key: int | str) -> TokenBatch:
    """Add what depends on a whole mini-batch: tokens that the loss treats apart, weights that make prompts equal."""
    if role == "actor_train" and config.loss.selects:
        mask = piece.require("loss_mask")
        options = {name: value for name, value in covariance_options(config).items() if name.startswith("cov_")}
        generator = torch.Generator().manual_seed(stable_hash(*key, *piece.row_ids, bits=56))
        scores = covariances(piece.require("old_logprobs"), piece.require("advantages"), mask)
        select = load_object(config.loss.selects, key="policy_loss")
        piece = piece.with_columns(selected=select(scores, mask, generator, **options))
    if config.loss_agg_mode == "prompt-mean":
        weights = torch.ones(len(piece)) if piece.loss_weight is None else piece.loss_weight
        rows = torch.repeat_interleave(torch.arange(len(piece)), piece.lengths)
        tokens = torch.zeros(len(piece)).index_add(0, rows, piece.require("loss_mask").float()) * (weights != 0)
        numbers = {group: i for i, group in enumerate(dict.fromkeys(piece.group_ids))}
        index = torch.tensor([numbers[group] for group in piece.group_ids])
        piece = piece.with_columns(loss_weight=weights * equal_prompts(tokens, index))
    return piece


def covariance_options(config: RLConfig) -> dict[str, float]:
    """Return the options of the loss in force, defaults included."""
    defaults = {name: option.default for name, option in config.loss.options.items() if not option.key}
    return {**defaults, **config.loss_options}


def train(cluster: Cluster, config: RLConfig, rollouts: Rollouts, step: int) -> Metrics:
    """Take every optimizer step that this batch is good for, on the actor's or the critic's cluster.

    The actor's first forward pass is under the weights before the update. Where no other pass was, it measures the
    train/infer mismatch; later passes meet other weights, where a difference is learning and not a mismatch.
    """
    metrics, batch = Metrics(), rollouts.batch
    if cluster.role != "actor_train":
        batch = batch.with_columns(routed_experts=None)  # of the policy's routers
    size = config.batch.of(cluster.role).mini_batch
    measures = cluster.role == "actor_train" and old_logprobs_source(config).source != "forward"
    version = step - 1 if measures and batch.sampling_logprobs is not None else None
    for epoch in range(config.ppo_epochs):
        key = (config.seed, "mini_batches", cluster.role, step, epoch)
        for piece in mini_batches(batch, size, *key):
            piece = with_batch_columns(config, piece, cluster.role, *key)
            # The losses of this loop take rows one by one: ranks and micro-batches may part an episode's rows.
            metrics.merge(cluster.call(TrainWorker.train_step, piece.with_row_units(), version))
            version = None
    return metrics
