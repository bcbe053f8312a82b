"""One reward process, seen from its parent: start, call with a time limit, kill with everything it
started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from roll.rewards.base import RewardLoadError, RewardSpec

_POLL_S = 0.2
_MAX_STDERR_BYTES = 1_000_000


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
        self._stderr = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the process
        self._connection, theirs = Pipe()
        code = f"from roll.rewards.worker import main; main({theirs.fileno()}, {call_timeout_s * 1.25 + 5.0})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # its own process group: killed as a whole, untouched by Ctrl-C
            )
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
        if os.fstat(self._stderr.fileno()).st_size > _MAX_STDERR_BYTES:
            self._stderr.truncate(0)
        try:
            self._connection.send_bytes(request)
        except OSError:
            raise self._died("taking a request") from None
        return self._receive(timeout_s, "scoring")

    def kill(self) -> None:
        """End the process and all of its group; harmless when it has ended already."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10.0)
        self._connection.close()
        self._stderr.close()

    def _receive(self, timeout_s: float, doing: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            # A grandchild may hold the pipe open after the process has died, so its end is looked at as well.
            ended = self._process.poll() is not None
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        how = f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit code {code}"
        self._stderr.seek(0)
        said = self._stderr.read()[-1000:].decode(errors="replace").strip()
        self.kill()
        return ProcessDied(
            f"the reward process ended with {how} while {doing}" + (f"; it wrote: {said}" if said else "")
        )


def _environment() -> dict[str, str]:
    """The parent's environment, with its import path, a fixed hash seed (sympy orders by hash) and one
    thread.
    """
    here = str(Path.cwd())
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **os.environ,
        **threads,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(entry or here for entry in sys.path)),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
    }
