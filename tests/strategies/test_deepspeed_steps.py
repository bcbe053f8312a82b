"""DeepSpeed roles step like the others: clipping, bad gradients, anchors, frozen parts, critics, types."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from layout_contract import layout_spec, shard_of
from train_contract import LOSS, build, make_batch, make_info, token_mean_loss, weights_of

from roll.strategies.base import LossFn, LossTerms

STAGES = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    # Small tensors would otherwise stay whole on every rank: in these models, all of them.
    "stage 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "stage 2, optimizer on the host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3, all on the host": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


def spec_of(path, stage, *, name="deepspeed_train", **changes):
    return layout_spec(path, name, {"zero_optimization": STAGES[stage]}, **changes)


def stages(**extra):
    return pytest.mark.parametrize("stage", list(STAGES), **extra)


def mine_of(strategy, batch):
    return batch.select(shard_of(strategy.layout.dp_rank, strategy.layout.dp_size))


def steps_of(info, spec, steps, loss_fn=LOSS):
    """(results per step, weights before, weights after) of a run on this rank's rows."""
    strategy = build(spec, info)
    before = weights_of(strategy)
    batch = mine_of(strategy, make_batch())
    results = [strategy.train_step(batch, loss_fn).result() for _ in range(steps)]
    return results, before, weights_of(strategy)


@pytest.fixture(scope="module")
def fsdp2(tiny_model):
    """`fsdp2(steps, change=None, **changes)`: results per step and weights on one rank of FSDP2, played once each."""
    played = {}

    def run(steps, change=None, **changes):
        key = repr((steps, change, sorted(changes.items())))
        if key not in played:
            spec = layout_spec(tiny_model, "fsdp2_train", {}, **changes)
            results, _, weights = steps_of(make_info(), spec if change is None else change(spec), steps)
            played[key] = results, weights
        return played[key]

    return run


def close(mine, theirs, tolerance=1e-4):
    for name, tensor in theirs.items():
        difference = float((mine[name] - tensor).abs().max() / tensor.abs().max())
        assert difference <= tolerance, f"{name}: {difference}"


@stages()
def test_without_clipping_the_norm_is_reported_all_the_same(ranks, tiny_model, fsdp2, stage):
    expected, weights = fsdp2(3, unclipped)
    results, _, mine = ranks.run(steps_of, 2, unclipped(spec_of(tiny_model, stage)), 3)[0]
    norms = [r["actor/grad_norm"] for r in results]
    assert norms == pytest.approx([r["actor/grad_norm"] for r in expected], rel=1e-4)
    assert all(norm > 0 for norm in norms)
    close(mine, weights)


def unclipped(spec):
    return dataclasses.replace(spec, max_grad_norm=0.0)


def broken_steps(info, spec):
    """Good step, bad step on one rank's rows only, good step."""
    strategy = build(spec, info)
    batch = mine_of(strategy, make_batch())

    def broken(outputs, micro, sizes):
        terms = token_mean_loss(outputs, micro, sizes)
        return LossTerms(terms.loss * (math.nan if "row5" in micro.row_ids else 1.0), terms.metrics)

    first = strategy.train_step(batch, LOSS).result()
    before = weights_of(strategy)
    bad = strategy.train_step(batch, LossFn(compute=broken, needs=("logprobs",))).result()
    between = weights_of(strategy)
    last = strategy.train_step(batch, LOSS).result()
    return first, bad, last, before, between, weights_of(strategy)


@stages()
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks_and_leaves_no_trace(ranks, tiny_model, stage, dtype):
    spec = spec_of(tiny_model, stage, model={"dtype": dtype})
    good, _, expected = ranks.run(steps_of, 2, spec, 2)[0]
    for rank, (first, bad, last, before, between, after) in enumerate(ranks.run(broken_steps, 2, spec)):
        assert all(torch.equal(before[name], between[name]) for name in before)
        assert all(torch.equal(expected[name], after[name]) for name in after)
        if rank == 0:
            assert (bad["actor/skipped_steps"], bad["actor/optimizer_steps"]) == (1, 0)
            assert "actor/grad_norm" not in bad
            assert [first["actor/grad_norm"], last["actor/grad_norm"]] == [r["actor/grad_norm"] for r in good]


@stages()
def test_l2_pulls_towards_the_start_before_clipping(ranks, tiny_model, fsdp2, stage):
    expected, weights = fsdp2(4, l2=5.0)
    results, _, mine = ranks.run(steps_of, 2, spec_of(tiny_model, stage, l2=5.0), 4)[0]
    norms = [r["actor/grad_norm"] for r in results]
    assert norms == pytest.approx([r["actor/grad_norm"] for r in expected], rel=1e-4)
    close(mine, weights)
    without, _ = fsdp2(4)
    assert norms != pytest.approx([r["actor/grad_norm"] for r in without], rel=1e-2)


@stages()
def test_l2_in_bf16_counts_from_the_fp32_weights(ranks, tiny_model, stage):
    def norms(world, l2):
        spec = spec_of(tiny_model, stage, model={"dtype": "bf16"}, l2=l2)
        return [r["actor/grad_norm"] for r in ranks.run(steps_of, world, spec, 4)[0][0]]

    pulled, free = norms(1, 5.0), norms(1, 0.0)
    assert norms(2, 5.0) == pytest.approx(pulled, rel=2e-2)
    assert pulled[0] == pytest.approx(free[0], rel=1e-6)  # no way gone yet
    assert pulled[3] != pytest.approx(free[3], rel=2e-2)


@stages()
def test_frozen_prefixes_stay_and_the_rest_moves(ranks, tiny_model, fsdp2, stage):
    frozen = ("model.layers.0.", "model.embed_tokens")
    model = {"freeze_module_prefix": frozen}
    _, before, after = ranks.run(steps_of, 2, spec_of(tiny_model, stage, model=model), 2)[0]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any(name.startswith(frozen) for name in moved)
    close(after, fsdp2(2, model=model)[1])


def critic_steps(info, spec):
    def squared(outputs, batch, sizes):
        return LossTerms(((outputs.values - 1.0).square() * batch.loss_mask).sum() / sizes.tokens)

    strategy = build(spec, info)
    batch = mine_of(strategy, make_batch())
    start = strategy.forward(batch, ("values",)).values
    for _ in range(12):
        strategy.train_step(batch, LossFn(compute=squared, needs=("values",)))
    return start, strategy.forward(batch, ("values",)).values[batch.action_mask]


@stages()
def test_a_critic_starts_at_zero_and_learns_its_target(ranks, tiny_model, stage):
    spec = spec_of(tiny_model, stage, kind="value", training={"learning_rate": 1e-2})
    for start, values in ranks.run(critic_steps, 2, spec):
        assert not start.any()
        assert (values - 1).abs().mean() < 0.2


def scores(info, spec):
    strategy = build(spec, info)
    return strategy.forward(mine_of(strategy, make_batch()), ("logprobs",)).logprobs


@stages()
def test_bf16_computes_close_to_fp32_from_exact_fp32_weights(ranks, tiny_model, stage):
    from transformers import AutoModelForCausalLM

    original = dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters())
    fp32, bf16 = spec_of(tiny_model, stage), spec_of(tiny_model, stage, model={"dtype": "bf16"})
    assert 0 < (ranks.run(scores, 2, fp32)[0] - ranks.run(scores, 2, bf16)[0]).abs().max() < 0.1
    results, before, after = ranks.run(steps_of, 2, bf16, 1)[0]
    norm = ranks.run(steps_of, 2, fp32, 1)[0][0][0]["actor/grad_norm"]
    assert results[0]["actor/grad_norm"] == pytest.approx(norm, rel=0.05)
    assert all(torch.equal(before[name], original[name]) for name in original)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert any(not torch.equal(after[name], after[name].bfloat16().float()) for name in after)


@stages()
def test_rates_follow_their_schedules(ranks, tiny_model, fsdp2, stage):
    training = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "learning_rate": 1e-2, "end_weight_decay": 5.0}
    results, _, mine = ranks.run(steps_of, 2, spec_of(tiny_model, stage, training=training), 4)[0]
    expected, weights = fsdp2(4, training=training)
    assert [r["actor/lr"] for r in results] == [r["actor/lr"] for r in expected]
    assert len({r["actor/lr"] for r in results}) > 2
    close(mine, weights)
