"""A row for which the model gives -inf at a loss token leaves the step, in every backend and layout."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from layout_contract import layout_spec, relative, shard_of
from train_contract import LOSS, build, make_batch, make_info, make_spec, weights_of

from roll.strategies.training.micro import nonfinite_rows
from roll.types.batch import TokenOutputs

BROKEN = "row5"
"""On two data-parallel ranks, the only row of the second."""

LAYOUTS = {
    "fsdp2, 2 ranks": ("fsdp2_train", 2, {}),
    "deepspeed, stage 0": ("deepspeed_train", 2, {"zero_optimization": {"stage": 0}}),
    "deepspeed, stage 2": ("deepspeed_train", 2, {"zero_optimization": {"stage": 2}}),
    "megatron, DP 2": ("megatron_train", 2, {}),
    "megatron, TP 2": ("megatron_train", 2, {"tensor_model_parallel_size": 2}),
    "megatron, PP 2": ("megatron_train", 2, {"pipeline_model_parallel_size": 2}),
}


def break_rows(strategy, names):
    """Give the last token of these rows the log-prob -inf in every training pass."""
    loss_of = strategy._losses.of

    def broken(outputs, micro, *args, **options):
        shift = torch.zeros(micro.num_tokens)
        for i, name in enumerate(micro.row_ids):
            if name in names:
                shift[int(micro.offsets[i + 1]) - 1] = -math.inf
        outputs = dataclasses.replace(outputs, logprobs=outputs.logprobs + shift)
        return loss_of(outputs, micro, *args, **options)

    strategy._losses.of = broken


def steps(info, spec, *, without=False):
    """(metrics of two steps, weights) with a broken row, or without the row at all."""
    strategy = build(spec, info)
    batch = make_batch().select(shard_of(strategy.layout.dp_rank, strategy.layout.dp_size))
    if without:
        batch = batch.select([i for i, name in enumerate(batch.row_ids) if name != BROKEN])
    else:
        break_rows(strategy, {BROKEN})
    results = [strategy.train_step(batch, LOSS).result() for _ in range(2)]
    return results, weights_of(strategy), strategy.layout


@pytest.fixture(scope="module")
def expected(tiny_model):
    """A run that never had the row."""
    results, weights, _ = steps(make_info(), layout_spec(tiny_model, "fsdp2_train", {}), without=True)
    return results, weights


@pytest.mark.parametrize("rows", [1, 6])
def test_a_row_with_a_logprob_of_minus_infinity_leaves_loss_and_denominators(tiny_model, expected, rows):
    spec = layout_spec(tiny_model, "fsdp2_train", {}, training={"per_device_train_batch_size": rows})
    results, weights, _ = steps(make_info(), spec)
    for found, other in zip(results, expected[0], strict=True):
        assert found["actor/nonfinite_rows"] == 1.0
        assert (found["actor/optimizer_steps"], found["actor/skipped_steps"]) == (1.0, 0.0)
        assert found["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert found["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-5)
        assert "actor/nonfinite_rows" not in other
    assert all(relative(weights[name], tensor) < 1e-4 for name, tensor in expected[1].items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_row_leaves_the_step_alike_in_every_layout(ranks, tiny_model, expected, layout):
    name, world, options = LAYOUTS[layout]
    answers = ranks.run(steps, world, layout_spec(tiny_model, name, options))
    for found, other in zip(answers[0][0], expected[0], strict=True):
        assert found["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)
    told = [results for results, _, layout in answers if layout.collects]
    assert sum(results[0].get("actor/nonfinite_rows", 0.0) for results in told) == 1.0
    weights = answers[0][1]
    assert all(relative(weights[name], tensor) < 1e-4 for name, tensor in expected[1].items())


@pytest.mark.parametrize("names", [{"row0", "row1"}, {f"row{i}" for i in range(6)}])
def test_more_than_a_share_of_such_rows_stops_the_run(tiny_model, names):
    strategy = build(make_spec(tiny_model))
    before = weights_of(strategy)
    break_rows(strategy, names)
    with pytest.raises(FloatingPointError, match=rf"actor_train: {len(names)} of the 6 rows .* -inf or NaN"):
        strategy.train_step(make_batch(), LOSS)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(strategy).items())


def test_only_loss_tokens_of_rows_that_count_are_looked_at():
    batch = make_batch((3, 3, 3))
    last = torch.tensor([2, 5, 8])
    logprobs, mask, weight = torch.zeros(9), torch.ones(9, dtype=torch.bool), torch.tensor([1.0, 1.0, 0.0])
    logprobs[last] = torch.tensor([-math.inf, math.nan, -math.inf])
    mask[last[0]] = False
    batch = batch.with_columns(loss_mask=mask, loss_weight=weight)
    outputs = TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, logprobs=logprobs)
    assert nonfinite_rows(outputs, batch) == {"row1"}
