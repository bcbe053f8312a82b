"""Running the tests of a task against a program, which is never where the tests are.

Tests in Python run in rounds: the checker (`code_checker.py`) says which calls it needs, the program's process
(`code_program.py`) makes them, the checker goes on with the results. Each is a run of its own in the sandbox, and plain
values alone go from one to the other. The first round doesn't depend on the program, so a task's responses share it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll.isolation.sandbox.base import Limits, Outcome, Program, Sandbox
from roll.rewards.code_checker import MAX_OPERATIONS
from roll.rewards.code_tests import BrokenTask, CallTests, SourceTests, StdioTests, Tests
from roll.rewards.code_values import decode, encode

_CHECKER_S = 10.0
_OUTPUT_BYTES = 4_000_000
_CALLS_OUTPUT_BYTES = 262_144
"""Of results that are decoded here, where a huge number must cost little; what is expected comes on top, four times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How the program runs, and what counts as equal."""

    timeout_s: float = 6.0
    total_s: float = 20.0
    memory_mb: int = 512
    float_tolerance: float = 0.0
    stop_at_failure: bool = True


@dataclass(slots=True)
class TestResults:
    """How many tests there are, how many passed, and whether the program ran out of time."""

    total: int
    passed: int = 0
    timed_out: bool = False


class _Clock:
    def __init__(self, settings: RunSettings) -> None:
        self._settings, self._ends_at = settings, time.monotonic() + settings.total_s

    def over(self) -> bool:
        return time.monotonic() >= self._ends_at

    def limits(self, output_bytes: int) -> Limits:
        """Return the limits of the next run: what is left of the time for all of them."""
        left = max(0.1, self._ends_at - time.monotonic())
        cpu_s = min(self._settings.timeout_s, left)
        # Twice the time on the clock: the program may share its core with others.
        wall_s, memory_mb = min(2 * cpu_s, left), self._settings.memory_mb
        return Limits(wall_s=wall_s, cpu_s=cpu_s, memory_mb=memory_mb, output_bytes=output_bytes)


def run_tests(program: str, tests: Tests, sandbox: Sandbox, settings: RunSettings) -> TestResults:
    """Run a program against the tests of its task.

    Raises:
        BrokenTask: the tests can't be run, whatever the program.
        SandboxError: the sandbox failed.
    """
    if isinstance(tests, StdioTests):
        return _run_stdio(program, tests, sandbox, settings)
    if isinstance(tests, CallTests):
        return _run_calls(program, tests, sandbox, settings)
    return _run_source(program, tests, sandbox, settings)


# --- standard input and output ---------------------------------------------------------


def _run_stdio(program: str, tests: StdioTests, sandbox: Sandbox, settings: RunSettings) -> TestResults:
    results, clock = TestResults(len(tests.inputs)), _Clock(settings)
    for text, expected in zip(tests.inputs, tests.outputs, strict=True):
        limits = clock.limits(65_536 + 4 * len(expected.encode()))
        outcome = sandbox.run(Program(source=program, stdin=text.encode()), limits)
        results.timed_out |= outcome.ending == "timeout"
        printed = outcome.stdout.decode("utf-8", "replace")
        right = outcome.ending == "exited" and outcome.exit_code == 0
        right = right and same_output(printed, expected, settings.float_tolerance)
        results.passed += right
        if settings.stop_at_failure and not right:
            break
        if clock.over():
            results.timed_out = True  # right so far: there was no time for all of its tests
            break
    return results


def same_output(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """Return whether two texts have the same lines but for blanks at their ends; numbers may differ by `tolerance`."""
    ours, theirs = ([line.rstrip() for line in text.strip("\r\n").split("\n")] for text in (printed, expected))
    while ours and not ours[-1]:
        ours.pop()
    while theirs and not theirs[-1]:
        theirs.pop()
    if ours == theirs or not tolerance:
        return ours == theirs
    pairs = [(a.split(), b.split()) for a, b in zip(ours, theirs, strict=False)]
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True)) for a, b in pairs
    )


_NUMBER = re.compile(r"[-+]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,3})?$")


def _same_word(one: str, other: str, tolerance: float) -> bool:
    if one == other:
        return True
    return bool(_NUMBER.match(one) and _NUMBER.match(other)) and _near(float(one), float(other), tolerance)


def _near(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


# --- calls, whose results we compare ---------------------------------------------------


def _run_calls(program: str, tests: CallTests, sandbox: Sandbox, settings: RunSettings) -> TestResults:
    in_class = re.search(r"^class Solution\b", program, re.MULTILINE) is not None
    in_class = in_class and not re.search(rf"^def {tests.function}\b", program, re.MULTILINE)
    states = []
    for number, arguments in enumerate(tests.inputs):
        if in_class:
            requests = [_ask("name", "Solution"), ["call", [["$", 0]], {}]]
            requests.append(["get", [["$", 1], tests.function], {}])
        else:
            requests = [_ask("name", tests.function)]
        requests.append(["call", [["$", len(requests) - 1], *map(encode, arguments)], {}])
        states.append(_State(number, requests=requests))
    results, clock = TestResults(len(states)), _Clock(settings)
    open_states, output_bytes = states, _CALLS_OUTPUT_BYTES + 4 * len(repr(tests.outputs))
    while open_states:
        _Answers(results, output_bytes).collect(program, "", open_states, sandbox, clock)
        for state in open_states:
            state.decide(tests.outputs[state.number], settings.float_tolerance)
        open_states = [state for state in states if state.state == "open"]
        failed = any(state.state == "failed" for state in states)
        if clock.over() or (settings.stop_at_failure and failed):
            break
    results.passed = sum(state.state == "passed" for state in states)
    return results


def _ask(operation: str, name: str) -> list[Any]:
    return [operation, [name], {}]


def same_value(result: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Return whether a function returned what JSON could say of it: lists stand for tuples, texts for keys."""
    if isinstance(result, (list, tuple)) and isinstance(expected, (list, tuple)):
        pairs = zip(result, expected, strict=False)
        return len(result) == len(expected) and all(same_value(a, b, tolerance) for a, b in pairs)
    if isinstance(result, dict) and isinstance(expected, dict):
        theirs = {str(key): value for key, value in expected.items()}
        ours = {str(key): value for key, value in result.items()}
        return ours.keys() == theirs.keys() and all(same_value(ours[k], theirs[k], tolerance) for k in ours)
    if tolerance and isinstance(result, (int, float)) and isinstance(expected, (int, float)):
        try:
            return _near(float(result), float(expected), tolerance)
        except OverflowError:
            return result == expected
    return bool(result == expected)


# --- tests in Python -------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """One test: the operations that it needs, and the answers so far."""

    number: int
    state: str = "open"
    requests: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def decide(self, expected: Any, tolerance: float) -> None:
        """Compare the result of the last call."""
        if not self.answers:
            return
        self.state = "failed"
        if len(self.answers) < len(self.requests) or self.answers[-1] is None:
            return
        try:
            kind, content, *_ = self.answers[-1]
            result = decode(content)
            result = list(result) if type(result) is type(iter([])) else result
            right = same_value(result, expected, tolerance)
            if isinstance(expected, list) and len(expected) == 1:  # some data sets wrap results
                right = right or same_value(result, expected[0], tolerance)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return
        if kind == "ok" and right:
            self.state = "passed"


class _Answers:
    """What a run of the program has answered."""

    def __init__(self, results: TestResults, output_bytes: int = _OUTPUT_BYTES) -> None:
        self._results, self._output_bytes = results, output_bytes

    def collect(self, program: str, before: str, states: Sequence[_State], sandbox: Sandbox, clock: _Clock) -> None:
        """Make the calls of all open tests; the test at which the program ended gets None for the missing answer."""
        asked = {"before": before, "program": program, "tests": [[state.number, state.requests] for state in states]}
        limits = clock.limits(self._output_bytes)
        outcome = sandbox.run(Program(source=program_source(), stdin=json.dumps(asked).encode()), limits)
        self._results.timed_out |= outcome.ending == "timeout"
        loaded = False
        by_number: dict[int, list[Any]] = {state.number: [] for state in states}
        # A program that finds this descriptor may write millions of lines; nobody reads more than were asked for.
        most = 1 + sum(len(state.requests) for state in states)
        for line in outcome.stdout.split(b"\n", most)[:most]:
            message = _parse(line)
            loaded |= message == ["loaded"]
            if isinstance(message, list) and len(message) == 3 and isinstance(message[2], list):
                number, index, answer = message
                if isinstance(number, int) and number in by_number and index == len(by_number[number]):
                    by_number[number].append(answer)
        for state in states:
            state.answers = by_number[state.number][: len(state.requests)]
        for state in states:
            if len(state.answers) < len(state.requests):
                state.answers.append(None)
                if loaded:
                    break  # the tests behind it have had no turn


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _run_source(program: str, tests: SourceTests, sandbox: Sandbox, settings: RunSettings) -> TestResults:
    first = _first_round(tests, _Held(sandbox))
    # A test that passes without the program says nothing about it: no program is given a share for that.
    states = [_State(item["test"], requests=item["requests"]) for item in first if item["state"] == "open"]
    results, clock = TestResults(len(states)), _Clock(settings)
    open_states = states
    answers = _Answers(results, max(_OUTPUT_BYTES, 4 * len(tests.setup)))  # results may be as long as what is expected
    while open_states:
        answers.collect(program, tests.before, open_states, sandbox, clock)
        asked = [state for state in open_states if state.answers]
        reported = _check(tests, [[s.number, s.requests, s.answers] for s in asked], sandbox)
        for state, item in zip(asked, reported or (), strict=bool(reported)):
            state.state, state.requests, state.answers = item["state"], item["requests"], []
        if reported is None:  # what the program answered was too much for the tests
            break
        open_states = [state for state in states if state.state == "open"]
        failed = any(state.state == "failed" for state in states)
        if settings.stop_at_failure and failed:
            break
        if open_states and clock.over():
            results.timed_out = True  # right so far: there was no time for all of its rounds
            break
    results.passed = sum(state.state == "passed" for state in states)
    return results


class _Held:
    """A sandbox as a part of a key: all of them run the tests alike."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=4096)
def _first_round(tests: SourceTests, held: _Held) -> list[dict[str, Any]]:
    """Return each test and the operations that it needs before any is answered. Raises `BrokenTask`."""
    outcome = held.sandbox.run(_checker(tests, None), _checker_limits(tests))
    report = _parse(outcome.stdout)
    if not isinstance(report, dict):
        raise BrokenTask(f"its tests don't come to an end by themselves: {_ending(outcome)}")
    if "broken" in report:
        raise BrokenTask(f"its tests can't be run: {report['broken']}")
    results: list[dict[str, Any]] = [item for item in report["results"] if item["state"] != "skipped"]
    if not results:
        raise BrokenTask("it has no tests")
    for item in results:
        if item["state"] == "failed":
            raise BrokenTask(f"{report['names'][item['test']]} fails whatever the program does: {item['why']}")
        if len(item["requests"]) >= MAX_OPERATIONS:
            raise BrokenTask(f"{report['names'][item['test']]} uses the program more than {MAX_OPERATIONS:,} times")
    if not any(request[0] != "name" for item in results for request in item["requests"]):
        raise BrokenTask("none of its tests calls the program")
    return results


def _check(tests: SourceTests, rounds: list[Any], sandbox: Sandbox) -> list[dict[str, Any]] | None:
    outcome = sandbox.run(_checker(tests, rounds), _checker_limits(tests))
    report = _parse(outcome.stdout)
    if isinstance(report, dict) and "broken" in report:
        raise BrokenTask(f"its tests can't be run: {report['broken']}")
    return report["results"] if isinstance(report, dict) else None


def _checker(tests: SourceTests, rounds: list[Any] | None) -> Program:
    asked = {
        "setup": tests.setup, "tests": tests.tests, "discover": tests.discover, "modules": tests.modules,
        "program_names": tests.program_names, "rounds": rounds, "numpy": "numpy" in tests.setup,
    }  # fmt: skip
    return Program(source=checker_source(tests.discover, "numpy" in tests.setup), stdin=json.dumps(asked).encode())


def _checker_limits(tests: SourceTests) -> Limits:
    output_bytes = max(2 * _OUTPUT_BYTES, 8 * len(tests.setup))  # it names every argument
    return Limits(wall_s=_CHECKER_S, cpu_s=_CHECKER_S, memory_mb=1024, output_bytes=output_bytes)


def _ending(outcome: Outcome) -> str:
    return f"{outcome.ending} {outcome.note} {outcome.stderr[-300:].decode('utf-8', 'replace')}"


# --- the sources ------------------------------------------------------------------------


@lru_cache(maxsize=1)
def program_source() -> str:
    """Return what runs around the program."""
    return _bundle("code_values", "code_program") + "\nrun_program()\nos._exit(0)\n"


@lru_cache(maxsize=4)
def checker_source(discover: bool, numpy: bool) -> str:
    """Return what runs the tests; with a small pytest if they are to be discovered, and a small numpy if they import
    it."""
    stand_ins = [name for name, wanted in (("code_pytest", discover), ("code_numpy", numpy)) if wanted]
    return _bundle("code_values", "code_program", *stand_ins, "code_checker") + "\ncheck()\nos._exit(0)\n"


def _bundle(*names: str) -> str:
    """Join files of this package into one source: a sandbox has no packages."""
    parts = ["from __future__ import annotations"]
    for name in names:
        text = Path(__file__).with_name(f"{name}.py").read_text("utf-8").partition('\nif __name__ == "__main__":')[0]
        parts.append(re.sub(r"^from (?:__future__|roll\.[\w.]+) import .*\n", "", text, flags=re.MULTILINE))
    return "\n".join(parts)
