"""Spans: inclusive and exclusive seconds, the controller's share."""

from __future__ import annotations

import pytest

from roll.tracking.timing import Timers


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_spans_give_inclusive_and_exclusive_seconds_and_the_controllers_share():
    clock = Clock()
    timers = Timers(clock)
    with timers.span("step"):
        clock.now += 1  # the controller's own
        with timers.span("generate", waits=True):
            clock.now += 6
        with timers.span("update"):
            clock.now += 0.5  # the controller's own
            with timers.span("train", waits=True):
                clock.now += 2
        with timers.span("generate", waits=True):
            clock.now += 0.5
    # step = 1 + 6 + 2.5 + 0.5 = 10, of which the controller's own is 1 + 0.5 = 1.5
    assert timers.result() == {
        "time/generate": 6.5,
        "time/step": 10.0,
        "time/step/self": 1.0,  # 10 - 6.5 - 2.5
        "time/train": 2.0,
        "time/update": 2.5,
        "time/update/self": 0.5,
        "time/controller": 1.5,
        "time/controller_share": 0.15,
    }


def test_waiting_inside_waiting_counts_once():
    clock = Clock()
    timers = Timers(clock)
    with timers.span("step"):
        clock.now += 1
        with timers.span("generate", waits=True):
            clock.now += 1
            with timers.span("poll", waits=True):
                clock.now += 2
    # step = 4, waited = 3 (not 3 + 2)
    result = timers.result()
    assert (result["time/controller"], result["time/controller_share"]) == (1.0, 0.25)


@pytest.mark.parametrize(
    ("computed", "own"),
    [
        (1.0, 3.0),  # 4 s of event loop, 1 s of it computing: 3 s were waiting, which is more than the 2 s of poll
        (3.5, 4.0),  # 0.5 s were waiting, but poll alone says 2 s: 2 + 2 s of the controller's own
    ],
)
def test_an_event_loop_waits_as_long_as_its_thread_computes_nothing(monkeypatch, computed: float, own: float):
    clock, cpu = Clock(), Clock()
    monkeypatch.setattr("roll.tracking.timing.time.thread_time", cpu)
    timers = Timers(clock)
    with timers.span("step"):
        clock.now += 2
        with timers.span("generate", event_loop=True):
            clock.now += 2
            cpu.now += computed
            with timers.span("poll", waits=True):
                clock.now += 2
    assert timers.result()["time/controller"] == own


def test_a_span_inside_one_of_its_own_name_counts_once_in_the_inclusive_time():
    clock = Clock()
    timers = Timers(clock)
    with timers.span("walk"):
        clock.now += 1
        with timers.span("walk"):
            clock.now += 2
    assert timers.result() == {"time/walk": 3.0, "time/walk/self": 3.0}


def test_result_starts_over_and_without_a_step_names_no_controller():
    clock = Clock()
    timers = Timers(clock)
    with timers.span("save"):
        clock.now += 2
    assert timers.result() == {"time/save": 2.0}
    assert timers.result() == {}


def test_a_step_of_no_time_has_a_share_of_zero():
    timers = Timers(Clock())
    with timers.span("step"):
        pass
    assert timers.result()["time/controller_share"] == 0.0


def test_time_counts_when_the_body_raises_and_the_next_span_is_not_inside_it():
    clock = Clock()
    timers = Timers(clock)

    def load() -> None:
        with timers.span("load"):
            clock.now += 3
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        load()
    with timers.span("save"):
        clock.now += 1
    assert timers.result() == {"time/load": 3.0, "time/save": 1.0}


def test_misuse_is_our_bug_and_is_asserted():
    timers = Timers(Clock())
    with pytest.raises(AssertionError, match="one word"):
        timers.span("a/b").__enter__()
    with timers.span("step"), pytest.raises(AssertionError, match=r"inside the open span 'step'"):
        timers.result()
    outer, inner = timers.span("outer"), timers.span("inner")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(AssertionError, match="'outer' closed before 'inner'"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)


def test_whoever_asks_is_told_what_is_open():
    timers, told = Timers(), []
    timers.on_change = lambda names: told.append(list(names))
    with timers.span("step"), timers.span("generate"):
        pass
    assert told == [["step"], ["step", "generate"], ["step"], []]
