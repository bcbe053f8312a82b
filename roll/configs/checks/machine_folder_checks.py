"""What a machine has of folders that others write to, and of models: called on each, and compared by the controller."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MAX_VISIBILITY_DELAY_S = 10.0
"""How long a file may take to appear on another machine: NFS keeps what it knows of a folder for some seconds."""
_HASHED_BYTES = 1 << 22
"""Larger files of a model are compared by their size alone."""


@dataclass(frozen=True)
class Sight:
    """What one machine has."""

    missing: tuple[str, ...] = ()
    """Folders in which it doesn't see the controller's file."""
    read_only: Mapping[str, str] = field(default_factory=dict)
    """Folders that it can't write to, with the system's words."""
    models: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of each model's folder its files, with what tells them from others; none where there is no folder."""


def look(markers: Mapping[str, str], models: Sequence[str], seconds: float = MAX_VISIBILITY_DELAY_S) -> Sight:
    """Return what this machine has of folders (folder -> name of the controller's file in it) and of models' folders.

    Leaves a file of its own in each folder, named after the controller's.
    """
    missing, read_only = [], {}
    deadline = time.monotonic() + seconds
    for folder, name in markers.items():
        if not _appears(Path(folder) / name, deadline):
            missing.append(folder)
            continue
        try:
            (Path(folder) / f"{name}.{uuid.uuid4().hex[:8]}").touch()
        except OSError as error:
            read_only[folder] = error.strerror or str(error)
    return Sight(tuple(missing), read_only, {name: files_of(Path(name)) for name in models})


def versions() -> dict[str, str]:
    """Return the versions of the packages that should be equal on all machines."""
    import roll

    installed = {"roll": roll.__version__}
    for name in ("torch", "transformers", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def files_of(folder: Path) -> dict[str, str]:
    """Return the files of a model's folder, with size and, of small ones, the hash."""
    files = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and not path.name.startswith("."):
            size = path.stat().st_size
            content = hashlib.sha256(path.read_bytes()).hexdigest() if size <= _HASHED_BYTES else ""
            files[path.name] = f"{size} {content}"
    return files


def _appears(path: Path, deadline: float) -> bool:
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
