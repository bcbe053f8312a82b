"""Answers that take for ever: they cost 2 s and 200 MB, count as wrong and are counted, and the next one is scored."""

from __future__ import annotations

import json
import os
import signal

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
    os.kill(worker.pid, signal.SIGSTOP)
    with MATHS._lock:
        assert MATHS._process.stdin is not None and MATHS._process.stdout is not None
        MATHS._process.stdin.write(json.dumps(["x", "y"]).encode() + b"\n")
        MATHS._process.stdin.flush()
        os.kill(worker.pid, signal.SIGPROF)
        os.kill(worker.pid, signal.SIGCONT)
        assert MATHS._process.stdout.readline() == b"hard\n"
    assert MATHS.same("x+1", "1+x")


def test_a_guardian_that_is_killed_is_started_again() -> None:
    assert MATHS.same("x+1", "1+x")
    assert MATHS._process is not None
    os.kill(MATHS._process.pid, signal.SIGKILL)
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
