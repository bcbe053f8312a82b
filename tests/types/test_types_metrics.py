"""Metrics add up: however the parts are cut and ordered, the whole is the same."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
import torch
from device_syncs import OperatorCounts
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.types.metrics import Metrics

QUICK = settings(max_examples=50, deadline=None, derandomize=True)
NUMBERS = st.integers(-100, 100).map(float)  # integers add without rounding, so order can't matter
ENTRIES = st.lists(
    st.tuples(st.sampled_from(["mean", "sum", "max", "min"]), st.sampled_from("ab"), NUMBERS, st.integers(0, 3)),
    max_size=12,
)


def record(entries):
    metrics = Metrics()
    for kind, name, value, weight in entries:
        if kind == "mean":
            metrics.add_mean(f"mean/{name}", value * weight, weight)
        else:
            getattr(metrics, f"add_{kind}")(f"{kind}/{name}", value)
    return metrics


def test_metrics_match_hand_computed_values():
    # mean (2 * 3 + 4 * 1) / 4 = 2.5
    metrics = Metrics()
    metrics.add_mean("loss", 6.0, 3)
    metrics.add_mean("loss", 4.0)
    for value in (2.0, 5.0, -1.0):
        metrics.add_sum("count", value)
        metrics.add_max("high", value)
        metrics.add_min("low", value)
    assert metrics.result() == {"count": 6.0, "high": 5.0, "loss": 2.5, "low": -1.0}


@given(ENTRIES)
@QUICK
def test_results_equal_a_loop(entries):
    result = record(entries).result()
    for kind, name in itertools.product(["mean", "sum", "max", "min"], "ab"):
        rows = [(v, w) for k, n, v, w in entries if (k, n) == (kind, name)]
        key = f"{kind}/{name}"
        if kind == "mean":
            weight = sum(w for _, w in rows)
            assert (key in result) == (weight > 0)
            if weight:
                assert result[key] == pytest.approx(sum(v * w for v, w in rows) / weight)
        elif rows:
            assert result[key] == {"sum": sum, "max": max, "min": min}[kind](v for v, _ in rows)
        else:
            assert key not in result


@given(ENTRIES, st.lists(st.integers(0, 12), max_size=3), st.randoms(use_true_random=False))
@QUICK
def test_parts_merge_to_the_whole_in_any_cut_and_order(entries, cuts, random):
    bounds = [0, *sorted(min(c, len(entries)) for c in cuts), len(entries)]
    parts = [record(entries[a:b]) for a, b in itertools.pairwise(bounds)]
    random.shuffle(parts)
    assert Metrics.merged(parts).result() == record(entries).result()


@given(ENTRIES, ENTRIES)
@QUICK
def test_merging_leaves_the_other_side_alone(first, second):
    other = record(second)
    before = other.result()
    mine = record(first)
    assert mine.merge(other) is mine
    assert other.result() == before


def test_a_mean_without_weight_is_left_out():
    metrics = Metrics()
    metrics.add_mean("a", 0.0, 0)
    assert metrics.result() == {}
    metrics.add_mean("a", 3.0, 1)
    assert metrics.result() == {"a": 3.0}


def test_plain_values_replace_earlier_ones():
    metrics = Metrics()
    metrics.add_mean("a", 10.0)
    metrics.update({"a": 2.0, "b": 3.0})
    assert metrics.result() == {"a": 2.0, "b": 3.0}


def test_numbers_on_a_device_are_read_together_and_give_what_their_values_give():
    plain, kept = Metrics(), Metrics()
    numbers = (torch.tensor(1.25), torch.tensor(-2.5, dtype=torch.bfloat16), torch.tensor(3), torch.tensor(True))
    for metrics, values in ((plain, [float(number) for number in numbers]), (kept, numbers)):
        for value in values:
            metrics.add_mean("mean", value, value)
            metrics.add_mean("half", value, 2.0)
            metrics.add_sum("sum", value)
            metrics.add_max("max", value)
            metrics.add_min("min", value)
    whole = Metrics.merged([kept, Metrics()])
    with OperatorCounts() as counts:
        assert whole.result() == plain.result()
        assert whole.result() == plain.result()
        assert pickle.loads(pickle.dumps(kept)).result() == plain.result()
    assert counts.calls["stack"] == 2  # the whole's and the pickle's
    wants = torch.ones((), requires_grad=True)
    kept.add_sum("more", wants * 2)
    assert kept.result()["more"] == 2.0


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_the_largest_and_the_smallest_of_nothing_leave_no_trace(number):
    metrics = Metrics()
    metrics.add_max("max", number(-math.inf))
    metrics.add_min("min", number(math.inf))
    assert metrics.result() == {}
    metrics.add_max("max", number(math.inf))
    assert metrics.result() == {"max": math.inf}


def test_results_are_sorted_by_name():
    metrics = Metrics()
    for name in ("z", "m", "a"):
        metrics.add_sum(name, 1.0)
    assert list(metrics.result()) == ["a", "m", "z"]
