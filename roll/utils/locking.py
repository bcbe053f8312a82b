"""Folders that belong to one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class FolderInUse(ValueError):
    """Another process works in a folder; nothing in it is ours to touch."""


@contextlib.contextmanager
def folder_lock(folder: Path, name: str = ".run.lock", busy: ValueError | None = None) -> Iterator[None]:
    """Be the only process that uses `folder`, made if absent, or raise `busy`. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy or FolderInUse(f"another run is writing to {folder}; give each run its own output_dir") from None
        yield


@contextlib.contextmanager
def run_lock(output: Path, logs: Path) -> Iterator[None]:
    """Be the only run that writes to these two folders, of which the second may lie in the first."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder_lock(output))
        if logs.resolve() != output.resolve():
            busy = FolderInUse(f"another run is writing to {logs}; give each run its own logging_dir")
            stack.enter_context(folder_lock(logs, busy=busy))
        yield
