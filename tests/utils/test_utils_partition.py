"""Balanced partitions and bins."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.utils.partition import pack_first_fit_decreasing, partition_balanced

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
COSTS = st.lists(st.integers(0, 1000), max_size=24)


def loads(costs, parts):
    return [sum(costs[i] for i in part) for part in parts]


def test_a_partition_matches_the_textbook_example():
    # 8 7 6 5 4 into two by differencing: 8-7=1, 6-5=1, 4-1=3, 3-1=2 -> sums 16 and 14
    costs = [8, 7, 6, 5, 4]
    assert sorted(loads(costs, partition_balanced(costs, 2))) == [14, 16]


@given(COSTS, st.integers(1, 9), st.booleans())
@QUICK
def test_every_item_is_in_exactly_one_part(costs, k, equal_size):
    parts = partition_balanced(costs, k, equal_size)
    assert len(parts) == k
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    sizes = sorted(len(part) for part in parts)
    if len(costs) >= k:
        assert sizes[0] >= 1
    if equal_size:
        assert sizes[-1] - sizes[0] <= 1


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.integers(2, 3))
@QUICK
def test_a_partition_is_close_to_the_best_there_is(costs, k):
    best = min(
        max(sum(c for c, where in zip(costs, choice, strict=True) if where == p) for p in range(k))
        for choice in itertools.product(range(k), repeat=len(costs))
    )
    assert max(loads(costs, partition_balanced(costs, k))) <= best * 4 / 3 + 1e-9  # differencing is a 4/3 method


@given(st.lists(st.integers(1, 1000), min_size=16, max_size=64), st.sampled_from([2, 4, 8]))
@QUICK
def test_balancing_is_never_worse_than_dealing_in_order(costs, k):
    dealt = max(sum(costs[p::k]) for p in range(k))
    assert max(loads(costs, partition_balanced(costs, k))) <= max(dealt, 4 / 3 * max(max(costs), sum(costs) / k))


def test_many_equal_items_are_split_evenly():
    assert [len(part) for part in partition_balanced([5] * 12, 4)] == [3, 3, 3, 3]


@given(COSTS, st.integers(1, 9), st.booleans())
@QUICK
def test_the_same_costs_give_the_same_partition(costs, k, equal_size):
    assert partition_balanced(costs, k, equal_size) == partition_balanced(list(costs), k, equal_size)


def test_fewer_items_than_parts_leaves_parts_empty_at_the_end():
    assert partition_balanced([3, 4], 4) == [[0], [1], [], []]
    assert partition_balanced([], 2) == [[], []]


@pytest.mark.parametrize("k", [0, -1])
def test_no_parts_are_refused(k):
    with pytest.raises(ValueError, match="k >= 1"):
        partition_balanced([1], k)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
@pytest.mark.parametrize("call", [lambda c: partition_balanced(c, 2), lambda c: pack_first_fit_decreasing(c, 5)])
def test_costs_that_are_not_costs_are_refused(bad, call):
    with pytest.raises(ValueError, match="item 1"):
        call([1.0, bad])


def test_bins_match_hand_computed_values():
    # capacity 10, sorted 7 6 4 3 12: 12 alone; 7 + 3; 6 + 4
    assert pack_first_fit_decreasing([7, 6, 4, 3, 12], 10) == [[0, 3], [1, 2], [4]]


@given(COSTS, st.integers(1, 1500))
@QUICK
def test_bins_hold_every_item_once_and_respect_the_capacity(costs, capacity):
    bins = pack_first_fit_decreasing(costs, capacity)
    assert sorted(itertools.chain(*bins)) == list(range(len(costs)))
    assert all(load <= capacity or len(items) == 1 for load, items in zip(loads(costs, bins), bins, strict=True))
    assert all(bins)
    # any two bins together overflow, else the second would not have been opened
    for a, b in itertools.combinations(loads(costs, bins), 2):
        assert a + b > capacity or min(a, b) == 0


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(ValueError, match="capacity > 0"):
        pack_first_fit_decreasing([1], 0)
