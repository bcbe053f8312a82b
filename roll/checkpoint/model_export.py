"""The trained model's folder at the end of a run: whole, and never at the cost of what was there before.

The model is written into a hidden folder inside its place, which may be a mount, and moved up file by file with
`config.json` last: a folder that has one is whole.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roll.checkpoint.files import CheckpointWriteError, files_below, flush_files, sync_folder
from roll.utils.disk import first_line, free_space
from roll.utils.umask import apply_umask

logger = logging.getLogger(__name__)

RECORD = "roll_export.json"
"""File that says which run wrote the model, and at which step."""
CONFIG = "config.json"
_UNFINISHED = ".writing"
_ARRIVE_SECONDS = 10.0
"""How long a file of another machine may take to be seen here; NFS keeps what it knows of a folder for some seconds."""
Write = Callable[[Path], Mapping[str, int] | None]
"""Fills a folder; returns the size of each file that other processes say they wrote, by its name, or None."""


def set_aside(target: Path) -> Path | None:
    """Move what is in `target` into a folder `earlier.<n>` there; None: there is nothing."""
    if not _names(target):
        return None
    aside = next(path for n in itertools.count(1) if not (path := target / f"earlier.{n}").exists())
    aside.mkdir()
    (target / RECORD).touch()  # the user's own model has none; after a kill it says whose folder this is
    _move(target, aside)
    return aside


def write_model(target: Path, write: Write, record: dict[str, Any], *, writers: str = "") -> None:
    """Have `write` fill a folder with the model, which then becomes that of `target`; `record` is kept beside it.

    An earlier model there is replaced if its record names the same `exp_name`, else set aside. Raises
    `CheckpointWriteError` when writing fails, or when files were written to a disk that this machine doesn't see; what
    was in `target` is untouched then. `writers` are the machines of the processes that write.
    """
    target = target.absolute()  # other processes may work elsewhere
    fresh = target / _UNFINISHED
    try:
        target.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        _check_arrived(fresh, write(fresh) or {}, target, writers)
        apply_umask(fresh)
        (fresh / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        flush_files(fresh, files_below(fresh))
        same_run = _recorded(target).get("exp_name") == record["exp_name"]
        if (aside := set_aside(target)) is not None and not same_run:
            logger.warning("the model of another run was moved to %s", aside)
        _move(fresh, target)
        sync_folder(target)
        if aside is not None and same_run:
            shutil.rmtree(aside, ignore_errors=True)
    except CheckpointWriteError:
        raise
    except Exception as error:
        free = f"{free_space(target)} are free there" if target.is_dir() else "not created"
        reason = first_line(error)
        raise CheckpointWriteError(f"the trained model couldn't be written to {target} ({free}): {reason}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _check_arrived(fresh: Path, sizes: Mapping[str, int], target: Path, writers: str) -> None:
    """Raise `CheckpointWriteError` if what was written elsewhere isn't here, whole."""
    deadline = time.monotonic() + _ARRIVE_SECONDS
    while missing := [name for name, size in sizes.items() if _size(fresh / name) != size]:
        if time.monotonic() > deadline:
            where = writers or "the machine of the rank that wrote them"
            raise CheckpointWriteError(
                f"the trained model was written, and {len(missing)} of its files, such as {missing[0]}, aren't in "
                f"{fresh} as seen from here: {target} isn't shared with {where}. The files are on that machine in "
                f"a folder of the same name: copy them from there (scp -r HOST:{fresh}/. {target}/) before another run "
                "starts, and name a folder that all machines mount, by output_dir or export_dir"
            )
        time.sleep(0.2)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _move(source: Path, target: Path) -> None:
    """Move what is in `source`: the record, then the files, then `config.json`; a finished model leaves in reverse.

    So a kill leaves a folder that has one of the two, without which a start refuses it.
    """
    leaves = source.name != _UNFINISHED
    for name in sorted(_names(source), key=lambda name: (name == CONFIG, name != RECORD, name), reverse=leaves):
        os.rename(source / name, target / name)


def _names(folder: Path) -> list[str]:
    """Return what a folder holds besides models that were set aside and one that isn't finished."""
    if not folder.is_dir():
        return []
    return [path.name for path in folder.iterdir() if not path.name.startswith(("earlier.", _UNFINISHED))]


def _recorded(target: Path) -> dict[str, Any]:
    try:
        record = json.loads((target / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
