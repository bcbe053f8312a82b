"""Losses of preferences: pairs train like a plain loop on every backend, whatever cuts the batch."""

from __future__ import annotations

import functools

import pytest
import torch
from layout_contract import (
    CP2,
    FSDP,
    OVERLAP,
    PACKED,
    PLAIN,
    PP2,
    SP,
    STEPS,
    TP2,
    by_hand,
    differences,
    each,
    layout_spec,
    play,
    put_together,
)
from test_deepspeed_steps import STAGES
from train_contract import make_batch

from roll.configs.catalog.preference_table import PREFERENCE_LOSSES
from roll.configs.schema.preference_config import DPOConfig
from roll.distributed.dispatch import split_batch
from roll.distributed.layout import RankLayout
from roll.pipelines.workers.preference_losses import dpo_objective
from roll.strategies.base import LossFn, LossTerms
from roll.strategies.training.micro import nonfinite_rows, plan_micro_batches
from roll.types.batch import TokenOutputs
from roll.types.metrics import Metrics

PAIRS = ("ab", "bc", "ab", "ca", "bc", "ca")
"""Units of the contract's six rows, no two neighbours alike."""
PREFERRED = (True, False, False, True, True, False)
KL = 0.3
TOKENS = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 24}


def pair_batch():
    batch = make_batch()
    columns = {
        **batch.columns(),
        "ref_logprobs": -3 - torch.linspace(0, 1, batch.num_tokens),
        "preferred": torch.tensor(PREFERRED),
        "targets": torch.full((len(batch),), KL),
    }
    return type(batch)(
        row_ids=batch.row_ids, group_ids=batch.group_ids, unit_ids=PAIRS, offsets=batch.offsets, **columns
    )


@functools.cache
def objectives():
    """Every loss of `pipeline: dpo`, KTO's on the same rows, each by itself."""
    options = {"robust": {"label_smoothing": 0.1}, "kto": {"undesirable_weight": 0.5}}
    configs = (DPOConfig(pipeline="dpo", loss_type=n, beta=0.5, **options.get(n, {})) for n in PREFERENCE_LOSSES)
    return [dpo_objective(config, "policy").compute for config in configs]


def preference_losses(outputs, batch, sizes):
    """The sum of all of them: the gradient is right if each one's is."""
    loss = sum(compute(outputs, batch, sizes).loss for compute in objectives())
    metrics = Metrics()
    metrics.add_sum("loss", float(loss.detach()))
    return LossTerms(loss, metrics)


PAIR_LOSS = LossFn(compute=preference_losses, needs=("logprobs",))


def pair_loss_by_hand(logprobs, batch):
    """The formulas of the papers, beta 0.5, over the pairs (0, 2), (4, 1), (3, 5)."""
    theirs = (batch.ref_logprobs * batch.loss_mask).split(batch.lengths.tolist())
    own = torch.stack([part.sum() for part in logprobs.split(batch.lengths.tolist())])
    ratio = own - torch.stack([part.sum() for part in theirs])
    count = torch.stack([part.sum() for part in batch.loss_mask.split(batch.lengths.tolist())])
    first, second = torch.tensor([0, 4, 3]), torch.tensor([2, 1, 5])

    def apart(values):
        return values[first] - values[second]

    def softplus(x):  # -log sigmoid(-x)
        return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)

    d, mean_d, mean = 0.5 * apart(ratio), apart(ratio / count), own / count
    odds = mean - torch.log(1 - mean.exp())
    gain = 0.5 * (ratio - KL)
    liked = torch.tensor(PREFERRED)
    kto = torch.where(liked, 1 - torch.sigmoid(gain), 0.5 * (1 - torch.sigmoid(-gain)))
    of_pairs = [
        softplus(-d),
        softplus(-0.5 * mean_d),
        (0.9 * softplus(-d) - 0.1 * softplus(d)) / 0.8,
        (1 - d).clamp(min=0),
        (mean_d - 1) ** 2,
        -mean[first] + 0.5 * softplus(-apart(odds)),
        softplus(-(0.5 * apart(mean) - 0.5)),
    ]
    return sum(loss.mean() for loss in of_pairs) + kto.sum() / 3


@functools.cache
def reference(path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return by_hand(model, pair_loss_by_hand, make=pair_batch)


def dealt(batch, dp_rank, dp_size):
    """What a call of the cluster sends to a rank. Three pairs: on two ranks one has two of them."""
    return split_batch(batch, [RankLayout(rank, dp_size) for rank in range(dp_size)], balance=True)[dp_rank]


def play_pairs(info, spec):
    return play(info, spec, None, pair_batch, PAIR_LOSS, dealt)


def check_pairs(ranks, path, strategy, world, cases, tolerance=1e-4):
    """Of roles that share a process group: name -> (options, changes)."""
    specs = [layout_spec(path, strategy, options, **changes) for options, changes in cases.values()]
    for name, *answers in zip(cases, *ranks.run(each, world, play_pairs, specs), strict=True):
        run = put_together(answers)
        wrong = {key: value for key, value in differences(run, reference(path)).items() if not value <= tolerance}
        assert len(run.losses) == STEPS
        assert not wrong, f"{strategy}, {name} on {world} rank(s): relative differences {wrong}, allowed {tolerance}"


MICRO = {
    "a row is less than a pair": {"training": {"per_device_train_batch_size": 1}},
    "three rows": {"training": {"per_device_train_batch_size": 3}},
    "all rows": {"training": {"per_device_train_batch_size": 6}},
    "token budget": {"worker": TOKENS},
    "token budget, packed": {"worker": {**TOKENS, "use_sequence_packing": True}},
}


def test_pairs_on_one_rank_in_micro_batches_of_any_size(ranks, model_of):
    cases = {"two rows": ({}, {}), **{name: ({}, changes) for name, changes in MICRO.items()}}
    check_pairs(ranks, model_of("llama"), "fsdp2_train", 1, cases)


def test_pairs_on_fsdp2(ranks, model_of):
    cases = {name: (options, {}) for name, (world, options) in FSDP.items() if world == 2}
    cases["ranks that share sequences"] = ({}, {"model": {"ulysses_size": 2}})
    check_pairs(ranks, model_of("llama"), "fsdp2_train", 2, cases)
    check_pairs(ranks, model_of("llama"), "fsdp2_train", 4, {"more ranks than pairs": ({}, {})})


def test_pairs_on_deepspeed(ranks, model_of):
    cases = {stage: ({"zero_optimization": zero}, {}) for stage, zero in STAGES.items()}
    check_pairs(ranks, model_of("llama"), "deepspeed_train", 2, cases)


MEGATRON = {
    "one rank": (1, {"padded": ({}, {})}),
    "data 2": (2, {"sharded optimizer": ({}, {}), "whole optimizer": (PLAIN, {}), "overlapped": (OVERLAP, {})}),
    "data 4": (4, {"padded": ({}, {})}),
    "tensor 2": (2, {"sequence": ({**TP2, **SP}, {})}),
    "pipeline 2": (2, {"padded": (PP2, {})}),
    "context 2": (2, {"padded": (CP2, {}), "packed": (CP2, PACKED)}),
    "tensor 2 x data 2": (4, {"sequence": ({**TP2, **SP}, {})}),
    "pipeline 2 x data 2": (4, {"packed": (PP2, PACKED)}),
}


@pytest.mark.parametrize("layout", MEGATRON)
def test_pairs_on_megatron(ranks, model_of, layout):
    check_pairs(ranks, model_of("llama"), "megatron_train", *MEGATRON[layout])


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        # Rows of 7, 12, 5, 9, 20, 3 tokens in pairs (0, 2), (1, 4), (3, 5): widest first.
        ({"max_rows": 4, "max_tokens": None}, [[1, 4, 3, 5], [0, 2]]),
        ({"max_rows": 3, "max_tokens": None}, [[1, 4], [3, 5], [0, 2]]),
        ({"max_rows": 1, "max_tokens": None}, [[1, 4], [3, 5], [0, 2]]),
        ({"max_rows": None, "max_tokens": 36}, [[1, 4], [3, 5, 0, 2]]),
        ({"max_rows": None, "max_tokens": 24, "packed": True}, [[1, 4], [0, 2, 3, 5]]),
    ],
)
def test_micro_batches_keep_pairs_together(limits, expected):
    assert plan_micro_batches([7, 12, 5, 9, 20, 3], pair_batch().units(), **limits) == expected


def test_a_row_without_a_finite_output_takes_its_pair_along():
    batch = pair_batch()
    logprobs = torch.zeros(batch.num_tokens)
    logprobs[batch.offsets[1] - 1] = -torch.inf  # the last token of row 0, which pair "ab" has with row 2
    outputs = TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, logprobs=logprobs)
    assert nonfinite_rows(outputs, batch) == {"row0", "row2"}
    assert nonfinite_rows(outputs, batch.with_row_units()) == {"row0"}
