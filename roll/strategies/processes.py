"""Finding an engine's processes by a mark in their environment, however deep they are and whose children by now."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

MARK = "ROLL_ENGINE_MARK"
"""Environment variable that an engine's processes inherit; its value is the engine's own."""


def marked_processes(mark: str) -> list[int]:
    """Ids of the processes that were started with this mark. Linux only; elsewhere none is found."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while we look, and those of others can't be read.
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return sorted(set(found) - {os.getpid()})


def kill_marked(mark: str) -> None:
    """Kill these processes at once."""
    for process in marked_processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
