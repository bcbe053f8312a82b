"""The task source: exact shares, every task once per epoch, and a cursor that continues exactly."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data.sampler import TaskSource
from roll.data.task_ids import base_id, epoch_of, with_epoch
from roll.types.trajectory import Task
from roll.utils.readers import DataError


def tasks(domain: str, n: int, prompt: str = "p") -> list[Task]:
    return [
        Task(id=f"{domain}:{i}", source="s", payload={"prompt": prompt}, seed=i, tag=domain, domain=domain)
        for i in range(n)
    ]


def source(sizes: dict[str, int], **arguments: Any) -> TaskSource:
    return TaskSource({d: tasks(d, n) for d, n in sizes.items()}, **{"seed": 1, "probs": sizes, **arguments})


def ids(found: list[Task]) -> list[str]:
    return [task.id for task in found]


SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5).map(lambda ns: {f"d{i}": n for i, n in enumerate(ns)})
WEIGHTS = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any)


@given(WEIGHTS, st.lists(st.integers(1, 9), min_size=1, max_size=25))
@settings(max_examples=60, deadline=None)
def test_every_domain_is_within_one_task_of_its_share_after_any_batch(weights: list[int], batches: list[int]) -> None:
    probs = {f"d{i}": float(w) for i, w in enumerate(weights)}
    src = source(dict.fromkeys(probs, 3), probs=probs)
    drawn: Counter[str] = Counter()
    for n in batches:
        drawn.update(task.domain for task in src.take(n))
        for domain, weight in probs.items():
            share = Fraction(int(weight), sum(weights)) * sum(drawn.values())
            assert abs(drawn[domain] - share) < 1


def test_shares_of_a_hundred_tasks_are_exact() -> None:
    drawn = Counter(t.domain for t in source({"a": 3, "b": 4, "c": 5}, probs={"a": 0.1, "b": 0.2, "c": 0.7}).take(100))
    assert drawn == {"a": 10, "b": 20, "c": 70}


def test_without_probabilities_domains_are_drawn_by_size() -> None:
    assert Counter(t.domain for t in source({"a": 30, "b": 10}).take(40)) == {"a": 30, "b": 10}


def test_a_domain_of_probability_zero_is_never_drawn() -> None:
    assert {t.domain for t in source({"a": 2, "b": 2}, probs={"a": 0.0, "b": 1.0}).take(20)} == {"b"}


@given(SIZES, st.integers(0, 3), st.booleans(), st.lists(st.integers(1, 6), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_no_task_is_skipped_or_repeated_within_an_epoch(
    sizes: dict[str, int], seed: int, shuffle: bool, batches: list[int]
) -> None:
    src = source(sizes, seed=seed, shuffle=shuffle)
    drawn = [task for n in batches for task in src.take(n)]
    assert len(set(ids(drawn))) == len(drawn)
    for domain, size in sizes.items():
        stream = [task for task in drawn if task.domain == domain]
        for start in range(0, len(stream), size):
            epoch = stream[start : start + size]
            assert {epoch_of(task.id) for task in epoch} == {start // size}
            if len(epoch) == size:
                assert sorted(base_id(task.id) for task in epoch) == [f"{domain}:{i}" for i in range(size)]


@given(
    SIZES,
    st.sampled_from([None, 1, 2]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=12),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_a_saved_cursor_continues_exactly(
    sizes: dict[str, int], epochs: int | None, moves: list[tuple[int, int]], data: Any
) -> None:
    """`moves`: take so many, put so many of them back. The cursor is saved after any of them."""
    probs = {d: float(data.draw(st.integers(1, 5))) for d in sizes}
    src = source(sizes, probs=probs, num_train_epochs=epochs)
    for n, back in moves:
        src.put_back(src.take(n)[:back])
    saved = json.loads(json.dumps(src.state_dict()))
    resumed = source(sizes, probs=probs, num_train_epochs=epochs)
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    for n in (3, 1, 7):
        assert resumed.take(n) == src.take(n)
    assert resumed.remaining == src.remaining


def test_batch_sizes_do_not_change_the_order() -> None:
    one, many = source({"a": 5, "b": 3}), source({"a": 5, "b": 3})
    assert ids(one.take(20)) == ids([task for _ in range(20) for task in many.take(1)])


def test_epochs_are_shuffled_differently_and_by_seed() -> None:
    src = source({"a": 20})
    first, second = [base_id(i) for i in ids(src.take(20))], [base_id(i) for i in ids(src.take(20))]
    assert first != second
    assert sorted(first) == sorted(second)
    assert ids(source({"a": 20}, seed=2).take(20)) != first
    assert ids(source({"a": 3}, shuffle=False).take(7)) == ["a:0", "a:1", "a:2", "a:0@e1", "a:1@e1", "a:2@e1", "a:0@e2"]


def test_a_repeat_keeps_all_but_the_id() -> None:
    first, second = source({"a": 1}).take(2)
    assert (second.id, second.payload, second.seed) == ("a:0@e1", first.payload, first.seed)


def test_tasks_put_back_come_first_and_in_their_order() -> None:
    src = source({"a": 10}, shuffle=False)
    batch = src.take(5)
    src.put_back(batch[3:])
    src.put_back(batch[1:2])
    assert ids(src.take(5)) == ["a:1", "a:3", "a:4", "a:5", "a:6"]


def test_prompts_in_flight_are_in_the_cursor_as_if_they_had_been_put_back() -> None:
    src = source({"a": 10}, shuffle=False)
    batch = src.take(5)
    src.put_back(batch[4:])
    saved = src.state_dict(batch[1:3])
    resumed = source({"a": 10}, shuffle=False)
    resumed.load_state_dict(saved)
    assert ids(resumed.take(4)) == ["a:1", "a:2", "a:4", "a:5"]
    assert ids(src.take(2)) == ["a:4", "a:5"]  # saving puts nothing back


def test_a_repeat_that_is_put_back_keeps_its_epoch() -> None:
    src = source({"a": 2}, shuffle=False)
    src.put_back(src.take(4)[3:])
    resumed = source({"a": 2}, shuffle=False)
    resumed.load_state_dict(src.state_dict())
    assert ids(resumed.take(2)) == ["a:1@e1", "a:0@e2"]


def test_epochs_end_with_every_task_drawn_exactly_that_often() -> None:
    src = source({"a": 2, "b": 5}, probs={"a": 0.5, "b": 0.5}, num_train_epochs=2)
    assert src.remaining == 14
    drawn = src.take(13)
    assert src.remaining == 1
    drawn += src.take(10)
    assert Counter(base_id(t.id) for t in drawn) == {
        **{f"a:{i}": 2 for i in range(2)},
        **{f"b:{i}": 2 for i in range(5)},
    }
    assert (src.take(3), src.remaining) == ([], 0)
    # a's 4 draws are over after 8 of the 14; from there b has everything
    assert [t.domain for t in drawn[:8]].count("a") == 4


def test_what_a_finished_domain_leaves_is_shared_by_the_others_in_proportion() -> None:
    src = source({"a": 2, "b": 30, "c": 30}, probs={"a": 2.0, "b": 1.0, "c": 1.0}, num_train_epochs=1)
    rest = Counter(t.domain for t in src.take(44)[4:])
    assert rest == {"b": 20, "c": 20}


def test_without_epochs_there_is_no_end() -> None:
    src = source({"a": 2})
    assert src.remaining is None
    assert len(src.take(101)) == 101
    assert src.epochs == {"a": 50.5}


def test_a_cursor_of_other_data_or_another_order_is_refused() -> None:
    saved = source({"a": 3, "b": 2}).state_dict()
    others = [
        (source({"a": 4, "b": 2}), "tasks"),
        (source({"a": 3, "b": 2}, seed=2), "seed"),
        (source({"a": 3, "b": 2}, shuffle=False), "shuffle"),
        (source({"a": 3, "b": 2}, probs={"a": 0.5, "b": 0.5}), "domain_interleave_probs"),
        (source({"a": 3}), "tasks"),
        (TaskSource({"a": tasks("a", 3, "other"), "b": tasks("b", 2)}, seed=1, probs={"a": 3, "b": 2}), "tasks"),
        (TaskSource({"a": tasks("a", 3)[::-1], "b": tasks("b", 2)}, seed=1, probs={"a": 3, "b": 2}), "tasks"),
    ]
    for other, what in others:
        with pytest.raises(DataError, match=f"saved with {what} = .*skip or repeat"):
            other.load_state_dict(saved)
    with pytest.raises(DataError, match="version 7"):
        source({"a": 3, "b": 2}).load_state_dict({**saved, "version": 7})


def test_more_epochs_may_be_asked_for_on_resume() -> None:
    src = source({"a": 3}, num_train_epochs=1)
    src.take(3)
    more = source({"a": 3}, num_train_epochs=2)
    more.load_state_dict(src.state_dict())
    assert (more.remaining, len(more.take(9))) == (3, 3)


BROKEN = [
    (lambda: source({"a": 0, "b": 1}, probs={"a": 0.5, "b": 0.5}), "'a' of rewards has no training rows; if"),
    (lambda: TaskSource({"a": tasks("x", 2), "b": tasks("x", 1)}, seed=1, probs={"a": 2, "b": 1}), "not unique"),
    (lambda: TaskSource({"a": [source({"a": 1}).take(2)[1]]}, seed=1, probs={"a": 1}), "@e<number>"),
    (lambda: source({"a": 1}).take(-1), "can't take -1"),
    (lambda: source({"a": 1}).put_back(tasks("b", 1)), "'b:0' is not one of this source"),
    (lambda: source({"a": 1}).put_back(tasks("a", 1) * 2), "put back twice"),
]


@pytest.mark.parametrize(("make", "message"), BROKEN)
def test_impossible_sources_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_epoch_suffixes_come_and_go() -> None:
    assert (with_epoch("a@b:1", 0), with_epoch("a:1", 12)) == ("a@b:1", "a:1@e12")
    assert (base_id("a:1@e12"), epoch_of("a:1@e12"), base_id("a@e:1"), epoch_of("a:1")) == ("a:1", 12, "a@e:1", 0)
