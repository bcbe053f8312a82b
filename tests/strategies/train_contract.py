"""What every training backend must do, as plain functions; run by the tests on one rank and on several."""

from __future__ import annotations

import dataclasses

import torch

from roll.configs.schema.strategy_config import StrategyArgs
from roll.configs.schema.training_args import TrainingArgs
from roll.configs.schema.worker_config import ModelArgs, TrainConfig
from roll.distributed.worker import WorkerInfo
from roll.strategies import build_train_strategy
from roll.strategies.base import LossFn, LossTerms, TrainSpec
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics

LENGTHS = (7, 12, 5, 9, 20, 3)


def make_spec(path, *, strategy="fsdp2_train", kind="policy", worker=None, training=None, model=None, **spec):
    training_args = TrainingArgs(**{"learning_rate": 1e-2, "per_device_train_batch_size": 2, **(training or {})})
    config = TrainConfig(
        model_args=ModelArgs(model_name_or_path=str(path), **(model or {})),
        training_args=training_args,
        strategy_args=StrategyArgs(strategy_name=strategy),
        **(worker or {}),
    )
    return TrainSpec(role="actor_train", kind=kind, worker=config, seed=1, total_optimizer_steps=10, **spec)


def make_info(rank=0, world_size=1, port=0):
    return WorkerInfo(
        role="actor_train",
        rank=rank,
        world_size=world_size,
        master_addr="127.0.0.1",
        master_port=port,
        slots=(rank,),
        local_rank=0,
    )


def make_batch(lengths=LENGTHS, seed=0) -> TokenBatch:
    """Ragged rows with holes in the action mask, as environment replies leave them."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    acting = torch.rand(total, generator=generator) > 0.4
    acting[offsets[:-1]] = False
    acting[offsets[1:] - 1] = True
    return TokenBatch(
        row_ids=tuple(f"row{i}" for i in range(len(lengths))),
        group_ids=tuple(f"group{i // 2}" for i in range(len(lengths))),
        offsets=offsets,
        token_ids=torch.randint(6, 90, (total,), generator=generator),
        action_mask=acting,
        loss_mask=acting,
        advantages=torch.randn(total, generator=generator),
    )


def token_mean_loss(outputs, batch, sizes):
    weight = torch.repeat_interleave(
        batch.loss_weight if batch.loss_weight is not None else torch.ones(len(batch)), batch.lengths
    )
    loss = -(outputs.logprobs * batch.advantages * batch.loss_mask * weight).sum() / sizes.tokens
    metrics = Metrics()
    metrics.add_sum("loss", float(loss.detach()))
    return LossTerms(loss, metrics)


def squared(outputs, batch, sizes):
    return LossTerms(((outputs.values - 1.0).square() * batch.loss_mask).sum() / sizes.tokens)


LOSS = LossFn(compute=token_mean_loss, needs=("logprobs",))
VALUE_LOSS = LossFn(compute=squared, needs=("values",))
LOSSES = {"policy": LOSS, "value": VALUE_LOSS}


def build(spec, info=None):
    return build_train_strategy(spec, info or make_info())


def weights_of(strategy):
    return {name: tensor.detach().clone() for name, tensor in strategy.named_weights()}


def trained(spec, batch, steps=3, info=None, shard=None):
    """(metrics per step, weights) after some optimizer steps."""
    strategy = build(spec, info)
    part = batch if shard is None else batch.select(shard)
    history = [strategy.train_step(part, LOSS) for _ in range(steps)]
    return history, weights_of(strategy)


def with_worker(spec, **changes):
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, **changes))
