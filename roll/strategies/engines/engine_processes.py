"""Finding an engine's processes by a mark in their environment, however deep they are and whose children by now."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path

OWNER = "ROLL_ENGINE_OWNER"
"""Environment variable with the id of the process that an engine's processes belong to."""

MARK = "ROLL_ENGINE_MARK"
"""Environment variable that an engine's processes inherit; its value is the engine's own."""


def marked_processes(mark: str) -> list[int]:
    """Return the ids of the processes that were started with this mark. Linux only; elsewhere none is found."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while we look, and those of others can't be read.
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return sorted(set(pids) - {os.getpid()})


def kill_marked(mark: str, timeout: float = 10.0) -> None:
    """Kill these processes and wait until they are gone, so that a successor finds their memory free."""
    deadline = time.monotonic() + timeout
    while (processes := marked_processes(mark)) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def end_with_owner() -> None:
    """Make this process end, and all with its mark, as soon as its owner ends, even one that was killed.

    Engines notice that one of their processes died, but not all of them that nobody uses them any more; they would hold
    their device's memory for ever. Does nothing in a process without owner and mark.
    """
    owner, mark = os.environ.get(OWNER), os.environ.get(MARK)
    if owner is None or mark is None or not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(int(owner))
    except ProcessLookupError:
        _end(mark)
        return
    threading.Thread(target=_wait_for, args=(handle, mark), name="end with owner", daemon=True).start()


def _wait_for(handle: int, mark: str) -> None:
    select.select([handle], [], [])  # readable once the process is gone; this wait is the life of the process
    _end(mark)


def _end(mark: str) -> None:
    kill_marked(mark)
    os._exit(1)
