"""The file that makes a folder a checkpoint: which files belong to it, their sizes and hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roll.checkpoint.files import CheckpointError, FileRecord, hash_files, read_json, write_json

MANIFEST = "manifest.json"
FORMAT = "roll-checkpoint"
VERSION = 1


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
    """Return the checkpoint at `path`; raises `CheckpointError` unless all files are there with the right sizes."""
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
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} isn't a checkpoint's manifest ({error!r})") from error
    for name, record in files.items():
        _check_size(path / name, record)
    return checkpoint


def verify(path: Path) -> Checkpoint:
    """Read the manifest, and check every file's hash."""
    checkpoint = read_manifest(path)
    found = hash_files(path, checkpoint.files)
    wrong = sorted(name for name, record in checkpoint.files.items() if found[name] != record)
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
