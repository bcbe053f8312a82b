"""Answers that take for ever: they cost 2 s and 200 MB, count as wrong and are counted, and the next one is scored."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from roll.rewards import bounded_maths
from roll.rewards.bounded_maths import MATHS, TooHard
from roll.rewards.math_rule import math_rule
from roll.types.episode import Task


def task(truth: object) -> Task:
    return Task(id="t:1", source="t", payload={"ground_truth": truth}, seed=0, tag="t", domain="math")


def cpu_seconds() -> float:
    """Of the guardian's ended workers."""
    assert MATHS._process is not None
    times = psutil.Process(MATHS._process.pid).cpu_times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("answer", [r"(x+y+z)^{99}", r"\binom{999999}{499999}"])
def test_a_hard_answer_costs_its_limit_and_counts_as_wrong(answer: str) -> None:
    assert math_rule(r"\boxed{x+1}", task("1+x")).value == 1.0
    before = cpu_seconds()
    reward = math_rule(rf"\boxed{{{answer}}}", task("x^2+1"))
    assert reward.value == 0.0
    assert cpu_seconds() - before < bounded_maths.CPU_SECONDS + 1.0
    assert math_rule(r"\boxed{x+1}", task("1+x")).value == 1.0


@pytest.mark.parametrize(
    "answer", ["[" * 100_000 + "1" + "]" * 100_000, "(" * 40 + "1" + ")" * 40, "9**9**9", "9^{9^9}", "1e999999"]
)
def test_what_is_seen_to_be_hard_costs_nothing(answer: str) -> None:
    reward = math_rule(rf"\boxed{{{answer}}}", task("x^2+1"))
    assert reward.value == 0.0
    if answer not in ("1e999999", "9**9**9"):  # these are read as something else
        assert reward.parts["too_hard"] == 1.0


def test_a_worker_that_is_ended_by_a_limit_is_told_as_such() -> None:
    assert MATHS.same("x+1", "1+x")
    assert MATHS._process is not None
    (worker,) = psutil.Process(MATHS._process.pid).children()
    used = worker.cpu_times().user

    def end_it_at_work() -> None:
        while worker.cpu_times().user < used + 0.1:
            time.sleep(0.01)
        os.kill(worker.pid, signal.SIGPROF)

    ender = threading.Thread(target=end_it_at_work)
    ender.start()
    with pytest.raises(TooHard):
        MATHS.same(r"(x+y+z)^{99}", "x^2+1")
    ender.join()
    assert MATHS.same("x+1", "1+x")


def test_a_worker_that_is_killed_while_it_waits_answers_nobody() -> None:
    assert MATHS.same("x+1", "1+x")
    assert MATHS._process is not None
    (worker,) = psutil.Process(MATHS._process.pid).children()
    worker.kill()
    with pytest.raises(RuntimeError, match="it is started again"):
        MATHS.same("x", "y")
    assert not MATHS.same("x", "y")
    assert MATHS.same("x+1", "1+x")


def test_a_guardian_that_is_killed_is_started_again() -> None:
    assert MATHS.same("x+1", "1+x")
    assert MATHS._process is not None
    MATHS._process.kill()
    MATHS._process.wait()
    time.sleep(0.2)  # its worker is killed when it has ended
    with pytest.raises(RuntimeError, match="it is started again"):
        MATHS.same("x", "y")
    assert MATHS.same("x+1", "1+x")


def test_a_hard_ground_truth_is_an_error_that_names_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(answer: str, gold: str) -> bool:
        if "z" in answer + gold:
            raise TooHard
        return False

    monkeypatch.setattr(MATHS, "same", same)
    with pytest.raises(ValueError, match=r"'t:1': ground truth 'x\+z' takes more than 2 s"):
        math_rule(r"\boxed{x+1}", task("x+z"))
    parts = math_rule(r"\boxed{x+z}", task("x+1")).parts
    assert parts == {"correct": 0.0, "answered": 0.0, "format": 1.0, "too_hard": 1.0}


def test_what_an_answer_leaves_in_memory_does_not_count_against_the_next() -> None:
    assert MATHS.same("x+1", "1+x")
    assert MATHS._process is not None
    guardian = psutil.Process(MATHS._process.pid)
    (worker,) = guardian.children()
    for more in range(3):  # each leaves 34 MB, which sympy keeps
        assert not MATHS.same(rf"2^{{{90_000_000 + 1000 * more}}}+x", f"x+{more}")
    assert MATHS.same("x+2", "2+x")
    (successor,) = guardian.children()
    assert successor.pid != worker.pid
