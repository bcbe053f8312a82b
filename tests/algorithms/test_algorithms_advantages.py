"""Advantage estimators against numbers worked by hand, loops in float64, and properties."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_index, draw_mask, poison, reference_gae, reference_grouped
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from whole_batch import token_rewards

from roll.algorithms.advantages import (
    AdvantageInputs,
    best_of_n,
    compute_advantages,
    dr_grpo,
    gae,
    gdpo,
    gpg,
    grpo,
    opo,
    optimal_token_baseline,
    pass_at_k,
    reinforce_plus_plus_baseline,
    reinforce_return,
    rloo,
    rloo_std,
)
from roll.algorithms.gigpo import StepInputs
from roll.configs.catalog.estimator_table import ESTIMATORS

QUICK = settings(max_examples=30, deadline=None, derandomize=True)


def make_inputs(seed=0, rows=6, width=5, groups=2, dtype=torch.float32, **changes):
    mask = draw_mask(seed, rows, width)
    mask[:, 0] = True
    rewards = draw(seed, rows, dtype=dtype)
    turns = torch.arange(width).expand(rows, width)
    given_inputs = {
        "rewards": rewards,
        "token_rewards": token_rewards(rewards, mask),
        "action_mask": mask,
        "group_index": draw_index(seed, rows, groups),
        "gamma": 0.9,
        "lam": 0.8,
        "values": draw(seed + 5, rows, width, dtype=dtype),
        "greedy_rewards": draw(seed + 6, rows, dtype=dtype),
        "logit_gradients": draw(seed + 9, *changes.get("action_mask", mask).shape, dtype=dtype).abs(),
        "steps": StepInputs(
            turn_index=turns,
            turn_rewards=draw(seed + 7, rows, width, dtype=dtype),
            state_index=draw_index(seed + 8, rows * width, 3).reshape(rows, width),
        ),
    }
    return AdvantageInputs(**{**given_inputs, **changes})


# ---- Optimal token baseline ----------------------------------------------------------------------------


def test_the_optimal_token_baseline_matches_hand_computed_values():
    # One prompt: a response of 3 tokens with return 1, one of 2 with return 0 (a masked reply in its middle), and a
    # response to another prompt. Gradients so far: 1/2, 1, 2 and 1, 3/2.
    returns = torch.tensor([[1.0, 1.0, 1.0], [0.0, 9.0, 0.0], [5.0, 5.0, 0.0]])
    gradients = torch.tensor([[0.5, 0.5, 1.0], [1.0, 9.0, 0.5], [1.0, 1.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0]])
    index = torch.tensor([4, 4, 2])
    found = optimal_token_baseline(returns, gradients, mask, index)
    # Baselines: 1/2 / (1/2 + 1) = 1/3; 1 / (1 + 3/2) = 2/5; alone: its own return.
    assert_close(found, torch.tensor([[2 / 3, 3 / 5, 0.0], [-1 / 3, 0.0, -2 / 5], [0.0, 0.0, 0.0]]))
    tail = optimal_token_baseline(returns, gradients, mask, index, handle_zero_tail=True)
    assert_close(tail, torch.tensor([[2 / 3, 3 / 5, 1.0], [-1 / 3, 0.0, -2 / 5], [5.0, 5.0, 0.0]]))


def test_equal_returns_and_certain_tokens_have_a_plain_baseline():
    mask, index = torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)
    same = torch.full((3, 2), 0.1)
    assert not optimal_token_baseline(same, draw(1, 3, 2).abs(), mask, index).any(), "exactly 0"
    returns = torch.tensor([[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]])
    found = optimal_token_baseline(returns, torch.zeros(3, 2), mask, index)  # no gradient at all: the mean
    assert_close(found, returns - 1.0)


@given(seed=SEEDS)
@QUICK
def test_the_optimal_token_baseline_leaves_the_least_weighted_variance(seed):
    # B is the minimum of sum_i W_t^i (G_t^i - b)^2 over b, at every place, in any order of the rows.
    returns, gradients = draw(seed, 4, 3).double(), draw(seed + 1, 4, 3).abs().double() + 0.1
    mask, index = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    found = optimal_token_baseline(returns, gradients, mask, index)
    weight = gradients.cumsum(1)
    assert_close((weight * found).sum(0), torch.zeros(3, dtype=torch.float64))
    order = torch.tensor([2, 0, 3, 1])
    assert_close(optimal_token_baseline(returns[order], gradients[order], mask, index), found[order])


# ---- GAE and reward-to-go ------------------------------------------------------------------------------


def test_gae_matches_hand_computed_values():
    # gamma = 1, lam = 0.5, reward 1 on the last token, terminal after it:
    #   A2 = 1 - 0.2                 = 0.8
    #   A1 = (0.2 - 0.4) + 0.5 * 0.8 = 0.2
    #   A0 = (0.4 - 0.5) + 0.5 * 0.2 = 0.0
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.2]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=0.5)
    assert_close(advantages, torch.tensor([[0.0, 0.2, 0.8]]))
    assert_close(returns, torch.tensor([[0.5, 0.6, 1.0]]))


def test_gae_with_a_discount_matches_hand_computed_values():
    # gamma = 0.9, lam = 1: A0 = r0 + 0.9 r1 - V0 = 1 + 1.8 - 0.5 = 2.3, A1 = 2 - 0.25 = 1.75
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.25]])
    advantages, returns = gae(rewards, values, torch.ones(1, 2, dtype=torch.bool), gamma=0.9, lam=1.0)
    assert_close(advantages, torch.tensor([[2.3, 1.75]]))
    assert_close(returns, torch.tensor([[2.8, 2.0]]))


@given(SEEDS, st.integers(0, 4), st.integers(0, 7), st.floats(0, 1), st.floats(0, 1))
@QUICK
def test_gae_equals_the_sum_of_its_definition(seed, rows, width, gamma, lam):
    rewards, values, mask = draw(seed, rows, width), draw(seed + 9, rows, width), draw_mask(seed, rows, width)
    expected = reference_gae(rewards, values, mask, gamma, lam)
    for junk in (7.0, math.nan, -math.inf):
        found = gae(poison(rewards, mask, junk), poison(values, mask, junk), mask, gamma=gamma, lam=lam)
        assert_close(found[0], expected[0])
        assert_close(found[1], expected[1])


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
def test_gae_equals_a_loop_across_chunks_and_gaps(width, gamma, lam):
    rewards, values = draw(1, 3, width), draw(2, 3, width)
    mask = draw_mask(3, 3, width, share=0.8)
    mask[2, width // 4 :] = False
    expected = reference_gae(rewards, values, mask, gamma, lam)
    found = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert_close(found, expected, rtol=1e-11, atol=1e-11)
    rounded = gae(rewards.float(), values.float(), mask, gamma=gamma, lam=lam)
    assert rounded[0].dtype == torch.float32
    assert_close(rounded, tuple(x.float() for x in expected), rtol=1e-6, atol=1e-6)


def test_gae_does_not_depend_on_the_width_of_the_batch():
    rewards, values, mask = draw(1, 2, 70), draw(2, 2, 70), draw_mask(3, 2, 70)
    wide = [torch.nn.functional.pad(x, (0, 90)) for x in (rewards, values, mask)]
    narrow, padded = gae(rewards, values, mask, gamma=0.99, lam=0.95), gae(*wide, gamma=0.99, lam=0.95)
    assert torch.equal(padded[0][:, :70], narrow[0])


def test_gae_does_not_change_its_arguments():
    rewards, values, mask = draw(0, 2, 3), draw(1, 2, 3), torch.tensor([[True, False, True], [False] * 3])
    before = rewards.clone(), values.clone(), mask.clone()
    gae(rewards, values, mask, gamma=0.9, lam=0.9)
    for old, new in zip(before, (rewards, values, mask), strict=True):
        assert torch.equal(old, new)


def test_reward_to_go_matches_hand_computed_values():
    # gamma = 0.5, the masked middle token is stepped over without a discount:
    #   G3 = 4, G2 = 2 + 0.5 * 4 = 4, G0 = 1 + 0.5 * 4 = 3
    mask = torch.tensor([[True, False, True, True]])
    returns = reinforce_return(torch.tensor([[1.0, 99.0, 2.0, 4.0]]), mask, gamma=0.5)
    assert_close(returns, torch.tensor([[3.0, 0.0, 4.0, 4.0]]))


def test_half_precision_rewards_are_computed_in_float32():
    mask = torch.ones(1, 300, dtype=torch.bool)
    returns = reinforce_return(torch.full((1, 300), 1.0, dtype=torch.bfloat16), mask, gamma=1.0)
    assert returns.dtype == torch.float32
    assert returns[0, 0] == 300  # bfloat16 can't count beyond 256


# ---- group-relative estimators -------------------------------------------------------------------------

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 3.0])
INDEX = torch.tensor([0, 0, 0, 0, 1, 2])


def test_grpo_matches_hand_computed_values():
    # mean 0.5, unbiased variance 4 * 0.25 / 3 = 1/3, std 0.57735: +-0.5 / 0.57735 = +-0.86602. Groups of one: 0.
    expected = torch.tensor([0.86602, -0.86602, -0.86602, 0.86602, 0.0, 0.0])
    assert_close(grpo(REWARDS, INDEX), expected, atol=1e-5, rtol=0)


def test_dr_grpo_matches_hand_computed_values():
    assert_close(dr_grpo(REWARDS, INDEX), torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0, 0.0]))


def test_rloo_matches_hand_computed_values():
    # right: 1 - (0 + 0 + 1)/3 = 2/3; wrong: 0 - (1 + 0 + 1)/3 = -2/3
    expected = torch.tensor([2.0, -2.0, -2.0, 2.0, 0.0, 0.0]) / 3
    assert_close(rloo(REWARDS, INDEX), expected)


def test_rloo_std_matches_hand_computed_values():
    # 0 2 4: the others of 0 are 2 4, mean 3, variance 2: -3 / sqrt(2); of 2 are 0 4, mean 2; of 4 are 0 2, mean 1.
    # 1 0 0: the others of 1 have no spread: 1 - 0; of a 0 are 1 0, mean 1/2, variance 1/2: -(1/2) / sqrt(1/2).
    # 3 1: one other each, no spread: 2 and -2. 5 alone, and 7 7: nothing to compare.
    rewards = torch.tensor([0.0, 2.0, 4.0, 1.0, 0.0, 0.0, 3.0, 1.0, 5.0, 7.0, 7.0])
    index = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 4])
    half = -1 / math.sqrt(2)
    expected = torch.tensor([3 * half, 0.0, -3 * half, 1.0, half, half, 2.0, -2.0, 0.0, 0.0, 0.0])
    assert_close(rloo_std(rewards, index, eps=0.0), expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(SEEDS)
def test_rloo_std_is_the_definition_in_any_order(seed):
    rewards, index = draw(seed, 9).double().round(decimals=1), draw_index(seed, 9, 3)
    expected = torch.zeros(9, dtype=torch.float64)
    for i in range(9):
        others = rewards[(index == index[i]) & (torch.arange(9) != i)]
        spread = others.std() if len(others) > 1 and others.min() < others.max() else None
        if len(others):
            expected[i] = (rewards[i] - others.mean()) / (1.0 if spread is None else spread + 1e-6)
    found = rloo_std(rewards, index)
    assert_close(found, expected, rtol=1e-9, atol=1e-9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(rloo_std(rewards[order], index[order]), found[order])


def test_gdpo_matches_hand_computed_values():
    # One group of 3; part 1: 1 0 0, part 2 (weight 2): 0 0 10. Each over its own spread: mean 1/3, std 1/sqrt(3):
    # (2/3, -1/3, -1/3) sqrt(3); likewise 2 x (-1/3, -1/3, 2/3) sqrt(3). Sum sqrt(3) (0, -1, 1): mean 0, std sqrt(3).
    parts = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 10.0]])
    weights = torch.tensor([[1.0, 2.0]]).expand(3, 2)
    found = gdpo(parts, weights, torch.zeros(3, dtype=torch.int64), eps=0.0)
    assert_close(found, torch.tensor([0.0, -1.0, 1.0]))
    # The scale of a part says nothing: that is what the sum's own spread would go by.
    assert_close(gdpo(parts * torch.tensor([1.0, 100.0]), weights, torch.zeros(3, dtype=torch.int64), eps=0.0), found)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(SEEDS)
def test_gdpo_is_the_definition(seed):
    parts, index = draw(seed, 8, 3).double().round(decimals=1), draw_index(seed, 8, 3)
    weights = draw(seed + 1, 8, 3).double().abs()
    total = sum(weights[:, k] * reference_grouped(parts[:, k], index, "grpo") for k in range(3))
    expected = (total - total.mean()) / (total.std() + 1e-6)
    assert_close(gdpo(parts, weights, index), expected, rtol=1e-9, atol=1e-9)


def test_gdpo_of_one_response_or_none_that_differ_is_zero():
    assert not gdpo(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)).any()
    assert not gdpo(torch.ones(4, 2), torch.ones(4, 2), torch.tensor([0, 0, 1, 1])).any()


def test_best_of_n_takes_the_best_alone_and_shares_ties():
    rewards = torch.tensor([1.0, 3.0, 2.0, 5.0, 5.0, 0.0, 4.0, 4.0])
    index = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    assert best_of_n(rewards, index).tolist() == [0.0, 1.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert best_of_n(rewards[:0], index[:0]).tolist() == []


def test_pass_at_k_matches_hand_computed_values():
    # N = 4, one right, k = 2: of 6 pairs 3 have no right one, R = 1/2, s = 1/2. Right: (1/2) / (1/2) = 1. Wrong: of the
    # 3 pairs with it 2 are without a right one: (1/2 - 2/3) / (1/2) = -1/3. The second group is all right: 0.
    rewards, index = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    assert_close(pass_at_k(rewards, index, k=2), torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3, 0.0, 0.0]))
    # k = 1: (r - mean) / sqrt(mean (1 - mean)), mean 1/4
    spread = math.sqrt(3) / 4
    assert_close(pass_at_k(rewards, index, k=1)[:2], torch.tensor([0.75 / spread, -0.25 / spread]))
    # three right of four: two always have one
    assert not pass_at_k(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64), k=2).any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7), st.integers(1, 8))
def test_pass_at_k_is_the_advantage_over_all_draws(answers, k):
    """Over every set of k responses: what it is worth, on average over the sets that a response is in."""
    draws = list(itertools.combinations(range(len(answers)), min(k, len(answers))))
    worth = [max(answers[i] for i in draw) for draw in draws]
    mean = math.fsum(worth) / len(worth)
    spread = math.sqrt(mean * (1 - mean))
    expected = []
    for i in range(len(answers)):
        own = [value for draw, value in zip(draws, worth, strict=True) if i in draw]
        expected.append((math.fsum(own) / len(own) - mean) / spread if spread else 0.0)
    found = pass_at_k(torch.tensor(answers, dtype=torch.float64), torch.zeros(len(answers), dtype=torch.int64), k=k)
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert abs(float(found.sum())) < 1e-9


def test_vapo_takes_lambda_by_length_for_the_policy_and_its_own_for_the_critic():
    # alpha 0.5: a row of 4 tokens has lambda 1 - 1 / 2 = 0.5, one of 2 has 0: only the next value counts.
    # Row 1: r = 0 0 0 1, V = 0: A_t = 0.5^(3 - t). Row 2: r = 0 1, V = 0.25: A = (0.25 - 0.25, 1 - 0.25).
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 9.0, 9.0]])
    values = torch.tensor([[0.0] * 4, [0.25, 0.25, 9.0, 9.0]])
    inputs = AdvantageInputs(
        rewards=torch.ones(2), token_rewards=rewards, action_mask=mask, group_index=torch.tensor([0, 1]), values=values
    )
    advantages, returns, _ = compute_advantages("vapo", inputs, {"alpha": 0.5})
    assert_close(advantages, torch.tensor([[0.125, 0.25, 0.5, 1.0], [0.0, 0.75, 0.0, 0.0]]))
    assert_close(returns, torch.tensor([[1.0] * 4, [1.0, 1.0, 0.0, 0.0]]))  # critic_lam 1: the reward itself
    _, returns, _ = compute_advantages("vapo", inputs, {"alpha": 0.5, "critic_lam": 0.0})
    assert_close(returns, torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.25, 1.0, 0.0, 0.0]]))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(SEEDS)
def test_vapo_equals_gae_row_by_row(seed):
    inputs = make_inputs(seed=seed, dtype=torch.float64)
    advantages, returns, _ = compute_advantages("vapo", inputs, {"gamma": 0.9, "alpha": 0.3, "critic_lam": 0.7})
    rewards, values, mask = inputs.token_rewards, inputs.values, inputs.action_mask
    for row in range(len(mask)):
        length = int(mask[row].sum())
        lam = max(0.0, 1 - 1 / (0.3 * length)) if length else 0.0
        one = slice(row, row + 1)
        assert_close(advantages[one], reference_gae(rewards[one], values[one], mask[one], 0.9, lam)[0])
    assert_close(returns, reference_gae(rewards, values, mask, 0.9, 0.7)[1])


def test_opo_matches_hand_computed_values():
    # baseline (10*1 + 20*0 + 30*0 + 40*1) / 100 = 0.5; with lengths 10, 0, 0, 30 it is 1
    lengths = torch.tensor([10, 20, 30, 40, 5, 5])
    assert_close(opo(REWARDS, lengths, INDEX), torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0, 0.0]))
    lengths = torch.tensor([10, 0, 0, 30, 5, 5])
    assert_close(opo(REWARDS, lengths, INDEX), torch.tensor([0.0, -1.0, -1.0, 0.0, 0.0, 0.0]))


def test_opo_falls_back_to_the_mean_when_all_responses_are_empty():
    assert_close(opo(REWARDS, torch.zeros(6, dtype=torch.int64), INDEX), dr_grpo(REWARDS, INDEX))


def test_gpg_makes_up_for_groups_without_signal():
    # 6 rows, 4 of them in a group with signal: alpha = 1.5
    assert_close(gpg(REWARDS, INDEX), torch.tensor([0.75, -0.75, -0.75, 0.75, 0.0, 0.0]))
    assert_close(gpg(torch.ones(4), torch.zeros(4, dtype=torch.int64)), torch.zeros(4))


def test_remax_subtracts_the_greedy_reward():
    # Rewards 1 and 0 on the last tokens, a KL cost of 0.1 on the first token of row 1; greedy rewards 0.25:
    # returns 0.9, 1 | 0, minus 0.25
    mask = torch.tensor([[True, True], [True, False]])
    advantages, returns, _ = compute_advantages(
        "remax",
        AdvantageInputs(
            rewards=torch.tensor([1.0, 0.0]),
            token_rewards=torch.tensor([[-0.1, 1.0], [0.0, 9.0]]),
            action_mask=mask,
            group_index=torch.tensor([0, 0]),
            greedy_rewards=torch.tensor([0.25, 0.25]),
        ),
    )
    assert_close(returns, torch.tensor([[0.9, 1.0], [0.0, 0.0]]))
    assert_close(advantages, torch.tensor([[0.65, 0.75], [-0.25, 0.0]]))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "opo", "gpg"])
@given(seed=SEEDS, rows=st.integers(0, 12), groups=st.integers(1, 5))
@QUICK
def test_group_estimators_equal_a_loop(kind, seed, rows, groups):
    rewards, index = draw(seed, rows), draw_index(seed, rows, groups)
    lengths = torch.randint(0, 9, (rows,), generator=torch.Generator().manual_seed(seed))
    found = opo(rewards, lengths, index) if kind == "opo" else globals()[kind](rewards, index)
    assert_close(found, reference_grouped(rewards, index, kind, lengths))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@given(seed=SEEDS, rows=st.integers(1, 12), groups=st.integers(1, 4), shift=st.floats(-100, 100))
@QUICK
def test_group_estimators_sum_to_zero_and_ignore_a_constant(kind, seed, rows, groups, shift):
    rewards, index = draw(seed, rows), draw_index(seed, rows, groups)
    estimator = globals()[kind]
    found = estimator(rewards, index)
    for group in index.unique():
        assert found[index == group].sum().abs() < 1e-9
    assert_close(estimator(rewards + shift, index), found, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -7.3])
@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, gpg])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_group_without_spread_has_advantage_exactly_zero(value, estimator, dtype):
    for size in (2, 3, 6, 7, 10):  # in float64, (0.1 + 0.1 + 0.1) / 3 isn't 0.1
        rewards = torch.full((size,), value, dtype=torch.float64).to(dtype)
        advantages = estimator(rewards, torch.zeros(size, dtype=torch.int64))
        assert torch.equal(advantages, torch.zeros_like(advantages))
        assert advantages.is_floating_point()


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, gpg])
def test_no_rows_is_fine(estimator):
    assert estimator(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize(("values", "mask"), [((2, 1), (2, 3)), ((2, 3), (3,)), ((3,), (2, 3))])
def test_values_and_masks_are_never_broadcast(values, mask):
    with pytest.raises(ValueError, match="has shape"):
        gae(torch.zeros(2, 3), torch.zeros(values), torch.ones(mask), gamma=1.0, lam=1.0)


def test_a_column_of_rewards_is_refused_instead_of_broadcast():
    with pytest.raises(ValueError, match="shape"):
        grpo(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))


# ---- REINFORCE++ ---------------------------------------------------------------------------------------


def test_reinforce_plus_plus_matches_hand_computed_values():
    # gamma = 1: returns 1, 1 | 3 over the action tokens; mean 5/3, unbiased variance (4/9 + 4/9 + 16/9)/2 = 4/3
    mask = torch.tensor([[True, True], [True, False]])
    rewards = torch.tensor([[0.0, 1.0], [3.0, 50.0]])
    inputs = AdvantageInputs(
        rewards=rewards[:, 0], token_rewards=rewards, action_mask=mask, group_index=torch.tensor([0, 0])
    )
    advantages, returns, _ = compute_advantages("reinforce_plus_plus", inputs)
    assert_close(returns, torch.tensor([[1.0, 1.0], [3.0, 0.0]]))
    std = math.sqrt(4 / 3)
    assert_close(advantages, torch.tensor([[-2 / 3 / std, -2 / 3 / std], [4 / 3 / std, 0.0]]))


def test_reinforce_plus_plus_baseline_matches_hand_computed_values():
    # centred +-0.5 on three tokens each but for lengths 2 and 1: [0.5, 0.5 | -0.5]; mean 1/6, variance 1/3
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    advantages = reinforce_plus_plus_baseline(torch.tensor([1.0, 0.0, 9.0]), mask, torch.tensor([0, 0, 1]))
    std = math.sqrt(1 / 3)
    expected = torch.tensor([[1 / 3 / std, 1 / 3 / std], [-2 / 3 / std, 0.0], [0.0, 0.0]])  # a group of one: 0
    assert_close(advantages, expected)


# ---- the registry --------------------------------------------------------------------------------------

NAMES = sorted(ESTIMATORS)


def test_the_page_has_a_row_for_every_registered_estimator_and_for_no_other():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text("utf-8")
    table = page.split("## Advantage estimators")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_estimator_gives_finite_zero_padded_tokens(name, dtype):
    inputs = make_inputs(dtype=dtype)
    inputs.values.requires_grad_()
    inputs.token_rewards.requires_grad_()
    advantages, returns, metrics = compute_advantages(name, inputs)
    for tensor in (advantages, returns):
        assert tensor.shape == inputs.action_mask.shape
        assert tensor.dtype in (torch.float32, torch.float64)
        assert torch.isfinite(tensor).all()
        assert not tensor[~inputs.action_mask].any()
        assert not tensor.requires_grad
    assert metrics.result()["advantage/zero_signal_share"] == 0.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_junk_under_the_mask_changes_no_estimator(name, junk):
    clean = make_inputs()
    mask = clean.action_mask
    dirty = make_inputs(
        token_rewards=poison(clean.token_rewards, mask, junk),
        values=poison(clean.values, mask, junk),
        steps=StepInputs(
            turn_index=torch.where(mask, clean.steps.turn_index, torch.full_like(clean.steps.turn_index, -100)),
            turn_rewards=clean.steps.turn_rewards,
            state_index=clean.steps.state_index,
        ),
    )
    for found, expected in zip(compute_advantages(name, dirty)[:2], compute_advantages(name, clean)[:2], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 1), (2, 0), (0, 4)])
def test_every_estimator_takes_the_smallest_batches(name, rows, width):
    mask = torch.ones(rows, width, dtype=torch.bool)
    inputs = make_inputs(
        rewards=torch.ones(rows),
        token_rewards=token_rewards(torch.ones(rows), mask),
        action_mask=mask,
        group_index=torch.zeros(rows, dtype=torch.int64),
        values=torch.zeros(rows, width),
        greedy_rewards=torch.zeros(rows),
        steps=StepInputs(
            turn_index=torch.zeros(rows, width, dtype=torch.int64),
            turn_rewards=torch.zeros(rows, 1),
            state_index=torch.zeros(rows, 1, dtype=torch.int64),
        ),
    )
    advantages, returns, _ = compute_advantages(name, inputs)
    assert advantages.shape == returns.shape == (rows, width)
    assert torch.isfinite(advantages).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_action_tokens_do_no_harm(name):
    inputs = make_inputs(action_mask=torch.zeros(6, 5, dtype=torch.bool), token_rewards=torch.zeros(6, 5))
    advantages, returns, _ = compute_advantages(name, inputs)
    assert torch.equal(advantages, torch.zeros(6, 5))
    assert torch.equal(returns, torch.zeros(6, 5))


def test_an_empty_response_still_counts_in_its_groups_mean():
    # rewards 0 (two tokens) and 1 (no token at all): mean 0.5, so the first has -0.5
    mask = torch.tensor([[True, True], [False, False]])
    rewards = torch.tensor([0.0, 1.0])
    inputs = make_inputs(
        rewards=rewards,
        token_rewards=token_rewards(rewards, mask),
        action_mask=mask,
        group_index=torch.tensor([0, 0]),
        values=None,
        greedy_rewards=None,
        steps=None,
    )
    assert_close(compute_advantages("dr_grpo", inputs)[0], torch.tensor([[-0.5, -0.5], [0.0, 0.0]]))


def test_the_kl_penalty_per_token_reaches_group_estimators():
    # rewards 1 and 1; KL 0.5 per token over two and one tokens, coefficient 0.2: totals 0.8 and 0.9, mean 0.85
    mask = torch.tensor([[True, True], [True, False]])
    rewards = torch.ones(2)
    inputs = make_inputs(
        rewards=rewards,
        token_rewards=token_rewards(rewards, mask, kl=torch.full((2, 2), 0.5), kl_coef=0.2),
        action_mask=mask,
        group_index=torch.tensor([0, 0]),
        values=None,
        greedy_rewards=None,
        steps=None,
    )
    assert_close(compute_advantages("dr_grpo", inputs)[0], torch.tensor([[-0.05, -0.05], [0.05, 0.0]]))


def test_metrics_count_groups_without_signal():
    # groups: {1, 0}, {2, 2}, {5}: two of three carry no signal, one has a single member
    rewards = torch.tensor([1.0, 0.0, 2.0, 2.0, 5.0])
    mask = torch.ones(5, 2, dtype=torch.bool)
    inputs = AdvantageInputs(
        rewards=rewards,
        token_rewards=token_rewards(rewards, mask),
        action_mask=mask,
        group_index=torch.tensor([4, 4, 7, 7, 1]),
    )
    result = compute_advantages("dr_grpo", inputs)[2].result()
    assert result["advantage/zero_signal_share"] == pytest.approx(2 / 3)
    assert result["advantage/group_of_one_share"] == pytest.approx(1 / 3)
    assert result["advantage/max"] == 0.5
    assert result["advantage/mean"] == 0.0


@pytest.mark.parametrize(
    ("name", "missing"),
    [("gae", "values"), ("remax", "greedy_rewards"), ("gigpo", "steps"), ("step_reinforce", "steps")],
)
def test_a_missing_input_is_named(name, missing):
    with pytest.raises(ValueError, match=f"{name}.*{missing}"):
        compute_advantages(name, make_inputs(**{missing: None}))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_row(bad):
    with pytest.raises(ValueError, match=r"rows \[2\]"):
        make_inputs(rewards=torch.tensor([0.0, 1.0, bad, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    "change",
    [
        {"rewards": torch.zeros(6, 1)},
        {"group_index": torch.zeros(5, dtype=torch.int64)},
        {"token_rewards": torch.zeros(6, 4)},
        {"values": torch.zeros(6)},
    ],
)
def test_inputs_of_the_wrong_shape_are_refused(change):
    with pytest.raises(ValueError, match="has shape"):
        make_inputs(**change)


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        compute_advantages("grpoo", make_inputs())


def test_an_estimator_that_returns_rows_instead_of_tokens_is_told_so():
    def rows(inputs: AdvantageInputs):
        return inputs.rewards, inputs.rewards

    with pytest.raises(ValueError, match="rows.* has shape"):
        compute_advantages(rows, make_inputs())
