"""Files that libraries write for their owner alone get the permissions that the umask gives to any other new file."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

_lock = threading.Lock()


def apply_umask(folder: Path) -> None:
    """Open the files below a folder as far as the umask allows: safetensors 0.8 writes all of its files with mode 0600.

    Nothing is closed, and files of another owner stay as they are.
    """
    wanted = 0o666 & ~_umask()
    for path in [folder] if folder.is_file() else folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and (mode := path.stat().st_mode & 0o7777) | wanted != mode:
                path.chmod(mode | wanted)


def _umask() -> int:
    """Return this process's umask; only Linux tells it without a change, which other threads would see."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(match[1], 8)
    with _lock:
        mask = os.umask(0o077)
        os.umask(mask)
    return mask
