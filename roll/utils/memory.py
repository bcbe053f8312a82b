"""Memory that Python and torch have freed goes back to the system, where other processes and phases can use it."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`."""
_LARGE = 4 << 20


def _glibc() -> Any:
    return ctypes.CDLL("libc.so.6")


def keep_little_freed_memory() -> None:
    """Have the C library give large blocks back as soon as they are freed, and share its pools between threads.

    By itself it raises these limits with use, and keeps up to a gigabyte of a trainer's activations. Does nothing where
    it isn't glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        glibc = _glibc()
        for parameter, value in ((_TRIM_THRESHOLD, _LARGE), (_MMAP_THRESHOLD, _LARGE), (_ARENA_MAX, 2)):
            glibc.mallopt(parameter, value)


def return_freed_memory() -> None:
    """Give back what is free now; takes milliseconds. Does nothing where it isn't glibc."""
    with contextlib.suppress(OSError, AttributeError):
        _glibc().malloc_trim(0)
