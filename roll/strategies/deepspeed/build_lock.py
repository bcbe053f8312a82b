"""Say which lock a start waits for: torch builds operators under a file that a killed process leaves behind.

torch 2.13's `FileBaton.wait` sleeps until the file is gone, without a limit and without a word.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0


@contextlib.contextmanager
def reported_locks(role: str, *, after: float = 60.0) -> Iterator[None]:
    """Inside, a wait of this thread for a lock of torch's extension builds is logged after so many seconds, once."""
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(role, after, threading.get_ident(), ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(role: str, after: float, thread: int, ended: threading.Event) -> None:
    since: dict[str, float] = {}
    reported: set[str] = set()
    while not ended.wait(min(_POLL_SECONDS, after)):
        file = _awaited_lock(thread)
        if file is None:
            continue
        waited = time.monotonic() - since.setdefault(file, time.monotonic())
        if waited >= after and file not in reported:
            reported.add(file)
            _logger.warning(
                "%s: waiting for %.0f s for the lock file %s, under which torch builds one of DeepSpeed's operators. "
                "Either another process builds it now (a compiler runs then), or one that was killed has left the "
                "file: in that case delete it, and this start goes on",
                role,
                waited,
                file,
            )


def _awaited_lock(thread: int) -> str | None:
    """Return the file that the thread waits for, read from its stack; None: it doesn't wait."""
    from torch.utils.file_baton import FileBaton

    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is FileBaton.wait.__code__:
            return str(frame.f_locals["self"].lock_file_path)
        frame = frame.f_back
    return None
