"""Full disks: how libraries say it, and how we do."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MESSAGES = re.compile(
    # The system's words; Rust's; what torch says of any write that fails, without the reason.
    r"No space left on device|Disk quota exceeded|\(os error 28\)|PytorchStreamWriter failed|inline_container\.cc"
)


def is_disk_full(error: BaseException) -> bool:
    """Return whether a full disk is behind an error, also one of a library or of another process, as words."""
    return any(
        (isinstance(each, OSError) and each.errno in _FULL) or _MESSAGES.search(str(each)) is not None
        for each in _chain(error)
    )


def free_space(folder: Path) -> str:
    """Return `3.1 GiB` or `12 MiB`: what is free in a folder, or where it would be made."""
    free = _free(folder)
    return f"{free / 2**30:.1f} GiB" if free >= 2**30 else f"{free / 2**20:.0f} MiB"


def disk_full_sentence(error: BaseException, folders: Iterable[Path]) -> str:
    """Return what to tell the user: the folder that the error names, or else that of `folders` with the least room."""
    named = [Path(name).absolute().parent for name in map(_full_file, _chain(error)) if name]
    folder = named[0] if named else min((folder.absolute() for folder in folders), key=_free)
    return f"the disk is full: {free_space(folder)} are free in {folder}; delete what isn't needed, or write elsewhere"


def first_line(error: BaseException) -> str:
    """Return an error in one line: torch adds a C++ stack to what it says, a worker's error its traceback."""
    return str(error).strip().partition("\n")[0][:300]


def _full_file(error: BaseException) -> str:
    """Return the file that couldn't be written, if the error names one."""
    named = isinstance(error, OSError) and error.errno in _FULL and isinstance(error.filename, str)
    return str(getattr(error, "filename", "")) if named else ""


def _free(folder: Path) -> int:
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(path).free
    return 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    visited: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop(0)
        if each is not None and id(each) not in visited:
            visited.add(id(each))
            yield each
            left += [each.__cause__, each.__context__]
