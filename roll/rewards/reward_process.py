"""One reward process, seen from its parent: start, call with a time limit, kill with everything it
started.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from typing import Any

from roll.rewards.base import RewardLoadError, RewardSpec
from roll.utils.child import ChildProcess

_POLL_S = 0.2


class ProcessDied(RuntimeError):
    """The process ended before it answered."""


class CallTimeout(RuntimeError):
    """The process didn't answer in time; it has been killed."""


class RewardProcess:
    """A child process that has loaded the reward functions of all domains. Not thread-safe: one caller at a
    time.
    """

    def __init__(self, specs: Mapping[str, RewardSpec], *, call_timeout_s: float) -> None:
        """Start the process without waiting for it; see `wait_ready`."""
        self.calls = 0
        self._ready = False
        self._load_error = ""
        self._connection, theirs = Pipe()
        code = f"from roll.rewards.reward_worker import main; main({theirs.fileno()}, {call_timeout_s * 1.25 + 5.0})"
        try:
            self._child = ChildProcess(code, [theirs.fileno()])
        finally:
            theirs.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an early death is reported by wait_ready
            self._connection.send_bytes(pickle.dumps(dict(specs)))

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the functions are loaded; raises `RewardLoadError` or `ProcessDied`."""
        if not self._ready and not self._load_error:
            try:
                reply = self._receive(timeout_s, "loading the reward functions")
            except CallTimeout as error:
                raise ProcessDied(str(error)) from None  # not the response's fault
            self._load_error = reply.get("error", "")
            self._ready = not self._load_error
        if self._load_error:
            raise RewardLoadError(f"a reward process can't load its functions:\n{self._load_error}")

    def call(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Score one pickled `RewardRequest`: {"value", "parts"} or {"error"}; raises `ProcessDied` or
        `CallTimeout`.
        """
        self.calls += 1
        self._child.limit_stderr()
        try:
            self._connection.send_bytes(request)
        except OSError:
            raise self._died("taking a request") from None
        return self._receive(timeout_s, "scoring")

    def kill(self) -> None:
        """End the process and all of its group; harmless when it has ended already."""
        self._child.kill()
        self._connection.close()

    def _receive(self, timeout_s: float, doing: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            # A grandchild may hold the pipe open after the process has died, so its end is looked at as well.
            ended = self._child.has_ended()
            try:
                if self._connection.poll(0.0 if ended else max(min(_POLL_S, left), 0.0)):
                    reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
                    return reply
            except (EOFError, OSError):
                ended = True
            if ended:
                raise self._died(doing)
            if left <= 0:
                self.kill()
                raise CallTimeout(f"no answer in {timeout_s:g} s while {doing}; the reward process was killed")

    def _died(self, doing: str) -> ProcessDied:
        how = self._child.how_it_ended(f"while {doing}")
        self.kill()
        return ProcessDied(f"the reward process {how}")
