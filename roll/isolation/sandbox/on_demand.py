"""A sandbox that opens when the first program runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from roll.isolation.sandbox.base import Limits, Outcome, Program, Running, Sandbox
from roll.isolation.sandbox.open_sandbox import open_sandbox


class SandboxOnDemand(Sandbox):
    """For functions that execute model output for some tasks alone: a run without such tasks starts nothing.

    Every method that runs something raises `SandboxUnavailable` where the sandbox doesn't work.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._opened: Sandbox | None = None
        self._lock = threading.Lock()

    def _open(self) -> Sandbox:
        with self._lock:
            if self._opened is None:
                self._opened = open_sandbox(self.name)
            return self._opened

    def run(self, program: Program, limits: Limits) -> Outcome:
        return self._open().run(program, limits)

    def start(self, program: Program, limits: Limits) -> Running:
        return self._open().start(program, limits)

    def extended(self, import_paths: Sequence[str], preload: Sequence[str] = ()) -> Sandbox:
        return self._open().extended(import_paths, preload)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
