"""Folders that belong to one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from pathlib import Path


class FolderInUse(ValueError):
    """Another process works in a folder; nothing in it is ours to touch."""


@contextlib.contextmanager
def folder_lock(folder: Path, name: str = ".run.lock", *, busy: ValueError) -> Iterator[None]:
    """Be the only process that uses `folder`, made if absent, or raise `busy`. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        yield


@contextlib.contextmanager
def run_lock(folders: Mapping[str, Path]) -> Iterator[None]:
    """Be the only run that writes to these folders, by their keys; some may be one folder, or lie in another."""
    with contextlib.ExitStack() as stack:
        mine: set[Path] = set()
        for key, folder in folders.items():
            if folder.resolve() not in mine:
                busy = FolderInUse(f"another run is writing to {folder}; give each run its own {key}")
                stack.enter_context(folder_lock(folder, busy=busy))
                mine.add(folder.resolve())
        yield
