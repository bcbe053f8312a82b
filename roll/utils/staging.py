"""Copies of model folders in shared memory: one per machine, made by the first process that asks.

Each process that reads a copy holds a shared lock beside it. Whoever lets go last removes it. A killed process holds
nothing any more: `sweep` removes copies that nobody holds. Only the standard library is imported (see ray_reaper.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

FOLDER = Path("/dev/shm")
PREFIX = "roll-model-"
_LOCK_TIMEOUT_S = 1800.0  # for a process that copies
_POLL_S = 0.1
_RECORDS_OF_TORCH = (".bin", ".pt", ".pth")
"""Weights that nobody reads where there are safetensors."""

_held: dict[Path, IO[str]] = {}


def staged(name: str) -> str:
    """Return a folder in shared memory with the files of a model's folder, which stay until this process lets go.

    Raises:
        ValueError: it is no folder, or doesn't fit.
        TimeoutError: another process has been copying it for half an hour.
    """
    source = Path(name).expanduser()
    if not source.is_dir():
        raise ValueError(
            f"use_shm: {name} isn't a folder here: download the model and name its folder, or drop use_shm"
        )
    if not FOLDER.is_dir() or not os.access(FOLDER, os.W_OK):
        raise ValueError(f"use_shm: {FOLDER} isn't there or can't be written to: drop use_shm")
    files = _files(source)
    copy = FOLDER / f"{PREFIX}{_fingerprint(source, files)}"
    if copy not in _held:
        sweep()
        lock = _acquired(copy, source, files)
        if not _is_own(copy):
            lock.close()
            raise ValueError(f"use_shm: {copy} isn't a folder that this user made: remove it, or drop use_shm")
        _held[copy] = lock
    return str(copy)


def _is_own(copy: Path) -> bool:
    """Return whether a copy is this user's: anybody may put a folder of that name, or a link, into shared memory."""
    status = copy.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def release() -> None:
    """Let go of the copies that this process has asked for."""
    while _held:
        copy, lock = _held.popitem()
        lock.close()
        _remove_unless_held(copy)


def sweep() -> None:
    """Remove copies that nobody holds: their processes were killed."""
    for lock in FOLDER.glob(f"{PREFIX}*.lock"):
        _remove_unless_held(lock.with_suffix(""))


def _files(source: Path) -> list[Path]:
    files = sorted(path for path in source.iterdir() if path.is_file())
    safe = any(path.suffix == ".safetensors" for path in files)
    return [path for path in files if not (safe and path.suffix in _RECORDS_OF_TORCH)]


def _fingerprint(source: Path, files: Sequence[Path]) -> str:
    """Name the copy by what is copied: a folder that was written again has another."""
    about = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    described = json.dumps([str(source.resolve()), os.getuid(), about])
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


def _acquired(copy: Path, source: Path, files: Sequence[Path]) -> IO[str]:
    """Make the copy unless it is there; return its lock, held as one of its readers."""
    end, path = time.monotonic() + _LOCK_TIMEOUT_S, copy.with_suffix(".lock")
    while True:
        lock = open(path, "a+")  # noqa: SIM115 - held until `release`
        try:
            if _locked(lock, path, copy, source, files):
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()
        if time.monotonic() > end:
            raise TimeoutError(
                f"use_shm: another process has held {path} for {_LOCK_TIMEOUT_S:g} s, to copy {source} into {copy}"
            )
        time.sleep(_POLL_S)


def _locked(lock: IO[str], path: Path, copy: Path, source: Path, files: Sequence[Path]) -> bool:
    """Return whether the copy is there and this process one of its readers; if not, it may be next time."""
    try:
        # A reader's lock will do where the copy is there; one who makes it is alone.
        fcntl.flock(lock, (fcntl.LOCK_SH if copy.is_dir() else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not _is_at(lock, path):
        return False  # it was removed in between
    if not copy.is_dir():
        _copy(copy, source, files)
        fcntl.flock(lock, fcntl.LOCK_SH)  # lets go for a moment, in which the copy could be removed
    return copy.is_dir() and _is_at(lock, path)


def _is_at(lock: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _copy(copy: Path, source: Path, files: Sequence[Path]) -> None:
    """Copy the files; the folder has its name once it is complete."""
    size, free = sum(path.stat().st_size for path in files), shutil.disk_usage(FOLDER).free
    part = copy.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if size > free:
            raise OSError
        part.mkdir(mode=0o700)
        for path in files:
            shutil.copyfile(path, part / path.name)
        part.rename(copy)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ValueError(
            f"use_shm: {source} doesn't fit into {FOLDER}: it has {size / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are "
            "free; give the container more (docker: --shm-size), or drop use_shm"
        ) from error


def _remove_unless_held(copy: Path) -> None:
    path = copy.with_suffix(".lock")
    with contextlib.suppress(OSError), open(path, "r+") as lock:  # another user's, or gone already
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(lock, path):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.rmtree(copy.with_suffix(".part"), ignore_errors=True)
            path.unlink()
