"""Rows of older weights: how old they may be, what is measured, and that they are corrected for exactly once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import R, credited_by, make_config, make_rollouts, on_actions, with_versions
from small import run_small
from torch.testing import assert_close
from whole_batch import denominators_of

from roll.configs.schema.policy_config import TrainInferCorrection
from roll.pipelines.credit.credit import credit_stages
from roll.pipelines.rollouts.off_policy import staleness_metrics, staleness_of
from roll.pipelines.workers.worker_losses import actor_loss
from roll.strategies.training.micro import denominators
from roll.types.batch import TokenOutputs

QUICK = settings(max_examples=15, deadline=None, derandomize=True)
STEP = 6
DECOUPLED = {"policy_loss": "decoupled_ppo"}


def rows(versions, old=(), sampled=()):
    """Two rows of three and two tokens, of these versions and log-probs."""
    made = with_versions(make_rollouts([R(1.0, 3), R(0.0, 2)]), *versions)
    columns = {"old_logprobs": old or [-1.0] * 5, "sampling_logprobs": sampled or [-1.0] * 5}
    return replace(made, batch=made.batch.with_columns(**{n: on_actions(made, *v) for n, v in columns.items()}))


def assigned(rollouts, ratio=2.0, **keys):
    config = make_config(async_generation_ratio=ratio, allow_uncorrected_async=True, **keys)
    found, metrics = credited_by(credit_stages(config), rollouts, step=STEP)
    return found.batch, metrics.result()


# --- how old ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "versions", "staleness"),
    [
        # Step 6 trains version 5.
        (0.0, (5, 5, 5, 5, 5), (0, 0, 0, 0, 0)),
        (0.5, (5, 4, 5, 4, 4), (0, 1, 0, 1, 1)),
        (1.0, (4, 4, 5, 5, 5), (1, 1, 0, 0, 0)),
        (1.5, (3, 4, 5, 5, 5), (2, 1, 0, 0, 0)),
    ],
)
def test_staleness_is_counted_per_token_and_reaches_the_ratio_rounded_up(ratio, versions, staleness):
    rollouts = rows(versions)
    found = staleness_of(rollouts.batch, STEP, ratio)
    assert tuple(found[rollouts.batch.action_mask].tolist()) == staleness
    assert int(found.sum()) == sum(staleness)  # and 0 on the prompt, whose version is -1
    assigned(rollouts, ratio)


@pytest.mark.parametrize(
    ("ratio", "versions", "said"),
    [
        (0.0, (5, 5, 5, 4, 5), ["'t0#1'", "position 2", "version 4 in step 6", "staleness 1, expected 0 to 0"]),
        (0.5, (3, 5, 5, 5, 5), ["'t0#0'", "position 2", "version 3", "staleness 2, expected 0 to 1", "1 row(s)"]),
        (2.0, (5, 5, 2, 5, 2), ["'t0#0'", "position 4", "staleness 3, expected 0 to 2", "2 row(s)"]),
        (2.0, (5, 5, 5, 5, 6), ["'t0#1'", "version 6", "staleness -1"]),
    ],
)
def test_a_token_that_is_too_old_or_from_the_future_stops_the_run(ratio, versions, said):
    with pytest.raises(RuntimeError, match="internal error") as raised:
        assigned(rows(versions), ratio)
    assert all(words in str(raised.value) for words in said), raised.value


def test_staleness_is_logged_as_mean_maximum_and_shares():
    # staleness 0, 1, 3 | 2, 0
    _, metrics = assigned(rows((5, 4, 2, 3, 5)), 3.0)
    assert metrics["staleness/mean"] == pytest.approx(6 / 5)
    assert metrics["staleness/max"] == 3.0
    shares = [metrics[f"staleness/share_{name}"] for name in ("0", "1", "2_or_more")]
    assert shares == pytest.approx([2 / 5, 1 / 5, 2 / 5])


def test_without_generation_ahead_nothing_is_said_about_staleness():
    _, metrics = assigned(rows((5,) * 5), 0.0, **DECOUPLED)
    assert not [name for name in metrics if name.startswith(("staleness/", "mismatch/all_"))]
    assert metrics["mismatch/kl"] == 0.0
    assert staleness_metrics(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).result() == {}


# --- how far ----------------------------------------------------------------------------------------------------------

RATIOS = (1.0, math.e, 2.0, 0.5, 1.0)
OLD = [-2.0 + math.log(r) for r in RATIOS]
SAMPLED = [-2.0] * 5


@pytest.mark.parametrize("keys", [DECOUPLED, {"train_infer_correction": TrainInferCorrection()}])
def test_the_mismatch_of_fresh_tokens_is_apart_from_that_of_all(keys):
    # Fresh are the ratios 1, 2, 1: k3 of 2 is 1 - ln 2. All: also e (e - 2) and 0.5 (ln 2 - 0.5).
    _, metrics = assigned(rows((5, 4, 5, 4, 5), OLD, SAMPLED), **keys)
    two, euler, half = 1 - math.log(2), math.e - 2, math.log(2) - 0.5
    assert metrics["mismatch/kl"] == pytest.approx(two / 3, rel=1e-4)
    assert metrics["mismatch/all_kl"] == pytest.approx((two + euler + half) / 5, rel=1e-4)
    assert metrics["mismatch/abs_log_ratio_mean"] == pytest.approx(math.log(2) / 3)
    assert metrics["mismatch/all_abs_log_ratio_mean"] == pytest.approx((1 + 2 * math.log(2)) / 5)
    found = [metrics[f"mismatch/{name}"] for name in ("ratio_min", "ratio_max", "all_ratio_min", "all_ratio_max")]
    assert found == pytest.approx([1.0, 2.0, 0.5, math.e])


def test_of_an_uncorrected_batch_credit_says_how_old_it_is_and_leaves_the_mismatch_to_the_update():
    batch, metrics = assigned(rows((5, 4, 5, 4, 5), SAMPLED, SAMPLED), ppo_epochs=2)
    assert batch.importance_weights is None
    assert metrics["staleness/mean"] == pytest.approx(2 / 5)
    assert not [name for name in metrics if name.startswith("mismatch/")]


@pytest.mark.parametrize("keys", [DECOUPLED, {"train_infer_correction": TrainInferCorrection(importance_upper=5.0)}])
def test_weights_are_measured_alike_whoever_applies_them(keys):
    # Weights 1, e, 2, 0.5, 1: sum 7.21828, squares 13.63906 -> 52.1036 / 68.1953
    _, metrics = assigned(rows((5,) * 5, OLD, SAMPLED), **keys)
    assert metrics["mismatch/weight_mean"] == pytest.approx((4.5 + math.e) / 5)
    assert metrics["mismatch/ess"] == pytest.approx((4.5 + math.e) ** 2 / (5 * (6.25 + math.e**2)))
    assert metrics["mismatch/weight_capped_share"] == 0.0


@pytest.mark.parametrize(("cap", "mean", "capped"), [(2.0, 6.5 / 5, 2 / 5), (None, (4.5 + math.e) / 5, 0.0)])
def test_the_cap_of_decoupled_ppo_shows_in_what_is_measured(cap, mean, capped):
    batch, metrics = assigned(rows((5,) * 5, OLD, SAMPLED), decoupled_ppo_cap=cap, **DECOUPLED)
    assert batch.importance_weights is None  # the loss weighs by itself
    assert metrics["mismatch/weight_mean"] == pytest.approx(mean)
    assert metrics["mismatch/weight_capped_share"] == pytest.approx(capped)


def test_filters_go_with_decoupled_ppo_and_leave_its_weight_to_the_loss():
    rule = TrainInferCorrection(importance_upper=None, ratio_high=2.5)
    batch, metrics = assigned(rows((5,) * 5, OLD, SAMPLED), train_infer_correction=rule, **DECOUPLED)
    assert batch.loss_mask[batch.action_mask].tolist() == [True, False, True, True, True]  # e is above 2.5
    assert batch.importance_weights.tolist() == [1.0] * len(batch.token_ids)
    # Weights 1, 0, 2, 0.5, 1: 4.5^2 / (5 * 6.25)
    assert metrics["mismatch/ess"] == pytest.approx(4.5**2 / (5 * 6.25))


def test_icepop_goes_with_decoupled_ppo_too():
    rule = TrainInferCorrection(importance_upper=None, ratio_high=2.5, rejection="icepop")
    batch, _ = assigned(rows((5,) * 5, OLD, SAMPLED), train_infer_correction=rule, **DECOUPLED)
    assert batch.loss_mask[batch.action_mask].all()
    assert batch.importance_weights[batch.action_mask].tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]  # e is above 2.5


# --- segments ---------------------------------------------------------------------------------------------------------


def test_a_response_that_new_weights_went_on_with_is_two_segments():
    # Row 1: versions 4, 4, 5, ratios 1, e, 2: pieces sqrt(e) and 2. Row 2: version 5 alone, sqrt(0.5 * 1).
    rule = TrainInferCorrection(level="segment", importance_upper=9.0)
    batch, _ = assigned(rows((4, 4, 5, 5, 5), OLD, SAMPLED), train_infer_correction=rule)
    half, root = math.sqrt(0.5), math.sqrt(math.e)
    assert batch.importance_weights[batch.action_mask].tolist() == pytest.approx([root, root, 2.0, half, half])


def test_a_filter_by_segment_drops_the_stale_piece_and_keeps_the_fresh_one():
    rule = TrainInferCorrection(level="segment", importance_upper=None, ratio_high=1.5)
    rollouts = rows((4, 4, 5, 5, 5), [-1.0, -1.0, -2.0, -2.0, -2.0], SAMPLED)
    batch, metrics = assigned(rollouts, train_infer_correction=rule)
    assert batch.loss_mask[batch.action_mask].tolist() == [False, False, True, True, True]
    assert metrics["mismatch/rejected_share"] == pytest.approx(2 / 5)
    assert metrics["mismatch/ess"] == pytest.approx(3 / 5)  # three equal weights and two of 0


# --- once -------------------------------------------------------------------------------------------------------------


def draw(seed, n):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_rows(seed, lengths):
    """Responses of these lengths with random versions from 3 to 5 and random log-probs."""
    made = make_rollouts([R(float(i), n) for i, n in enumerate(lengths)])
    generator, count = torch.Generator().manual_seed(seed), sum(lengths)
    made = with_versions(made, *torch.randint(3, 6, (count,), generator=generator).tolist())
    columns = {
        name: on_actions(made, *(-1 + 0.6 * draw(seed + i, count)).tolist())
        for i, name in enumerate(("old_logprobs", "sampling_logprobs"), 1)
    }
    return replace(made, batch=made.batch.with_columns(**columns))


def slopes(config, batch, seed, parts=None, order=None):
    """Gradient of the actor's loss by action token, over micro-batches of these rows."""
    logprobs = (-1 + 0.6 * draw(seed + 9, len(batch.token_ids))).requires_grad_()
    whole = TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, logprobs=logprobs)
    shown = batch if order is None else batch.select(order)
    loss_fn, total = actor_loss(config), torch.zeros((), dtype=torch.float64)
    for part in parts or [range(len(batch))]:
        piece = shown.select(part)
        total = total + loss_fn.compute(whole.reorder(shown.row_ids).select(part), piece, denominators(shown)).loss
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.detach(), gradient[batch.action_mask]


SHAPES = st.lists(st.integers(1, 4), min_size=2, max_size=5)


@given(seed=st.integers(0, 10_000), lengths=SHAPES, cap=st.sampled_from([0.7, 1.3, 5.0]))
@QUICK
def test_decoupled_ppo_is_ppo_with_a_token_weight_and_equals_a_loop(seed, lengths, cap):
    rollouts = drawn_rows(seed, lengths)
    weight = TrainInferCorrection(level="token", importance_upper=cap)
    decoupled = make_config(async_generation_ratio=2.0, decoupled_ppo_cap=cap, **DECOUPLED)
    weighted = make_config(async_generation_ratio=2.0, train_infer_correction=weight)
    found = []
    for config in (decoupled, weighted):
        batch = credited_by(credit_stages(config), rollouts, step=STEP)[0].batch
        found.append(slopes(config, batch, seed))
    assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)  # columns are float32
    logprobs = -1 + 0.6 * draw(seed + 9, len(batch.token_ids))
    columns = batch.old_logprobs, batch.sampling_logprobs, batch.advantages
    acting, n = batch.action_mask.nonzero()[:, 0].tolist(), sum(lengths)
    for t, slope in zip(acting, found[0][1].tolist(), strict=True):
        old, sampled, a = (float(column[t]) for column in columns)
        ratio, w = math.exp(float(logprobs[t]) - old), min(math.exp(old - sampled), cap)
        outside = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)
        assert slope == pytest.approx(0.0 if outside else -w * a * ratio / n, rel=1e-5, abs=1e-9)


LEVELS = st.sampled_from(["token", "segment", "geometric", "sequence"])


@given(seed=st.integers(0, 10_000), lengths=SHAPES, level=LEVELS, decoupled=st.booleans())
@QUICK
def test_order_and_micro_batches_change_no_gradient_of_a_corrected_batch(seed, lengths, level, decoupled):
    upper = None if decoupled else 3.0
    rule = TrainInferCorrection(level=level, importance_upper=upper, ratio_high=4.0, difference_low=-0.9)
    keys = {"policy_loss": "decoupled_ppo" if decoupled else "ppo", "train_infer_correction": rule}
    config, rollouts = make_config(async_generation_ratio=2.0, **keys), drawn_rows(seed, lengths)
    found, metrics = credited_by(credit_stages(config), rollouts, step=STEP)
    batch = found.batch
    loss, gradient = slopes(config, batch, seed)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = replace(
        rollouts,
        batch=rollouts.batch.select(order),
        trajectories=tuple(rollouts.trajectories[i] for i in order),
        group_index=rollouts.group_index[order],
    )
    again, other = credited_by(credit_stages(config), shuffled, step=STEP)
    for name in ("importance_weights", "loss_mask", "advantages"):
        assert torch.equal(getattr(again.batch.reorder(batch.row_ids), name), getattr(batch, name))
    # Sums of signed float32 numbers that nearly cancel: a few 1e-8 depend on the order.
    assert other.result() == pytest.approx(metrics.result(), rel=1e-6, abs=1e-7)
    middle = len(batch) // 2
    for parts in ([[i] for i in range(len(batch))], [range(middle, len(batch)), range(middle)]):
        assert_close(slopes(config, batch, seed, parts, order), (loss, gradient), rtol=0, atol=1e-10)
    assert denominators(batch).tokens == denominators_of(batch.pad("loss_mask", False)).tokens


# --- in the loop ------------------------------------------------------------------------------------------------------


def test_decoupled_ppo_has_both_policies_in_every_mini_batch_and_pass(tiny_model, tmp_path):
    halves = "actor_train.training_args.per_device_train_batch_size=2"
    run = run_small(tmp_path, tiny_model, "policy_loss=decoupled_ppo", "ppo_epochs=2", halves)
    assert [len(batch) for _, batch in run.trained] == [2] * 4
    first: dict[str, torch.Tensor] = {}
    for _, batch in run.trained:
        for i, name in enumerate(batch.row_ids):
            found = torch.stack([batch.row("sampling_logprobs", i), batch.row("old_logprobs", i)])
            assert torch.equal(found, first.setdefault(name, found))
            assert found.abs().max() > 0.1
    # One pass over the four responses before the update, without gradients; its log-probs are the engine's.
    assert sum(rows for _, gradient, rows, _ in run.passes if not gradient) == 4
    assert run.last["actor/behave_weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert run.last["mismatch/weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert run.last["mismatch/ess"] == pytest.approx(1.0, abs=1e-4)
    assert run.last["actor/ratio_max"] > 1.001  # against the policy before the step, not against this pass
