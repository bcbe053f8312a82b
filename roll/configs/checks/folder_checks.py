"""Folders can be written, have room, and hold what the run resumes from."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from roll.configs.errors import Violation, nearest, problem
from roll.configs.schema.checkpoint_config import is_address
from roll.configs.schema.run_config import RunConfig


def folder_checks(config: RunConfig) -> Iterator[Violation]:
    """Check that folders can be written, and that the checkpoint to resume from is there."""
    reported: set[Path] = set()
    if "runtime_resources" in (parts := config.output_path.absolute().parts) and "working_dir_files" in parts:
        expected = "a folder outside of the copy that Ray makes of a job's working directory, and may delete afterwards"
        fix = "name an absolute one, which all machines mount if there are several: output_dir=/shared/run"
        yield Violation("output_dir", expected, fix, config.output_dir)
    for key, folder in config.output_folders.items():
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        if there not in reported and not there.is_dir():
            yield Violation(key, f"a folder; {there} is a file", "choose another name", str(folder))
        elif there not in reported and not os.access(there, os.W_OK | os.X_OK):
            yield Violation(key, f"a folder that can be written; {there} can't", "choose another place", str(folder))
        reported.add(there)
    yield from _resume(config)


def export_checks(config: RunConfig) -> Iterator[Violation]:
    """Check that the trained model has room, and a folder of its own."""
    if not config.exports:
        return
    folder = config.export_path.absolute()
    models = {role: config.model_path(role) for role in config.roles}
    for role, name in models.items():
        if Path(name).expanduser().absolute() == folder:
            expected = f"a folder other than that of the model of {role}, which would be moved"
            yield Violation("export_dir", expected, "name a new folder, or another output_dir", str(config.export_path))
            return
    if folder.is_dir():
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith((".", "earlier.")))
        if names and not {"config.json", "roll_export.json"} & set(names):
            expected = f"a folder for the trained model alone; {folder} holds {names[0]}"
            yield Violation("export_dir", expected, "name a new folder", config.export_dir)
            return
    for key, other in config.output_folders.items():
        path = other.resolve()
        if key != "export_dir" and folder.resolve() in (path, *path.parents):
            # What is there when the model arrives is moved away, or deleted.
            expected = f"a folder for the trained model alone, not that of {key} or one around it"
            yield Violation("export_dir", expected, "name a new folder", str(config.export_path))
            return
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    model = Path(models["actor_train"]).expanduser()
    needed = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0
    free = shutil.disk_usage(there).free
    if needed > free:
        expected = (
            f"a place with room for the trained model: its weights take {_size(needed)} or more, and {there} has "
            f"{_size(free)} left"
        )
        fix = "free some, name another disk, or export_model=false"
        yield Violation("export_dir", expected, fix, str(config.export_path))


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _resume(config: RunConfig) -> Iterator[Violation]:
    wanted, address = config.resume_from_checkpoint, config.checkpoint_config.address
    for key, location in (("checkpoint_config.output_dir", address), ("resume_from_checkpoint", wanted)):
        if is_address(location) and (message := _unknown_to_fsspec(str(location))):
            yield problem(key, message, "", location)
    if is_address(wanted) or address is not None:
        return  # what is there is seen when the run starts
    if wanted is True and not (config.checkpoint_path.is_dir() and any(config.checkpoint_path.iterdir())):
        expected = f"checkpoints in {config.checkpoint_path}, and there are none"
        yield Violation("resume_from_checkpoint", expected, "false, auto, or the folder of a checkpoint", True)
    elif wanted == "best" and not any(config.checkpoint_path.glob("checkpoint-*")):
        expected = f"a best checkpoint in {config.checkpoint_path}, and there is none: save_best chooses one"
        yield Violation("resume_from_checkpoint", expected, "auto, or the folder of a checkpoint", wanted)
    elif isinstance(wanted, str) and wanted not in ("auto", "best") and not Path(wanted).expanduser().is_dir():
        expected = f"true, false, auto, best, or a checkpoint's folder that exists{nearby(Path(wanted))}"
        yield Violation("resume_from_checkpoint", expected, "check the path", wanted)


def _unknown_to_fsspec(address: str) -> str:
    """Say why fsspec knows no way to an address; empty: it knows one."""
    import fsspec

    try:
        fsspec.get_filesystem_class(address.partition("://")[0])
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


_CONFIG_FOLDER: ContextVar[Path | None] = ContextVar("_CONFIG_FOLDER", default=None)


@contextlib.contextmanager
def beside(folder: Path | None) -> Iterator[None]:
    """Have messages name a configuration's folder, where files of functions are looked for too; None: there is none."""
    token = _CONFIG_FOLDER.set(folder)
    try:
        yield
    finally:
        _CONFIG_FOLDER.reset(token)


def relative_to() -> str:
    """Return where files of functions are looked for, for messages."""
    here, folder = Path.cwd(), _CONFIG_FOLDER.get()
    same = folder is None or folder.absolute() == here
    return f"seen from {here}" if same else f"seen from {here} or from the configuration's folder {folder}"


def nearby(file: Path) -> str:
    """Return what the nearest existing folder holds that looks like `file`, as the end of a sentence."""
    folder = file.expanduser().parent
    if not folder.is_dir():
        return f"; there is no folder {str(folder)!r}"
    near = nearest(file.name, [entry.name for entry in folder.iterdir()])
    return f"; {near}" if near else ""
