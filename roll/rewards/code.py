"""`code`: does the program of the response pass the tests of its task?

The program runs in a sandbox; the tests, and the answers that they expect, are elsewhere (`code_run.py`).
"""

from __future__ import annotations

from typing import Literal

from roll.isolation.sandbox.base import Sandbox
from roll.rewards.answers import visible_text
from roll.rewards.base import Reward
from roll.rewards.code_answers import Extract, complete, extract_program
from roll.rewards.code_run import RunSettings, run_tests
from roll.rewards.code_tests import BrokenTask, SourceTests, read_tests
from roll.types.trajectory import Task

Score = Literal["all", "fraction"]


def code(
    response: str,
    task: Task,
    *,
    sandbox: Sandbox,
    score: Score = "all",
    extract: Extract = "auto",
    timeout_s: float = 6.0,
    total_s: float = 20.0,
    memory_mb: int = 512,
    float_tolerance: float = 0.0,
) -> Reward:
    """Return 1.0 for a program that passes all tests, else 0.0; with `score: fraction` the share of tests that it
    passes.

    `timeout_s` (of processor time; twice that on the clock) and `memory_mb` are for one run of the program, `total_s`
    for all runs of one response. Parts: `correct` (all tests), `passed` (their share; with `score: all`, tests after a
    failure aren't run and don't count), `answered` (there was a program), `timed_out`.

    Raises:
        BrokenTask: a task without tests, or with tests that can't be run, whatever the response.
        SandboxError: the sandbox failed.
        ValueError: an option has no such value.
    """
    if score not in ("all", "fraction"):
        raise ValueError(f"code: score must be all or fraction, got {score!r}")
    if min(timeout_s, total_s, memory_mb) <= 0 or float_tolerance < 0:
        raise ValueError("code: timeout_s, total_s and memory_mb must be above 0, float_tolerance 0 or above")
    tests = read_tests(task)
    response = visible_text(response, task) or ""
    program = extract_program(response, extract)
    if isinstance(tests, SourceTests) and tests.prompt:
        program = complete(tests.prompt, tests.entry_point, response, program)
    if program is None:
        return Reward(0.0, {"correct": 0.0, "passed": 0.0, "answered": 0.0, "timed_out": 0.0})
    settings = RunSettings(
        timeout_s=timeout_s,
        total_s=total_s,
        memory_mb=memory_mb,
        float_tolerance=float_tolerance,
        stop_at_failure=score == "all",
    )
    try:
        results = run_tests(program, tests, sandbox, settings)
    except BrokenTask as error:
        raise BrokenTask(f"task {task.id!r}: {error}") from error
    correct, passed = float(results.passed == results.total), results.passed / results.total
    return Reward(
        passed if score == "fraction" else correct,
        {"correct": correct, "passed": passed, "answered": 1.0, "timed_out": float(results.timed_out)},
    )
