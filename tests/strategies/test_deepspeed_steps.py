"""DeepSpeed roles step like the others: clipping, bad gradients, anchors, frozen parts, critics, types."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import math

import pytest
import torch
from layout_contract import layout_spec, my_rows
from train_contract import LOSS, VALUE_LOSS, build, make_info, token_mean_loss, weights_of

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


def steps_of(info, spec):
    """(results of four steps, weights before the first and after each, scores before) of a run on this rank's rows."""
    strategy = build(spec, info)
    batch, results, weights = my_rows(strategy), [], [weights_of(strategy)]
    scores = strategy.forward(batch, ("logprobs",)).logprobs
    for _ in range(4):
        results.append(strategy.train_step(batch, LOSS).result())
        weights.append(weights_of(strategy))
    return results, weights, scores


def norms_of(results):
    return [result["actor/grad_norm"] for result in results]


@pytest.fixture(scope="module")
def fsdp2(tiny_model):
    """`fsdp2(change=None, **changes)`: what `steps_of` gives on one rank of FSDP2, played once each."""
    played = {}

    def run(change=None, **changes):
        key = repr((change, sorted(changes.items())))
        if key not in played:
            spec = layout_spec(tiny_model, "fsdp2_train", {}, **changes)
            played[key] = steps_of(make_info(), spec if change is None else change(spec))
        return played[key]

    return run


def close(mine, theirs, tolerance=1e-4):
    for name, tensor in theirs.items():
        difference = float((mine[name] - tensor).abs().max() / tensor.abs().max())
        assert difference <= tolerance, f"{name}: {difference}"


@stages()
def test_without_clipping_the_norm_is_reported_all_the_same(ranks, tiny_model, fsdp2, stage):
    expected, weights, _ = fsdp2(unclipped)
    results, mine, _ = ranks.run(steps_of, 2, unclipped(spec_of(tiny_model, stage)))[0]
    assert norms_of(results) == pytest.approx(norms_of(expected), rel=1e-4)
    assert all(norm > 0 for norm in norms_of(results))
    close(mine[-1], weights[-1])


def unclipped(spec):
    return dataclasses.replace(spec, max_grad_norm=0.0)


def broken_steps(info, spec):
    """Good step, bad step on one rank's rows only, good step."""
    strategy = build(spec, info)
    batch = my_rows(strategy)

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
    good, expected, _ = ranks.once(steps_of, 2, spec)[0]
    for rank, (first, bad, last, before, between, after) in enumerate(ranks.run(broken_steps, 2, spec)):
        assert all(torch.equal(before[name], between[name]) for name in before)
        assert all(torch.equal(expected[2][name], after[name]) for name in after)
        if rank == 0:
            assert (bad["actor/skipped_steps"], bad["actor/optimizer_steps"]) == (1, 0)
            assert "actor/grad_norm" not in bad
            assert norms_of([first, last]) == norms_of(good[:2])


@stages()
def test_l2_pulls_towards_the_start_before_clipping(ranks, tiny_model, fsdp2, stage):
    expected, weights, _ = fsdp2(l2=5.0)
    results, mine, _ = ranks.run(steps_of, 2, spec_of(tiny_model, stage, l2=5.0))[0]
    assert norms_of(results) == pytest.approx(norms_of(expected), rel=1e-4)
    close(mine[-1], weights[-1])
    assert norms_of(results) != pytest.approx(norms_of(fsdp2()[0]), rel=1e-2)


@stages()
def test_l2_in_bf16_counts_from_the_fp32_weights(ranks, tiny_model, stage):
    def norms(world, l2):
        spec = spec_of(tiny_model, stage, model={"dtype": "bf16"}, l2=l2)
        return norms_of(ranks.once(steps_of, world, spec)[0][0])

    pulled, free = norms(1, 5.0), norms(1, 0.0)
    assert norms(2, 5.0) == pytest.approx(pulled, rel=2e-2)
    assert pulled[0] == pytest.approx(free[0], rel=1e-6)  # no way gone yet
    assert pulled[3] != pytest.approx(free[3], rel=2e-2)


@stages()
def test_frozen_prefixes_stay_and_the_rest_moves(ranks, tiny_model, fsdp2, stage):
    frozen = ("model.layers.0.", "model.embed_tokens")
    model = {"freeze_module_prefix": frozen}
    before, *_, after = ranks.run(steps_of, 2, spec_of(tiny_model, stage, model=model))[0][1]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any(name.startswith(frozen) for name in moved)
    close(after, fsdp2(model=model)[1][-1])


def critic_steps(info, spec):
    strategy = build(spec, info)
    batch = my_rows(strategy)
    start = strategy.forward(batch, ("values",)).values
    for _ in range(12):
        strategy.train_step(batch, VALUE_LOSS)
    return start, strategy.forward(batch, ("values",)).values[batch.action_mask]


@stages()
def test_a_critic_starts_at_zero_and_learns_its_target(ranks, tiny_model, stage):
    spec = spec_of(tiny_model, stage, kind="value", training={"learning_rate": 1e-2})
    for start, values in ranks.run(critic_steps, 2, spec):
        assert not start.any()
        assert (values - 1).abs().mean() < 0.2


@stages()
def test_bf16_computes_close_to_fp32_from_exact_fp32_weights(ranks, tiny_model, stage):
    from transformers import AutoModelForCausalLM

    original = dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters())
    specs = (spec_of(tiny_model, stage, model={"dtype": dtype}) for dtype in ("fp32", "bf16"))
    (exact, _, exact_scores), (results, (before, after, *_), scores) = (
        ranks.once(steps_of, 2, spec)[0] for spec in specs
    )
    assert 0 < (exact_scores - scores).abs().max() < 0.1
    assert norms_of(results)[0] == pytest.approx(norms_of(exact)[0], rel=0.05)
    assert all(torch.equal(before[name], original[name]) for name in original)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert any(not torch.equal(after[name], after[name].bfloat16().float()) for name in after)


@stages()
def test_rates_follow_their_schedules(ranks, tiny_model, fsdp2, stage):
    training = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "learning_rate": 1e-2, "end_weight_decay": 5.0}
    results, mine, _ = ranks.run(steps_of, 2, spec_of(tiny_model, stage, training=training))[0]
    expected, weights, _ = fsdp2(training=training)
    assert [r["actor/lr"] for r in results] == [r["actor/lr"] for r in expected]
    assert len({r["actor/lr"] for r in results}) > 2
    close(mine[-1], weights[-1])


def test_a_missing_package_is_named_with_its_install_command(tiny_model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"deepspeed is not installed: pip install -e '\.\[deepspeed\]'"):
        build(spec_of(tiny_model, "stage 1"), make_info())


def printed(info, spec):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        build(spec, info)
    return said.getvalue()


def test_building_prints_nothing(ranks, tiny_model):
    # ZeRO 1 in bf16 is the optimizer that reports memory whatever the settings.
    assert ranks.run(printed, 2, spec_of(tiny_model, "stage 1", model={"dtype": "bf16"})) == ["", ""]
