"""Memory that Python and torch have freed goes back to the system, where other processes and phases can use it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import psutil

_CONTROL_GROUP = Path("/sys/fs/cgroup")

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`."""
_NEVER = 1 << 30
_LARGEST_OF_OLD = 32 << 20
"""What some versions of glibc take at most as the size from which a block is mapped by itself."""


def available_memory() -> int:
    """Bytes that this process may still take, by the machine and by its control group."""
    available: int = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        limit, used = (int((_CONTROL_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, limit - used)
    return available


def _glibc() -> Any:
    return ctypes.CDLL("libc.so.6")


def reuse_freed_memory() -> None:
    """Have the C library use freed blocks again, large ones too, until `return_freed_memory`.

    All threads share one pool: what the engine frees in its own is what the trainer takes next.

    A large block is otherwise a mapping of its own: given back when freed, and zeroed by the kernel page by page when
    the next pass asks for as much. Does nothing where it isn't glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        glibc = _glibc()
        glibc.mallopt(_ARENA_MAX, 1)
        glibc.mallopt(_TRIM_THRESHOLD, _NEVER)
        # The one before turns off that glibc raises this by itself: it must get a number.
        glibc.mallopt(_MMAP_THRESHOLD, _NEVER) or glibc.mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD)


def return_freed_memory(*, if_scarce: bool = False) -> None:
    """Give back what is free now; takes milliseconds, and time for new pages later. Does nothing where it isn't glibc.

    `if_scarce`: only where this process has more than what is left.
    """
    if if_scarce and psutil.Process().memory_info().rss < available_memory():
        return
    with contextlib.suppress(OSError, AttributeError):
        _glibc().malloc_trim(0)
