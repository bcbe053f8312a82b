"""Child processes that run code which may hang, crash or fork: started clean, killed with all they started.

A plain child process, not a `multiprocessing` one: it never imports the main script, may be started from a daemon, and
loads only what its own code imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from roll.isolation.processes.guard import GUARD
from roll.isolation.processes.interpreter import own_entries, start_code

_MAX_STDERR_BYTES = 1_000_000
_MAX_STDERR_TAIL = 1000
_MAX_TRACEBACK_CHARS = 20_000


class ChildProcess:
    """Runs Python code in a process group of its own; what it prints is dropped, the end of its errors is kept."""

    def __init__(
        self,
        code: str,
        fds: Sequence[int],
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
        hash_seed: int = 0,
    ) -> None:
        """Start `python -c code` without waiting for it; it inherits `fds`.

        Args:
            environment: None: this process's.
            python: an interpreter of its own, which gets this package and its own packages (`interpreter.py`).
            hash_seed: its PYTHONHASHSEED.
        """
        # Appending, so that writing goes on at the start after it was cut.
        self._stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, "-c", code if python is None else start_code() + code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=fds,
                env=child_environment(environment, foreign=python is not None, hash_seed=hash_seed),
                start_new_session=True,  # its own process group: killed as a whole, untouched by Ctrl-C
            )
        except BaseException:
            self._stderr.close()
            raise
        GUARD.add(self._process.pid)

    @property
    def pid(self) -> int:
        """Return its id, which is also its group's."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Return whether it has exited; a pipe doesn't show that while a grandchild holds it open."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code, negative for a signal; None if it is still running after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def limit_stderr(self) -> None:
        """Drop what it wrote when that has become much."""
        if os.fstat(self._stderr.fileno()).st_size > _MAX_STDERR_BYTES:
            self._stderr.truncate(0)

    def how_it_ended(self, when: str) -> str:
        """Return `ended with exit code 3 <when>; it wrote: ...`. Kills what is left of its group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        if code is None:
            how = "closed its pipe"
        else:
            how = f"ended with signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
        size = os.fstat(self._stderr.fileno()).st_size
        self._stderr.seek(max(0, size - _MAX_STDERR_TAIL))
        stderr = self._stderr.read().decode(errors="replace").strip()
        self.kill()
        return f"{how} {when}" + (f"; it wrote: {stderr}" if stderr else "")

    def kill(self) -> None:
        """End the process and all of its group; harmless when it has ended already."""
        if self._stderr.closed:
            return  # its id may be another's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10.0)
        GUARD.remove(self._process.pid)
        self._stderr.close()


def _signal_name(number: int) -> str:
    """Return `SIGKILL`, or the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def child_environment(
    environment: Mapping[str, str] | None = None, *, foreign: bool = False, hash_seed: int = 0
) -> dict[str, str]:
    """Return the parent's environment, or another, with its import path, a fixed hash seed (sets have an order) and one
    thread. `foreign`: for another interpreter, which must not find the packages of this one."""
    here = str(Path.cwd())
    path = [entry or here for entry in sys.path]
    environment = dict(os.environ if environment is None else environment)
    if foreign:
        environment.pop("PYTHONHOME", None)
        path = own_entries(path)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **environment,
        **threads,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": str(hash_seed),
    }


def short_traceback(skip: int) -> str:
    """Return the current exception without its first `skip` frames, cut in the middle when long."""
    kind, value, frames = sys.exc_info()
    for _ in range(skip):
        frames = frames.tb_next if frames is not None else None
    text = "".join(traceback.format_exception(kind, value, frames)).strip()
    half = _MAX_TRACEBACK_CHARS // 2
    return text if len(text) <= _MAX_TRACEBACK_CHARS else f"{text[:half]}\n[...]\n{text[-half:]}"
