"""Files that survive a crash: flushed writes, JSON, hashes; and the manifest that makes a folder a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "roll-checkpoint"
VERSION = 1

_NUMBERED = re.compile(r"checkpoint-(\d+)")
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


def write_json(path: Path, value: Any, *, flush: bool = True) -> None:
    """Write `value` so that a reader sees the old content or the new, never a part; NaN is refused.

    Without `flush` it may still be lost when the machine stops, for files that `hash_files` flushes later.
    Floats are written with as many digits as it takes to read the same bits back.
    """
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    fresh = path.with_name(f".{path.name}.new")
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        if flush:
            os.fsync(file.fileno())
    os.replace(fresh, path)


def read_json(path: Path) -> Any:
    """Return what `write_json` wrote; raises `CheckpointError` when the file is absent or isn't JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} doesn't exist") from None
    except OSError as error:  # a folder in its place, say
        raise CheckpointError(f"{path} can't be read ({error.strerror}); the checkpoint is damaged") from error
    except (ValueError, RecursionError) as error:
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
    with open(path, "rb") as file, ThreadPoolExecutor(1) as disk:
        # Hashing reads what is in memory anyhow, and the disk writes meanwhile.
        flushed = disk.submit(os.fsync, file.fileno()) if flush else None
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
        if flushed is not None:
            flushed.result()
    return FileRecord(size, digest.hexdigest())


def flush_files(folder: Path, names: Iterable[str]) -> None:
    """Wait until the disk has each file, whichever process of this machine wrote it."""
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder, without which a crash may undo a rename."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    path: Path
    step: int
    serial: int
    """Counts the saves of its folder: the highest was saved last, whatever its step."""
    meta: Mapping[str, Any]
    """What the writer added, e.g. a fingerprint of the configuration."""
    files: Mapping[str, FileRecord]
    """By path relative to the folder."""


def write_manifest(checkpoint: Checkpoint) -> None:
    """Write the manifest into the checkpoint's folder; every file must have its content by now."""
    write_json(
        checkpoint.path / MANIFEST,
        {
            "format": FORMAT,
            "version": VERSION,
            "step": checkpoint.step,
            "serial": checkpoint.serial,
            "meta": dict(checkpoint.meta),
            "files": {name: asdict(record) for name, record in checkpoint.files.items()},
        },
    )


def read_manifest(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`; raises `CheckpointError` unless all files are there with the right sizes, and in
    the folder itself: a checkpoint of somebody else's may have links that lead to files of this machine."""
    checkpoint = parse_manifest(path)
    folder = path.resolve()
    for name, record in (*checkpoint.files.items(), (MANIFEST, None)):
        if not (path / name).resolve().is_relative_to(folder):
            raise CheckpointError(f"{path / name} is a link to a file elsewhere, which isn't part of the checkpoint")
        if record is not None:
            _check_size(path / name, record)
    return checkpoint


def parse_manifest(path: Path) -> Checkpoint:
    """Return what the manifest in `path` says, without a look at the files; raises `CheckpointError` for a bad one."""
    content = read_json(path / MANIFEST)
    try:
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path / MANIFEST} has format {content['format']!r}, expected {FORMAT!r}")
        if content["version"] > VERSION:
            raise CheckpointError(
                f"{path} is of checkpoint version {content['version']}, newer than the "
                f"{VERSION} that this program reads; upgrade, or resume from another checkpoint"
            )
        files = {str(name): FileRecord(int(r["size"]), str(r["sha256"])) for name, r in content["files"].items()}
        checkpoint = Checkpoint(path, int(content["step"]), int(content["serial"]), dict(content["meta"]), files)
        _check_step(checkpoint)
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path / MANIFEST} isn't a checkpoint's manifest ({error!r})") from error
    return checkpoint


def _check_step(checkpoint: Checkpoint) -> None:
    """Refuse a manifest of another folder, and one that lists nothing."""
    manifest, named = checkpoint.path / MANIFEST, _NUMBERED.fullmatch(checkpoint.path.name)
    if not checkpoint.files:
        raise CheckpointError(f"{manifest} names no files; the checkpoint is damaged")
    if checkpoint.step < 0 or (named is not None and int(named[1]) != checkpoint.step):
        raise CheckpointError(f"{manifest} says step {checkpoint.step}, which isn't that of its folder")
    if any(Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name for name in checkpoint.files):
        raise CheckpointError(f"{manifest} names files outside of its folder")


def verify(path: Path) -> Checkpoint:
    """Read the manifest, and check every file's hash."""
    checkpoint = read_manifest(path)
    hashes = hash_files(path, checkpoint.files)
    wrong = sorted(name for name, record in checkpoint.files.items() if hashes[name] != record)
    if wrong:
        raise CheckpointError(f"{path} is damaged: the content of {wrong} differs from what was written")
    return checkpoint


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} is missing or can't be read ({error.strerror})") from error
    if size != record.size:
        raise CheckpointError(f"{path} has {size} bytes, expected {record.size}")
