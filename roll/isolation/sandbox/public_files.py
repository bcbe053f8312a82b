"""Which parts of the system's folders every user of the machine may read."""

from __future__ import annotations

import os
import stat
from functools import cache

_FILE = stat.S_IROTH
_FOLDER = stat.S_IROTH | stat.S_IXOTH


@cache
def public_parts(path: str) -> tuple[str, ...]:
    """Return the folder itself if all users may read all that is in it, else the largest parts of it that they may.

    Links aren't followed, and aren't parts: what they lead to is read where it is. A folder that can't be listed, or
    isn't there, has no parts. Looking at `/usr` takes a second or two; it is done once in a process.
    """
    real = os.path.realpath(path)
    try:
        if not _is_public(os.stat(real)):
            return ()
        parts = None if os.path.isfile(real) else _parts(real)
        return (real,) if parts is None else parts
    except OSError:
        return ()


def _parts(folder: str) -> tuple[str, ...] | None:
    """Return the public parts of a public folder; None: all of it is."""
    folders: list[str] = []
    parts: list[str] = []
    with os.scandir(folder) as iterator:
        entries = list(iterator)
    for entry in entries:
        if entry.is_symlink():
            continue
        try:
            if not _is_public(entry.stat(follow_symlinks=False)):
                parts.append("")
                continue
            inner = _parts(entry.path) if entry.is_dir(follow_symlinks=False) else None
        except OSError:
            parts.append("")  # gone since it was listed, or nothing that could be read
            continue
        if inner is None:
            folders.append(entry.path)
        else:
            parts.extend(inner or ("",))
    return (*folders, *filter(None, parts)) if parts else None


def _is_public(about: os.stat_result) -> bool:
    wanted = _FOLDER if stat.S_ISDIR(about.st_mode) else _FILE
    return about.st_mode & wanted == wanted
