"""Step-level credit: GiGPO and step-level REINFORCE."""

from __future__ import annotations

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_index
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.gigpo import StepInputs, gigpo, step_groups, step_reinforce, step_returns, turns_to_tokens

QUICK = settings(max_examples=25, deadline=None, derandomize=True)


def test_step_returns_match_hand_computed_values():
    # gamma 0.5: G2 = 4, G1 = 2 + 2 = 4, G0 = 1 + 2 = 3; the second row stops after one turn
    rewards, mask = torch.tensor([[1.0, 2.0, 4.0], [3.0, 9.0, 9.0]]), torch.tensor([[True] * 3, [True, False, False]])
    assert_close(step_returns(rewards, mask, gamma=0.5), torch.tensor([[3.0, 4.0, 4.0], [3.0, 0.0, 0.0]]))


def test_turn_masks_are_never_broadcast():
    with pytest.raises(ValueError, match="turn_mask has shape"):
        step_returns(torch.zeros(2, 3), torch.ones(2, 1), gamma=1.0)


def test_the_same_state_in_another_task_group_is_another_state():
    groups = step_groups(torch.tensor([0, 0, 1]), torch.tensor([[5, 6], [5, 5], [5, 6]]))
    assert groups[0, 0] == groups[1, 0] == groups[1, 1]
    assert len({int(groups[0, 0]), int(groups[0, 1]), int(groups[2, 0]), int(groups[2, 1])}) == 4


def hand_steps(**changes):
    # Two episodes of one task, two turns each; both start in state 0, then part.
    return StepInputs(
        **{
            "turn_index": torch.tensor([[0, 0, -1, 1], [0, -1, 1, -1]]),
            "turn_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
            "state_index": torch.tensor([[0, 1], [0, 2]]),
            "gamma": 0.5,
            "step_weight": 2.0,
            "method": "mean",
            **changes,
        }
    )


HAND_MASK = torch.tensor([[True, True, False, True], [True, False, True, False]])


def test_gigpo_matches_hand_computed_values():
    # episode: rewards 1, 0 -> +-0.5. Turn returns: [0.5, 1], [0, 0]. State 0: mean 0.25 -> +-0.25.
    # States 1 and 2 have one visitor each: 0. Joint with weights 1 and 2: row 0 = 1.0, 0.5; row 1 = -1.0, -0.5.
    found = gigpo(torch.tensor([1.0, 0.0]), torch.tensor([3, 3]), hand_steps(), HAND_MASK)
    assert_close(found, torch.tensor([[1.0, 1.0, 0.0, 0.5], [-1.0, 0.0, -0.5, 0.0]]))


def test_gigpo_with_step_weight_zero_is_the_episode_advantage():
    steps = hand_steps(step_weight=0.0)
    found = gigpo(torch.tensor([1.0, 0.0]), torch.tensor([3, 3]), steps, HAND_MASK)
    assert_close(found, torch.tensor([[0.5], [-0.5]]) * HAND_MASK)


def test_gigpo_divides_by_the_std_when_asked():
    # two members at +-0.5: std sqrt(0.5), so +-0.7071; state 0 likewise
    found = gigpo(torch.tensor([1.0, 0.0]), torch.tensor([3, 3]), hand_steps(method="mean_std"), HAND_MASK)
    z = 0.5**0.5
    assert_close(found, torch.tensor([[3 * z, 3 * z, 0.0, z], [-3 * z, 0.0, -z, 0.0]]), atol=1e-4, rtol=0)


def test_step_reinforce_puts_the_turns_return_on_each_of_its_tokens():
    found = step_reinforce(hand_steps(method="identity"), HAND_MASK)
    assert_close(found, torch.tensor([[0.5, 0.5, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))


def test_a_turn_that_never_happened_changes_nothing():
    junk = float("nan")
    steps = hand_steps()
    longer = StepInputs(
        turn_index=steps.turn_index,
        turn_rewards=torch.cat([steps.turn_rewards, torch.full((2, 1), junk)], 1),
        state_index=torch.cat([steps.state_index, torch.full((2, 1), -1)], 1),
        gamma=0.5,
        step_weight=2.0,
        method="mean",
    )
    rewards, index = torch.tensor([1.0, 0.0]), torch.tensor([3, 3])
    assert torch.equal(gigpo(rewards, index, longer, HAND_MASK), gigpo(rewards, index, steps, HAND_MASK))


def test_an_action_token_of_a_turn_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="turns 0 to 1"):
        turns_to_tokens(torch.zeros(1, 2), torch.tensor([[0, 2]]), torch.ones(1, 2, dtype=torch.bool))


@given(seed=SEEDS, rows=st.integers(1, 6), turns=st.integers(1, 4))
@QUICK
def test_gigpo_equals_a_loop(seed, rows, turns):
    rewards, index = draw(seed, rows), draw_index(seed, rows, 2)
    turn_rewards, state = draw(seed + 1, rows, turns), draw_index(seed + 2, rows * turns, 3).reshape(rows, turns)
    mask = torch.ones(rows, turns, dtype=torch.bool)
    steps = StepInputs(
        turn_index=torch.arange(turns).expand(rows, turns),
        turn_rewards=turn_rewards,
        state_index=state,
        gamma=0.7,
        episode_weight=0.5,
        step_weight=1.5,
        method="mean",
    )
    expected = torch.zeros(rows, turns, dtype=torch.float64)
    go = [
        [sum(0.7**j * float(turn_rewards[b, n + j]) for j in range(turns - n)) for n in range(turns)]
        for b in range(rows)
    ]
    for b in range(rows):
        peers = [float(rewards[c]) for c in range(rows) if index[c] == index[b]]
        for n in range(turns):
            alike = [
                go[c][m]
                for c in range(rows)
                for m in range(turns)
                if index[c] == index[b] and state[c, m] == state[b, n]
            ]
            episode = float(rewards[b]) - sum(peers) / len(peers)
            expected[b, n] = 0.5 * episode + 1.5 * (go[b][n] - sum(alike) / len(alike))
    assert_close(gigpo(rewards, index, steps, mask), expected)


@given(seed=SEEDS, rows=st.integers(2, 6))
@QUICK
def test_gigpo_does_not_depend_on_the_order_of_rows(seed, rows):
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    rewards, index = draw(seed, rows), draw_index(seed, rows, 2)
    turn_rewards, state = draw(seed + 1, rows, 3), draw_index(seed + 2, rows * 3, 2).reshape(rows, 3)
    mask = torch.ones(rows, 3, dtype=torch.bool)

    def run(rows_taken):
        turn_index = torch.arange(3).expand(rows, 3)
        steps = StepInputs(turn_index=turn_index, turn_rewards=turn_rewards[rows_taken], state_index=state[rows_taken])
        return gigpo(rewards[rows_taken], index[rows_taken], steps, mask)

    assert torch.equal(run(order), run(torch.arange(rows))[order])
