"""Normalisation of rewards and advantages."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_index, draw_mask, members, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.normalization import RunningMoments, clip_to, normalize_grouped, normalize_rewards, whiten

QUICK = settings(max_examples=30, deadline=None, derandomize=True)
SOURCES = [None, "batch", "group", "running"]
REWARDS = torch.tensor([0.0, 1.0, 4.0, 8.0])
INDEX = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        # batch mean 13/4 = 3.25; batch std sqrt((3.25^2 + 2.25^2 + 0.75^2 + 4.75^2)/3) = sqrt(38.75/3) = 3.5940
        # group means 0.5, 6; group stds 0.70711, 2.82843
        ("batch", "batch", [-0.90429, -0.62605, 0.20868, 1.32165]),
        ("group", "group", [-0.70711, 0.70711, -0.70711, 0.70711]),
        ("batch", "group", [-4.59619, -3.18198, 0.26517, 1.67938]),
        ("group", "batch", [-0.13912, 0.13912, -0.55648, 0.55648]),
        ("group", None, [-0.5, 0.5, -2.0, 2.0]),
        (None, "group", [0.0, 1.41421, 1.41421, 2.82843]),
        ("running", "running", [-1.0, -0.5, 1.0, 3.0]),  # running mean 2, std 2
        ("running", "group", [-2.82843, -1.41421, 0.70711, 2.12132]),
        ("batch", "running", [-1.625, -1.125, 0.375, 2.375]),
        (None, None, [0.0, 1.0, 4.0, 8.0]),
    ],
)
def test_mean_and_std_come_from_their_own_sources(mean, std, expected):
    running = RunningMoments(count=5, mean=2.0, m2=16.0)  # variance 16 / 4
    found = normalize_rewards(REWARDS, INDEX, mean=mean, std=std, running=running)
    assert_close(found, torch.tensor(expected), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("mean", "std"), list(itertools.product(SOURCES, SOURCES)))
@given(seed=SEEDS, rows=st.integers(0, 9), groups=st.integers(1, 9), constant=st.booleans())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_every_mix_keeps_one_bounded_number_per_row(mean, std, seed, rows, groups, constant):
    rewards = torch.full((rows,), 0.1) if constant else draw(seed, rows, dtype=torch.float32)
    running = RunningMoments().update(rewards)
    found = normalize_rewards(rewards, draw_index(seed, rows, groups), mean=mean, std=std, running=running)
    assert found.shape == (rows,)
    assert torch.isfinite(found).all()
    if constant:
        assert found.abs().max() <= 1 if rows else True  # never 0.1 / 1e-6


@given(seed=SEEDS, rows=st.integers(2, 9))
@QUICK
def test_batch_normalisation_equals_the_statistics_module(seed, rows):
    rewards = draw(seed, rows)
    values = rewards.tolist()
    expected = [(v - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6) for v in values]
    found = normalize_rewards(rewards, torch.arange(rows), mean="batch", std="batch")
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_running_normalisation_without_an_estimate_says_so():
    with pytest.raises(ValueError, match="running"):
        normalize_rewards(REWARDS, INDEX, mean="running", std=None)


def test_an_unknown_source_is_refused():
    with pytest.raises(ValueError, match="'batch', 'group', 'running'"):
        normalize_rewards(REWARDS, INDEX, mean="prompt", std=None)


# ---- running moments -----------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), max_size=5))
@QUICK
def test_running_moments_equal_the_moments_of_everything_seen(batches):
    running = RunningMoments()
    for batch in batches:
        running = running.update(torch.tensor(batch, dtype=torch.float64))
    seen = [x for batch in batches for x in batch]
    assert running.count == len(seen)
    if seen:
        assert running.mean == pytest.approx(statistics.fmean(seen), abs=1e-9)
    if len(seen) > 1:
        assert running.std == pytest.approx(statistics.stdev(seen), abs=1e-6)


@given(SEEDS, st.integers(0, 5), st.integers(0, 5))
@QUICK
def test_merging_running_moments_equals_seeing_both(seed, first, second):
    a, b = draw(seed, first), draw(seed + 1, second)
    merged = RunningMoments().update(a).merge(RunningMoments().update(b))
    together = RunningMoments().update(torch.cat([a, b]))
    assert merged.count == together.count
    assert merged.mean == pytest.approx(together.mean, abs=1e-12)
    assert merged.m2 == pytest.approx(together.m2, abs=1e-9)


def test_running_moments_survive_a_checkpoint_exactly():
    running = RunningMoments().update(draw(3, 17))
    assert RunningMoments(**json.loads(json.dumps(running.state()))) == running


# ---- agentic grouping ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # scores 0, 0, 0, 0, 9, and 7 alone. Mean 1.8, std sqrt(16.2) = 4.0249
        ("mean_std", [-0.44721, -0.44721, -0.44721, -0.44721, 1.78885, 0.0]),
        ("mean", [-1.8, -1.8, -1.8, -1.8, 7.2, 0.0]),
        ("asym_clip", [-0.44721, -0.44721, -0.44721, -0.44721, 1.78885, 0.0]),
        ("identity", [0.0, 0.0, 0.0, 0.0, 9.0, 7.0]),
    ],
)
def test_grouped_normalisation_matches_hand_computed_values(method, expected):
    scores, index = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0, 7.0]), torch.tensor([0, 0, 0, 0, 0, 1])
    assert_close(normalize_grouped(scores, index, method=method), torch.tensor(expected), atol=1e-4, rtol=0)


def test_asymmetric_clipping_cuts_at_minus_one_and_three():
    # 99 zeros and a one: std 0.1, z = 9.9 -> 3. Mirrored: -9.9 -> -1.
    scores = torch.zeros(100)
    scores[0] = 1.0
    assert float(normalize_grouped(scores, None, method="asym_clip").max()) == 3.0
    assert float(normalize_grouped(-scores, None, method="asym_clip").min()) == -1.0


@given(seed=SEEDS, rows=st.integers(1, 9), method=st.sampled_from(["mean_std", "mean", "asym_clip", "identity"]))
@QUICK
def test_no_grouping_is_one_group_for_all(seed, rows, method):
    scores = draw(seed, rows)
    one_group = torch.full((rows,), 5)
    assert torch.equal(
        normalize_grouped(scores, None, method=method), normalize_grouped(scores, one_group, method=method)
    )


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="asym_clip"):
        normalize_grouped(REWARDS, INDEX, method="std")


# ---- whitening and clipping ----------------------------------------------------------------------------


def test_whitening_matches_hand_computed_values():
    # 1, 2, 3: mean 2, unbiased variance 1
    values, mask = torch.tensor([[1.0, 50.0], [2.0, 3.0]]), torch.tensor([[1, 0], [1, 1]])
    assert_close(whiten(values, mask), torch.tensor([[-1.0, 0.0], [0.0, 1.0]]))


@given(seed=SEEDS, rows=st.integers(0, 4), width=st.integers(0, 4), junk=st.sampled_from([math.nan, math.inf, 1e30]))
@QUICK
def test_whitening_gives_mean_zero_and_variance_one_under_the_mask(seed, rows, width, junk):
    mask = draw_mask(seed, rows, width)
    found = whiten(poison(draw(seed, rows, width) * 3 + 5, mask, junk), mask)
    assert not found[~mask].any()
    kept = found[mask]
    if len(kept) > 1:
        assert abs(float(kept.mean())) < 1e-9
        assert float(kept.var()) == pytest.approx(1.0, abs=1e-4)
    else:
        assert not kept.any()


def test_clipping_reports_the_share_it_changed():
    values, mask = torch.tensor([[5.0, -0.5], [-9.0, 100.0]]), torch.tensor([[1, 1], [1, 0]])
    clipped, share = clip_to(values, 2.0, mask)
    assert_close(clipped, torch.tensor([[2.0, -0.5], [-2.0, 2.0]]))
    assert share == pytest.approx(2 / 3)
    assert clip_to(torch.zeros(0), 1.0)[1] == 0.0
    with pytest.raises(ValueError, match="> 0"):
        clip_to(values, 0.0)


@given(seed=SEEDS, rows=st.integers(1, 10))
@QUICK
def test_group_normalisation_is_bit_identical_in_any_order(seed, rows):
    rewards, index = draw(seed, rows, dtype=torch.float32), draw_index(seed, rows, 3)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    plain = normalize_rewards(rewards, index, mean="group", std="group")
    shuffled = normalize_rewards(rewards[order], index[order], mean="group", std="group")
    assert torch.equal(shuffled, plain[order])
    assert len(members(index)) <= 3
