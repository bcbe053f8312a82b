"""Turns in token columns, and estimators whose steps are turns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_mask, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.advantages import AdvantageInputs, compute_advantages, gae, reinforce_return, turn_gae, turn_return
from roll.algorithms.gigpo import StepInputs, gigpo, step_reinforce
from roll.algorithms.turns import at_first_tokens, place_on_turns, sum_over_turns, turns_present

QUICK = settings(max_examples=30, deadline=None, derandomize=True)

# One trajectory of three turns with 2, 1 and 2 tokens, a reply of the environment after each of the first two; another
# of one turn.
MASK = torch.tensor([[True, True, False, True, False, True, True], [True, False, False, False, False, False, False]])
INDEX = torch.tensor([[0, 0, -1, 1, -1, 2, 2], [0, -1, -1, -1, -1, -1, -1]])
NAN = math.nan


def steps_of(index, rewards, **changes):
    """Turns of which only where they are matters; all in one state."""
    rewards = torch.as_tensor(rewards)
    return StepInputs(turn_index=index, turn_rewards=rewards, state_index=torch.zeros(rewards.shape).long(), **changes)


# --- turns and tokens -------------------------------------------------------------------------------------------------


def test_a_turns_reward_is_placed_on_its_last_token():
    placed = place_on_turns(torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]]), INDEX, MASK)
    assert_close(placed, torch.tensor([[0, 1.0, 0, 2.0, 0, 0, 3.0], [4.0, 0, 0, 0, 0, 0, 0]]))


def test_sums_and_first_tokens_step_over_what_the_policy_did_not_choose():
    values = poison(torch.tensor([[1.0, 2.0, 0, 4.0, 0, 8.0, 16.0], [32.0, 0, 0, 0, 0, 0, 0]]), MASK, NAN)
    assert_close(sum_over_turns(values, INDEX, MASK, 3), torch.tensor([[3.0, 4.0, 24.0], [32.0, 0, 0]]))
    assert_close(at_first_tokens(values, INDEX, MASK, 3), torch.tensor([[1.0, 4.0, 8.0], [32.0, 0, 0]]))
    assert turns_present(INDEX, MASK, 3).tolist() == [[True, True, True], [True, False, False]]


def test_a_token_of_a_turn_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="runs from 0 to 2, but there are turns 0 to 1"):
        sum_over_turns(torch.zeros(MASK.shape), INDEX, MASK, 2)
    with pytest.raises(ValueError, match=r"turn_index has shape"):
        place_on_turns(torch.zeros(2, 3), INDEX[:, :3], MASK)


# --- turns as steps ---------------------------------------------------------------------------------------------------


def test_gae_over_turns_matches_hand_computed_values():
    # gamma 0.5, lambda 0.5. Rewards of turns 1, 0 and 1 + 2 = 3 (two token rewards, not discounted within the turn);
    # values at first tokens 0.5, 0.25, 1; the 9s are never read.
    #   delta2 = 3 - 1 = 2,  delta1 = 0 + 0.5 * 1 - 0.25 = 0.25,  delta0 = 1 + 0.5 * 0.25 - 0.5 = 0.625
    #   A2 = 2,  A1 = 0.25 + 0.25 * 2 = 0.75,  A0 = 0.625 + 0.25 * 0.75 = 0.8125;  returns 3, 1, 1.3125
    rewards = torch.tensor([[0, 1.0, NAN, 0, NAN, 1.0, 2.0], [1.0, 0, 0, 0, 0, 0, 0]])
    values = torch.tensor([[0.5, 9.0, NAN, 0.25, NAN, 1.0, 9.0], [0.75, 0, 0, 0, 0, 0, 0]])
    steps = steps_of(INDEX, torch.zeros(2, 3))
    advantages, returns = turn_gae(rewards, values, steps, MASK, gamma=0.5, lam=0.5)
    assert_close(advantages[0], torch.tensor([0.8125, 0.8125, 0, 0.75, 0, 2.0, 2.0]))
    assert_close(returns[0], torch.tensor([1.3125, 1.3125, 0, 1.0, 0, 3.0, 3.0]))
    assert_close(advantages[1, 0], torch.tensor(0.25))


def test_the_reward_to_go_over_turns_matches_hand_computed_values():
    # gamma 0.5, rewards 1, 0, 4: G2 = 4, G1 = 0 + 2, G0 = 1 + 1. Over tokens 4, 2, 0 + 1, 1 + 0.5, 0.75.
    rewards = place_on_turns(torch.tensor([[1.0, 0.0, 4.0], [8.0, 0, 0]]), INDEX, MASK)
    found = turn_return(rewards, steps_of(INDEX, torch.zeros(2, 3)), MASK, gamma=0.5)
    assert_close(found, torch.tensor([[2.0, 2.0, 0, 2.0, 0, 4.0, 4.0], [8.0, 0, 0, 0, 0, 0, 0]]))
    over_tokens = reinforce_return(rewards, MASK, gamma=0.5)
    assert_close(over_tokens[0], torch.tensor([0.75, 1.5, 0, 1.0, 0, 2.0, 4.0]))


def reference_turn_gae(rewards, values, index, mask, gamma, lam):
    """Straight from the definition, one trajectory and one turn at a time."""
    advantages, returns = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(mask.shape[0]):
        tokens = {}
        for t in range(mask.shape[1]):
            if mask[row, t]:
                tokens.setdefault(int(index[row, t]), []).append(t)
        turns = [tokens[n] for n in sorted(tokens)]
        r = [math.fsum(float(rewards[row, t]) for t in turn) for turn in turns]
        v = [float(values[row, turn[0]]) for turn in turns] + [0.0]
        delta = [r[n] + gamma * v[n + 1] - v[n] for n in range(len(turns))]
        for n, turn in enumerate(turns):
            a = math.fsum((gamma * lam) ** k * delta[n + k] for k in range(len(turns) - n))
            for t in turn:
                advantages[row, t], returns[row, t] = a, a + v[n]
    return advantages, returns


@given(seed=SEEDS, rows=st.integers(1, 4), width=st.integers(1, 9))
@QUICK
def test_gae_over_turns_equals_a_loop(seed, rows, width):
    mask = draw_mask(seed, rows, width)
    index = draw_mask(seed + 3, rows, width, share=0.4).cumsum(1)  # never falls; may leave turns without a token
    rewards, values = draw(seed, rows, width), draw(seed + 1, rows, width)
    steps = steps_of(index, torch.zeros(rows, int(index.max()) + 1))
    found = turn_gae(rewards, values, steps, mask, gamma=0.9, lam=0.8)
    for tensor, expected in zip(found, reference_turn_gae(rewards, values, index, mask, 0.9, 0.8), strict=True):
        assert_close(tensor, expected)
    if width > 1:
        junk = steps_of(torch.where(mask, index, -7), torch.zeros(rows, int(index.max()) + 1))
        dirty = turn_gae(poison(rewards, mask, NAN), poison(values, mask, NAN), junk, mask, gamma=0.9, lam=0.8)
        assert torch.equal(dirty[0], found[0]) and torch.equal(dirty[1], found[1])


@given(seed=SEEDS, rows=st.integers(1, 4), width=st.integers(1, 8))
@QUICK
def test_turns_of_one_token_make_both_discounts_agree(seed, rows, width):
    mask, rewards, values = draw_mask(seed, rows, width), draw(seed, rows, width), draw(seed + 1, rows, width)
    index = torch.where(mask, mask.cumsum(1) - 1, -1)
    steps = steps_of(index, torch.zeros(rows, width))
    by_turn = turn_gae(rewards, values, steps, mask, gamma=0.9, lam=0.8)
    for tensor, expected in zip(by_turn, gae(rewards, values, mask, gamma=0.9, lam=0.8), strict=True):
        assert_close(tensor, expected)


def inputs_of(**changes):
    return AdvantageInputs(
        **{
            "rewards": torch.tensor([1.0, 0.0]),
            "token_rewards": place_on_turns(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), INDEX, MASK),
            "action_mask": MASK,
            "group_index": torch.tensor([0, 0]),
            "gamma": 0.5,
            "discount_over": "turn",
            "values": torch.zeros(MASK.shape),
            "steps": steps_of(INDEX, torch.zeros(2, 3)),
            **changes,
        }
    )


@pytest.mark.parametrize("name", ["gae", "reinforce"])
def test_estimators_discount_over_turns_when_asked(name):
    turns, _, _ = compute_advantages(name, inputs_of())
    assert_close(turns[0], torch.tensor([0.25, 0.25, 0, 0.5, 0, 1.0, 1.0]))
    tokens, _, _ = compute_advantages(name, inputs_of(discount_over="token"))
    assert_close(tokens[0], torch.tensor([1 / 16, 1 / 8, 0, 1 / 4, 0, 1 / 2, 1.0]))


def test_reinforce_plus_plus_whitens_the_return_of_turns():
    # Returns 1/4, 1/4, 1/2, 1, 1 and 0: mean 0.5, squares 1/8 + 0 + 1/2 + 1/4 = 0.875, variance 0.175.
    advantages, returns, _ = compute_advantages("reinforce_plus_plus", inputs_of())
    assert_close(returns[0], torch.tensor([0.25, 0.25, 0, 0.5, 0, 1.0, 1.0]))
    z = 0.5 / math.sqrt(0.175)
    assert_close(advantages[0], torch.tensor([-z / 2, -z / 2, 0, 0, 0, z, z]), atol=1e-6, rtol=0)
    assert_close(advantages[1, 0], torch.tensor(-z))


@pytest.mark.parametrize("name", ["gae", "reinforce", "reinforce_plus_plus"])
def test_a_discount_over_turns_needs_turns(name):
    with pytest.raises(ValueError, match=f"'{name}' needs steps"):
        compute_advantages(name, inputs_of(steps=None))


@pytest.mark.parametrize("name", ["gae", "reinforce", "reinforce_plus_plus"])
@pytest.mark.parametrize(("rows", "width"), [(2, 0), (0, 4), (1, 1)])
def test_discounts_over_turns_take_the_smallest_batches(name, rows, width):
    shape = rows, width
    inputs = AdvantageInputs(
        rewards=torch.ones(rows),
        token_rewards=torch.zeros(shape),
        action_mask=torch.ones(shape, dtype=torch.bool),
        group_index=torch.zeros(rows).long(),
        discount_over="turn",
        values=torch.zeros(shape),
        steps=steps_of(torch.zeros(shape).long(), torch.zeros(rows, 1)),
    )
    advantages, returns, _ = compute_advantages(name, inputs)
    assert advantages.shape == returns.shape == shape


# --- whom episodes and turns are compared with ------------------------------------------------------------------------

ONE = torch.ones(4, 1, dtype=torch.bool)
ONE_INDEX = torch.zeros(4, 1).long()


def test_gigpo_compares_episodes_as_told_and_turns_within_their_task_group():
    # Groups (0, 1) and (2, 3), all compared with each other: episode rewards 0, 1, 2, 5 have mean 2. Turn rewards are
    # compared within the group all the same: 0, 1 -> -0.5, 0.5 and 2, 5 -> -1.5, 1.5.
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0])
    steps = steps_of(ONE_INDEX, rewards[:, None], method="mean", comparison_groups=torch.zeros(4).long())
    found = gigpo(rewards, torch.tensor([0, 0, 1, 1]), steps, ONE)
    assert_close(found.flatten(), torch.tensor([-2.5, -0.5, -1.5, 4.5]))
    alone = gigpo(rewards, torch.tensor([0, 0, 1, 1]), replace(steps, comparison_groups=None, step_weight=0.0), ONE)
    assert_close(alone.flatten(), torch.tensor([-0.5, 0.5, -1.5, 1.5]))


def test_step_reinforce_compares_turns_as_told():
    # Over the batch 0, 1, 2, 5 have mean 2; in two halves means 0.5 and 3.5.
    steps = steps_of(ONE_INDEX, torch.tensor([[0.0], [1.0], [2.0], [5.0]]), method="mean")
    assert_close(step_reinforce(steps, ONE).flatten(), torch.tensor([-2.0, -1.0, 0.0, 3.0]))
    halves = replace(steps, comparison_groups=torch.tensor([7, 7, 3, 3]))
    assert_close(step_reinforce(halves, ONE).flatten(), torch.tensor([-0.5, 0.5, -1.5, 1.5]))


def test_whom_rows_are_compared_with_is_never_broadcast():
    with pytest.raises(ValueError, match="comparison_groups has shape"):
        steps_of(ONE_INDEX, torch.zeros(4, 1), comparison_groups=torch.zeros(1).long())
