"""Mistakes that released systems made, one by one, at the level of functions.

The numbers are those of the list in docs/algorithms.md. 11 (schedule counts optimiser steps) lives with the strategies,
15 (toys) in test_algorithms_toy.py; 7, 8, 10, 12 and 13 are repeated at the level of the pipeline.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_index, draw_mask, reference_gae
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from whole_batch import aggregate_whole, denominators_of, policy_loss, token_rewards

from roll.algorithms.advantages import AdvantageInputs, compute_advantages, dr_grpo, gae, grpo, rloo
from roll.algorithms.aggregation import aggregate
from roll.algorithms.corrections import Filter, correct
from roll.algorithms.gigpo import StepInputs
from roll.algorithms.groups import index_of
from roll.algorithms.kl import kl_divergence
from roll.algorithms.losses import PolicyLossInputs
from roll.algorithms.normalization import RunningMoments, normalize_rewards
from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.catalog.loss_table import LOSSES
from roll.strategies.training.logits import logprobs_and_entropy
from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.ragged import RowMismatch
from roll.utils.partition import pack_first_fit_decreasing, partition_balanced

QUICK = settings(max_examples=20, deadline=None, derandomize=True)


@given(seed=SEEDS)
@QUICK
def test_1_random_critic_outputs_on_padding_change_nothing(seed):
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0, 5:], mask[1, 2:], mask[2, :] = False, False, False
    rewards, values = draw(seed, 3, 8), draw(seed + 1, 3, 8)
    first = gae(rewards, values, mask, gamma=0.97, lam=0.9)
    other = torch.where(mask, values, draw(seed + 2, 3, 8, scale=100.0))
    second = gae(rewards, other, mask, gamma=0.97, lam=0.9)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert_close(first[0], reference_gae(rewards, values, mask, 0.97, 0.9)[0])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_1_an_observation_in_the_middle_equals_the_same_actions_without_it(gamma):
    rewards, values = torch.tensor([[0.0, 7.0, 7.0, 0.5, 1.0]]), torch.tensor([[0.5, 9.0, -9.0, 0.4, 0.2]])
    mask = torch.tensor([[True, False, False, True, True]])
    plain, plain_returns = gae(rewards[mask][None], values[mask][None], torch.ones(1, 3), gamma=gamma, lam=0.5)
    gap, gap_returns = gae(rewards, values, mask, gamma=gamma, lam=0.5)
    assert torch.equal(gap[mask][None], plain)
    assert torch.equal(gap_returns[mask][None], plain_returns)


def test_2_token_mean_is_over_masked_tokens():
    loss, mask = torch.tensor([[1.0, 100.0], [1.0, -50.0]]), torch.tensor([[1, 0], [1, 0]])
    assert float(aggregate_whole(loss, mask, mode="token-mean")) == 1.0


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_3_a_group_of_one_has_advantage_zero(estimator):
    assert torch.equal(estimator(torch.tensor([5.0]), torch.tensor([3])), torch.zeros(1))
    mixed = estimator(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([3, 4, 4]))
    assert float(mixed[0]) == 0
    assert float(mixed[1]) == -float(mixed[2]) > 0


@pytest.mark.parametrize(("mean", "std"), list(itertools.product(["batch", "group", "running", None], repeat=2)))
def test_3_every_mix_of_mean_and_std_gives_one_number_per_row(mean, std):
    rewards, index = torch.tensor([1.0, 0.0, 3.0, 1.0, 9.0]), torch.tensor([0, 0, 1, 1, 2])
    running = RunningMoments().update(rewards)
    found = normalize_rewards(rewards, index, mean=mean, std=std, running=running)
    assert found.shape == (5,)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("x", [5.0, 30.0, 95.0, -95.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_4_low_var_kl_is_finite_with_the_right_sign(x, dtype):
    logp = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True)
    value = kl_divergence(logp, torch.tensor([[-1.0 + x]], dtype=dtype), torch.ones(1, 1), kind="low_var_kl")
    value.sum().backward()
    clamped = max(min(x, 10.0), -10.0)
    assert float(value.detach()) == pytest.approx(math.exp(clamped) - 1 - clamped, rel=1e-5)
    assert float(logp.grad) == pytest.approx(1 - math.exp(clamped), rel=1e-5)


def test_5_full_kl_sums_over_the_vocabulary_not_the_sequence():
    logits, ref = draw(0, 2, 3, 11), draw(1, 2, 3, 11)
    assert kl_divergence(logits, ref, torch.ones(2, 3), kind="full").shape == (2, 3)


def flat_batch(lengths, seed=0, dtype=torch.float64, **columns):
    total = sum(lengths)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    return TokenBatch(
        row_ids=tuple(f"t{i // 2}#{i % 2}" for i in range(len(lengths))),
        group_ids=tuple(f"t{i // 2}" for i in range(len(lengths))),
        offsets=offsets,
        token_ids=torch.randint(9, (total,), generator=torch.Generator().manual_seed(seed)),
        action_mask=draw_mask(seed, 1, total)[0],
        old_logprobs=draw(seed + 3, total, dtype=dtype),
        advantages=draw(seed + 4, total, dtype=dtype),
        **columns,
    )


def parts_of(batch, kind, seed):
    rows = len(batch)
    costs = [float(n) for n in batch.lengths]
    if kind == "rows":
        return [[i] for i in range(rows)]
    if kind == "ranks":
        return [part for part in partition_balanced(costs, 3) if part]
    if kind == "packs":
        return pack_first_fit_decreasing(costs, 9.0)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[: rows // 2], order[rows // 2 :]]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@given(
    seed=SEEDS,
    lengths=st.lists(st.integers(1, 7), min_size=2, max_size=8),
    name=st.sampled_from(sorted(LOSSES)),
    kind=st.sampled_from(["rows", "ranks", "packs", "shuffled halves"]),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_6_any_split_trains_alike(mode, dtype, tolerance, seed, lengths, name, kind):
    batch = flat_batch(lengths, seed, dtype)
    weights = draw(seed, 9, dtype=dtype).requires_grad_()
    sizes = denominators_of(batch.pad("action_mask", False))

    def share(piece):
        logprobs = weights.log_softmax(0)[piece.token_ids]
        outputs = TokenOutputs(row_ids=piece.row_ids, offsets=piece.offsets, logprobs=logprobs)
        inputs = PolicyLossInputs(
            logprobs=outputs.pad("logprobs"),
            old_logprobs=piece.pad("old_logprobs", math.nan),  # whatever the padding holds
            advantages=piece.pad("advantages", math.nan),
            mask=piece.pad("action_mask", False),
            rollout_logprobs=piece.pad("old_logprobs", math.inf),
        )
        return aggregate(policy_loss(name, inputs).loss, inputs.mask, sizes, mode=mode, norm_length=7.0)

    whole = share(batch)
    (slope,) = torch.autograd.grad(whole, weights)
    total = sum(share(batch.select(part)) for part in parts_of(batch, kind, seed))
    (split_slope,) = torch.autograd.grad(total, weights)
    scale = max(1.0, float(slope.abs().max()))
    assert_close(total, whole, atol=tolerance * scale, rtol=tolerance)
    assert_close(split_slope, slope, atol=tolerance * scale, rtol=tolerance)


def test_7_a_shuffled_batch_trains_exactly_like_the_unshuffled_one():
    batch = flat_batch([3, 1, 4, 2])
    scored = TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, logprobs=draw(7, 10), values=draw(8, 10))
    shuffled = scored.select([2, 0, 3, 1])
    plain = batch.join(scored, ref_logprobs="logprobs", values="values")
    joined = batch.join(shuffled, ref_logprobs="logprobs", values="values")
    assert torch.equal(joined.ref_logprobs, plain.ref_logprobs)
    assert torch.equal(joined.values, plain.values)
    renamed = dataclasses.replace(shuffled, row_ids=("a", "b", "c", "d"))
    with pytest.raises(RowMismatch, match="absent"):
        batch.join(renamed, values="values")


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_8_a_reward_that_failed_never_passes_for_a_number(broken):
    rewards, mask = torch.tensor([1.0, broken]), torch.ones(2, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"rows \[1\] are not finite"):
        AdvantageInputs(
            rewards=rewards, token_rewards=torch.zeros(2, 1), action_mask=mask, group_index=torch.tensor([0, 0])
        )


def test_9_a_rejected_token_leaves_numerator_and_denominator():
    # log-ratios 0, 0, 3: the last token is rejected; losses 1, 2, 30 -> (1 + 2) / 2
    train, infer = torch.tensor([[0.0, 0.0, 3.0]]), torch.zeros(1, 3)
    mask = torch.ones(1, 3, dtype=torch.bool)
    keep = correct(train, infer, mask, filters=(Filter("token", 0.5, 2.0),)).keep
    loss = torch.tensor([[1.0, 2.0, 30.0]])
    assert float(aggregate(loss, keep, denominators_of(keep), mode="token-mean")) == 1.5


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(seed=SEEDS)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_10_advantages_do_not_depend_on_the_order_of_arrival(name, seed):
    rows, width = 8, 4
    mask = draw_mask(seed, rows, width)
    rewards = draw(seed, rows, dtype=torch.float32)
    groups = [f"task{int(g)}" for g in draw_index(seed, rows, 3)]
    values, greedy = draw(seed + 1, rows, width, dtype=torch.float32), draw(seed + 2, rows, dtype=torch.float32)
    gradients = draw(seed + 5, rows, width, dtype=torch.float32).abs()
    turn_rewards = draw(seed + 3, rows, width, dtype=torch.float32)
    states = draw_index(seed + 4, rows * width, 3).reshape(rows, width)

    def run(order):
        return compute_advantages(
            name,
            AdvantageInputs(
                rewards=rewards[order],
                token_rewards=token_rewards(rewards, mask)[order],
                action_mask=mask[order],
                group_index=index_of([groups[i] for i in order]),
                gamma=0.9,
                lam=0.9,
                values=values[order],
                greedy_rewards=greedy[order],
                logit_gradients=gradients[order],
                steps=StepInputs(
                    turn_index=torch.arange(width).expand(rows, width),
                    turn_rewards=turn_rewards[order],
                    state_index=states[order],
                ),
            ),
        )[0]

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    assert_close(run(order), run(list(range(rows)))[order], rtol=1e-6, atol=1e-6)


def test_12_the_trainers_logprobs_use_the_sampling_temperature():
    # logits 0, log 3 at temperature 0.5: p(second) = 9 / 10, not 3 / 4
    logits = torch.tensor([[0.0, math.log(3.0)]])
    found, _ = logprobs_and_entropy(logits, torch.tensor([1]), temperature=0.5)
    assert float(found.exp()) == pytest.approx(0.9)


def test_12_truncated_sampling_shows_up_as_a_mismatch_and_is_corrected():
    # top-k 2 of p = (0.5, 0.3, 0.2) samples from (0.625, 0.375): ratios 0.8, so weights 0.8
    full, sampled = torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.625, 0.375]]).log()
    found = correct(full, sampled, torch.ones(1, 2), weight_level="token")
    assert_close(found.weights, torch.tensor([[0.8, 0.8]]))
    assert found.metrics.result()["mismatch/kl"] > 0


def test_13_a_failed_member_leaves_the_mean_of_its_group_to_the_survivors():
    # group 0: 1, 0 and a failure, which has no row -> mean 0.5, not 1/3. (Who survives: the scheduler's tests.)
    assert_close(dr_grpo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])), torch.tensor([0.5, -0.5]))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_14_a_duplicated_padding_row_has_no_weight(mode):
    loss, mask = draw(0, 3, 4).requires_grad_(), draw_mask(3, 3, 4)
    filled, filled_mask = torch.cat([loss, loss[:1]]), torch.cat([mask, mask[:1]])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0])
    plain = aggregate_whole(loss, mask, mode=mode)
    padded = aggregate_whole(filled, filled_mask, mode=mode, row_weights=weights)
    assert_close(padded, plain)
    assert_close(torch.autograd.grad(padded, loss)[0], torch.autograd.grad(plain, loss)[0])
