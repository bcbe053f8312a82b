"""Named parts of the reward, sample weights and masks."""

from __future__ import annotations

import math

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.shaping import (
    cosine_length_reward,
    difficulty_weights,
    length_reward,
    length_weights,
    mask_long_errors,
    mean_one,
    overlong_penalty,
    pf_ppo_weights,
    place_on_last_token,
    resample_counts,
    within_difficulty,
)

QUICK = settings(max_examples=30, deadline=None, derandomize=True)


def test_the_reward_sits_on_the_last_action_token():
    mask = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])
    placed = place_on_last_token(torch.tensor([2.0, 5.0, -1.0]), mask)
    assert_close(placed, torch.tensor([[0.0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, -1]]))


@given(SEEDS, st.integers(0, 5), st.integers(0, 5))
@QUICK
def test_placed_rewards_add_up_to_the_reward_of_rows_that_acted(seed, rows, width):
    rewards, mask = draw(seed, rows), draw_mask(seed, rows, width)
    assert_close(place_on_last_token(rewards, mask).sum(1), rewards * mask.any(1))


def test_the_overlong_penalty_is_soft():
    # L = 100, c = 20: free up to 80, half at 90, full at 100 and beyond
    lengths = torch.tensor([0, 80, 90, 100, 150])
    assert_close(overlong_penalty(lengths, max_length=100, buffer=20), torch.tensor([0.0, 0.0, -0.5, -1.0, -1.0]))


@pytest.mark.parametrize("buffer", [0, 101])
def test_an_impossible_overlong_buffer_is_refused(buffer):
    with pytest.raises(ValueError, match=r"1\.\.100"):
        overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)


def test_the_cosine_reward_prefers_short_right_and_long_wrong_answers():
    lengths, correct = torch.tensor([0, 5, 10, 0, 5, 9]), torch.tensor([True, True, True, False, False, False])
    found = cosine_length_reward(lengths, correct, maximum=10, right=(2.0, 1.0), wrong=(-10.0, 0.0), exceeded=-7.0)
    late = -10 * (1 + math.cos(0.9 * math.pi)) / 2
    assert_close(found, torch.tensor([2.0, 1.5, -7.0, -10.0, -5.0, late]))


def test_the_length_reward_matches_hand_computed_values():
    # lengths 10, 20, 30: lambda 0.5, 0, -0.5; wrong answers get at most 0; equal lengths get 0
    lengths = torch.tensor([10, 20, 30, 10, 30, 8, 8])
    index = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    correct = torch.tensor([True, True, True, False, False, True, False])
    expected = torch.tensor([0.5, 0.0, -0.5, 0.0, -0.5, 0.0, 0.0])
    assert_close(length_reward(lengths, correct, index), expected)


def test_difficulty_weights_are_linear_with_mean_one():
    # 0.5, 1.25, 2 (clamped): mean 1.25
    found = difficulty_weights(torch.tensor([0.0, 0.5, 7.0]))
    assert_close(found, torch.tensor([0.4, 1.0, 1.6]))


def test_length_weights_favour_short_responses():
    # 1.5, 1.0, 0.5
    assert_close(length_weights(torch.tensor([10, 20, 30])), torch.tensor([1.5, 1.0, 0.5]))
    assert_close(length_weights(torch.tensor([7, 7])), torch.ones(2))
    assert length_weights(torch.zeros(0)).shape == (0,)


@given(SEEDS, st.integers(1, 9))
@QUICK
def test_weights_have_mean_one(seed, rows):
    assert float(mean_one(draw(seed, rows).abs() + 0.01).mean()) == pytest.approx(1.0)
    assert torch.equal(mean_one(torch.zeros(rows)), torch.zeros(rows))


def test_masks_drop_what_they_say():
    scores, index = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    found = within_difficulty(scores, index, low=0.1, high=0.95)
    assert found.tolist() == [True, True, False, False, False, False]
    found = mask_long_errors(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([99, 99, 5]), max_error_length=10)
    assert found.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="low < high"):
        within_difficulty(scores, index, low=1.0, high=0.0)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # scores 0, 1, 2: squares 0, 1, 4 (mean 5/3); ends 1, 0, 1 (mean 2/3); 0.1, 0.1, 0.4 (mean 0.2)
        ("pow", [0.0, 0.6, 2.4]),
        ("max_min", [1.5, 0.0, 1.5]),
        ("max_random", [0.5, 0.5, 2.0]),
    ],
)
def test_pf_ppo_weights_match_hand_computed_values(method, expected):
    assert_close(pf_ppo_weights(torch.tensor([0.0, 1.0, 2.0]), method=method), torch.tensor(expected))


def test_pf_ppo_with_nothing_to_prefer_weighs_all_alike():
    assert torch.equal(pf_ppo_weights(torch.zeros(3), method="pow"), torch.ones(3))
    assert pf_ppo_weights(torch.zeros(0), method="max_min").shape == (0,)
    with pytest.raises(ValueError, match="max_random"):
        pf_ppo_weights(torch.zeros(3), method="min")


def test_resampling_counts_add_up_and_depend_on_the_seed_alone():
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0])
    first, again = (resample_counts(weights, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.sum() == 4
    assert first[0] == first[3] == 0
