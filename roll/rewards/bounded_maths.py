r"""math-verify in a process of its own, with 2 s of CPU time and 200 MB for each answer.

An expression of ten characters can take any time and memory to evaluate, inside of functions that no signal handler
interrupts: only the end of a process ends them. So a guardian process imports sympy once and forks a worker, which
answers one request after the other under limits that the kernel enforces. If the worker is ended, the guardian says so
and forks the next. It is started when the first answer needs it, and ends with the process that asks it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

from roll.processes.child import child_environment
from roll.processes.limits import memory_in_use_mb, passed_environment

CPU_SECONDS = 2.0
MEMORY_MB = 200
_KEPT_MB = 50
"""What caches may hold after an answer: what one response left there mustn't count against the next one's."""
_WORN_OUT = 3
_START_SECONDS = 60.0


class TooHard(Exception):
    """An expression whose evaluation takes more than the limits."""


class BoundedMaths:
    """Compares answers in the guardian's worker. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def same(self, answer: str, gold: str) -> bool:
        """Whether two normalised answers are equal; raises `TooHard`."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([answer, gold]).encode() + b"\n")
                process.stdin.flush()
                # A worker that was killed while it waited is no answer to this question: it would have begun with it.
                said = process.stdout.readline() if process.stdout.readline() == BEGUN else b""
            except OSError:
                said = b""
        if said not in (b"1\n", b"0\n", b"hard\n"):
            self.close()
            raise RuntimeError("the process that compares mathematical answers ended; it is started again")
        if said == b"hard\n":
            raise TooHard
        return said == b"1\n"

    def close(self) -> None:
        """End the guardian and its worker."""
        process, self._process = self._process, None
        if process is not None and self._pid == os.getpid():
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):  # what was still to be written
                process.stdin.close()  # type: ignore[union-attr]
            process.stdout.close()  # type: ignore[union-attr]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._pid != os.getpid():  # a forked child doesn't share its parent's
            self._pid = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from roll.rewards.bounded_maths import guard; guard()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(passed_environment(os.environ)),
            )
        return self._process


BEGUN = b"begun\n"
MATHS = BoundedMaths()
atexit.register(MATHS.close)


def guard() -> None:
    """Fork workers until there is nobody to ask."""
    import math_verify  # noqa: F401 - loaded once, shared by all workers

    logging.disable(logging.CRITICAL)
    _compare("x+1", "1+x")  # what loads late
    while True:
        worker = os.fork()
        if worker == 0:
            _work()
        _, status = os.waitpid(worker, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        if code != _WORN_OUT:
            os.write(1, b"hard\n")


def _work() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is in
    _end_with_parent()
    at_start = memory_in_use_mb()
    most = int((at_start + MEMORY_MB) * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    line = b""
    while True:
        while not line.endswith(b"\n"):
            piece = os.read(0, 1 << 16)
            if not piece:
                os._exit(0)
            line += piece
        answer, gold = json.loads(line)
        line = b""
        os.write(1, BEGUN)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            equal = _compare(answer, gold)
        except (MemoryError, RecursionError):
            os._exit(1)
        except Exception:  # noqa: BLE001 - what can't be read is no answer
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, b"1\n" if equal else b"0\n")
        if memory_in_use_mb() > at_start + _KEPT_MB:
            os._exit(_WORN_OUT)


def _end_with_parent() -> None:
    """End when the guardian is killed."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@lru_cache(maxsize=256)
def _parse(answer: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(rf"\boxed{{{answer}}}", parsing_timeout=0))


def _compare(answer: str, gold: str) -> bool:
    from math_verify import verify

    return bool(verify(list(_parse(gold)), list(_parse(answer)), timeout_seconds=0))
