"""Runs tests for the fault campaign: a pytest plugin, and as a program a process that starts pytest quickly.

The program has imported what takes long and forks for each line of its input, a list of pytest's arguments; it answers
with the exit code. The plugin reads `FAULTS_ORDER`, a JSON file: `seconds`, for how long tests may run in all, and
`tests`, which ones and how long each took before (null: all). It writes a JSON line per test to `FAULTS_REPORT`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import pytest


class Watch:
    """Picks and orders tests, ends in time, and writes down how each test went."""

    def __init__(self) -> None:
        self._is_xdists = "PYTEST_XDIST_WORKER" in os.environ
        self._order = json.loads(Path(os.environ["FAULTS_ORDER"]).read_text("utf-8"))
        self._end = time.monotonic() + self._order["seconds"]
        self._seconds: dict[str, float] = {}
        self._outcome: dict[str, str] = {}

    def _write(self, name: str, outcome: str | None, seconds: float = 0.0) -> None:
        with open(os.environ["FAULTS_REPORT"], "a", encoding="utf-8") as report:
            report.write(json.dumps({"id": name, "outcome": outcome, "seconds": round(seconds, 3)}) + "\n")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        self._write(f"process {os.getpid()}", None)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if (tests := self._order["tests"]) is not None:
            there = {item.nodeid: item for item in items}
            items[:] = [there[name] for name in tests if name in there]
            for item in items:  # a fault may make a test wait for ever
                item.add_marker(pytest.mark.timeout(60 + 5 * tests[item.nodeid]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self._is_xdists:
            self._write(report.nodeid, "failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._is_xdists:
            return
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if self._outcome.get(name) != "failed" and (report.when == "call" or report.outcome != "passed"):
            self._outcome[name] = report.outcome
        if report.when == "teardown":
            self._write(name, self._outcome.get(name), self._seconds[name])
        if time.monotonic() > self._end:
            self._session.shouldstop = "the time is up"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watch(), "watch")


def main() -> None:
    import torch
    import transformers

    assert torch.get_num_threads() == 1 and transformers.LlamaForCausalLM
    main_module = importlib.import_module("pytest.__main__")  # what processes that tests spawn import, too
    sys.path[0] = os.getcwd()
    for line in sys.stdin:
        if (process := os.fork()) == 0:
            log = os.open("../log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.modules["__main__"] = main_module
            sys.argv = ["pytest", *json.loads(line)]
            code = pytest.main(sys.argv[1:])
            sys.stdout.flush()
            os._exit(code)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
