"""Group statistics, the registries' helpers, and the page that documents them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_index, members
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.groups import group_moments, index_of, joint_index
from roll.algorithms.losses import PolicyLossInputs
from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.catalog.loss_table import LOSSES

QUICK = settings(max_examples=30, deadline=None, derandomize=True)


def test_names_become_numbers_in_order_of_appearance():
    assert index_of(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]
    assert index_of([]).dtype == torch.int64


@given(SEEDS, st.integers(1, 10), st.integers(1, 4))
@QUICK
def test_joint_groups_agree_exactly_when_both_agree(seed, rows, groups):
    a, b = draw_index(seed, rows, groups), draw_index(seed + 1, rows, groups)
    joint = joint_index(a, b)
    for i in range(rows):
        for j in range(rows):
            assert (joint[i] == joint[j]) == (a[i] == a[j] and b[i] == b[j])


@given(SEEDS, st.integers(0, 12), st.integers(1, 5))
@QUICK
def test_group_moments_equal_the_statistics_module(seed, rows, groups):
    values, index = draw(seed, rows), draw_index(seed, rows, groups)
    found = group_moments(values, index)
    for peers in members(index).values():
        group = [float(values[i]) for i in peers]
        for i in peers:
            assert int(found.size[i]) == len(peers)
            assert float(found.mean[i]) == pytest.approx(statistics.fmean(group), abs=1e-12)
            assert float(found.std[i]) == pytest.approx(statistics.stdev(group) if len(peers) > 1 else 0.0)


@given(SEEDS, st.integers(1, 12), st.sampled_from([torch.float32, torch.float64]))
@QUICK
def test_group_moments_are_bit_identical_in_any_order_and_under_any_numbering(seed, rows, dtype):
    values, index = draw(seed, rows, dtype=dtype), draw_index(seed, rows, 3)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    plain, shuffled = group_moments(values, index), group_moments(values[order], 100 - 7 * index[order])
    assert torch.equal(plain.mean[order], shuffled.mean)
    assert torch.equal(plain.std[order], shuffled.std)


@pytest.mark.parametrize("size", [2, 3, 6, 7, 10])
def test_equal_values_have_exactly_their_mean_and_no_spread(size):
    values = torch.full((size,), 0.1, dtype=torch.float64)  # (0.1 + 0.1 + 0.1) / 3 isn't 0.1
    found = group_moments(values, torch.zeros(size, dtype=torch.int64))
    assert torch.equal(found.mean, values)
    assert not found.std.any()
    assert not found.has_signal.any()


def documentation():
    return (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def test_every_registered_name_is_documented():
    for name in (*ESTIMATORS, *LOSSES):
        assert f"`{name}`" in documentation() or f"`{name}:" in documentation() or f"`{name}`:" in documentation()


def test_the_documented_loss_works():
    page = (Path(__file__).parents[2] / "docs" / "your_own_algorithm.md").read_text()
    example: dict[str, object] = {}
    exec(compile(page.split("```python\n# squared.py\n")[1].split("```")[0], "squared.py", "exec"), example)
    mask, rewards = torch.tensor([[True, True], [True, False]]), torch.tensor([1.0, 0.0])
    logprobs = torch.full((2, 2), -1.0)
    inputs = PolicyLossInputs(logprobs=logprobs, old_logprobs=logprobs - 0.5, advantages=rewards, mask=mask)
    # 2 * 0.25 - A * -1
    assert torch.allclose(example["squared"](inputs, scale=2.0).loss, torch.tensor([[1.5, 1.5], [0.5, 0.0]]))
