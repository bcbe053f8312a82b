"""Folders that belong to one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder_lock(folder: Path, name: str = ".run.lock", busy: ValueError | None = None) -> Iterator[None]:
    """Be the only process that uses `folder`, made if absent, or raise `busy`. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy or ValueError(f"another run is writing to {folder}; give each run its own output_dir") from None
        yield
