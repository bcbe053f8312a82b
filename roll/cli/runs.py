"""`roll resume` and `roll export`: runs that are there already, by their folders."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from roll.checkpoint import CheckpointStore
from roll.checkpoint.files import Checkpoint
from roll.cli.exits import Exit, say
from roll.cli.train import load, run
from roll.configs.parsing.loader import load_config
from roll.configs.schema.run_config import RunConfig
from roll.pipelines.kept_config import kept_directory, kept_file


def resume(options: argparse.Namespace) -> int:
    """Go on with a run."""
    with resumed(options.run_folder, options.overrides) as config:
        return run(config)


@contextlib.contextmanager
def resumed(folder: Path, overrides: Sequence[str]) -> Iterator[RunConfig]:
    """Yield the configuration that goes on with a run, in the directory that it was started from."""
    folder = folder.resolve()
    file = kept_file(folder)
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    with _inside(kept_directory(folder)):
        extra = [] if "resume_from_checkpoint" in given else ["resume_from_checkpoint=true"]
        extra += [] if "output_dir" in given else _moved(kept_config(folder), folder)
        config = kept_config(folder, [*overrides, *extra])
        if config.resume_from_checkpoint is True and not CheckpointStore(config.checkpoint_path).complete():
            unsaved = "; save_steps is 0, so that it saves none" if not config.save_steps else ""
            raise ValueError(
                f"{folder} has no checkpoint to go on from{unsaved}. To start anew: roll train {file}"
                + ("" if config.save_steps else " save_steps=10")
            )
        yield load(file, [*overrides, *extra])


def kept_config(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration that a run keeps; the machine and files that it names aren't looked at."""
    file = kept_file(folder)
    with _inside(kept_directory(folder)):
        return load_config(file.parent.resolve(), file.stem, overrides)


def export(options: argparse.Namespace) -> int:
    """Write the model of a checkpoint."""
    folder = options.run_folder.resolve()
    target = options.output.absolute() if options.output else None
    config = kept_config(folder)
    with _inside(kept_directory(folder)):
        config = kept_config(folder, _moved(config, folder))
        checkpoint = _checkpoint(config, options.step)
        target = target or folder / "exported" / f"step-{checkpoint.step}"
        if target.is_dir() and any(target.iterdir()):
            raise ValueError(f"{target} isn't empty; name another folder with -o")
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is a file, expected a folder to write")
        from roll.pipelines.exporting import export_checkpoint

        export_checkpoint(config, checkpoint, target)
    say(f"the model of step {checkpoint.step} is in {target}")
    return Exit.DONE


def _checkpoint(config: RunConfig, step: int | None) -> Checkpoint:
    """Return the checkpoint of a step, or the newest one."""
    there = CheckpointStore(config.checkpoint_path).complete()
    if not there:
        hint = (
            f"; the trained model is in {config.export_path}" if (config.export_path / "config.json").is_file() else ""
        )
        raise ValueError(f"{config.checkpoint_path} has no complete checkpoint{hint}")
    chosen = [checkpoint for checkpoint in there if step in (None, checkpoint.step)]
    if not chosen:
        steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(there))
        raise ValueError(f"--step: there is no checkpoint of step {step}; there are those of {steps}")
    return chosen[0]


def _moved(config: RunConfig, folder: Path) -> list[str]:
    """Return the override for a run whose folder was moved."""
    if config.output_path.resolve() == folder:
        return []
    say(f"the run's folder was {config.output_path}; it is {folder} now")
    return [f"output_dir='{folder}'"]


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """Work in a directory for the time being: relative paths of a run are seen from where it was started."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
