"""Files that survive a crash: flushed writes, JSON, hashes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK = 4 * 2**20
_HASHERS = 4


class CheckpointError(ValueError):
    """A checkpoint can't be found or trusted, or its folder is another run's."""


class CheckpointWriteError(RuntimeError):
    """A checkpoint or a model can't be written, e.g. on a full disk: a failure, no mistake of the user's."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says about one file."""

    size: int
    sha256: str


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that a reader sees the old content or the new, never a part; NaN is refused.

    Floats are written with as many digits as it takes to read the same bits back.
    """
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    fresh = path.with_name(f".{path.name}.new")
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def read_json(path: Path) -> Any:
    """Return what `write_json` wrote; raises `CheckpointError` when the file is absent or isn't JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} doesn't exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} isn't valid JSON ({error}); the checkpoint is damaged") from error


def files_below(folder: Path) -> list[str]:
    """Return the relative paths of all files below `folder`, sorted, with `/` between parts."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def hash_files(folder: Path, names: Iterable[str], *, flush: bool = False) -> dict[str, FileRecord]:
    """Return size and hash of each file; several at a time, since hashing runs without the interpreter's lock.

    `flush` also waits until the disk has each file, whichever process of this machine wrote it.
    """
    names = list(names)
    with ThreadPoolExecutor(_HASHERS) as pool:
        records = pool.map(lambda name: _record(folder / name, flush=flush), names)
        return dict(zip(names, records, strict=True))


def _record(path: Path, *, flush: bool) -> FileRecord:
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
        if flush:
            os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder, without which a crash may undo a rename."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
