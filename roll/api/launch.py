"""From a configuration file or a run's folder to a running pipeline: what `roll.train` and the command line share."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roll.checkpoint import CheckpointStore
from roll.configs.parsing.loader import load_config
from roll.configs.schema.checkpoint_config import STATE_CONTENTS
from roll.pipelines.run.stored_config import run_directory, stored_config_file
from roll.utils.terminal import say

if TYPE_CHECKING:
    from roll.configs.full_check import Check
    from roll.configs.schema.run_config import RunConfig
    from roll.pipelines.run.run_result import RunResult

ERROR_FILE = "error.txt"


def load(file: Path, overrides: Sequence[str], *, last: Sequence[Check] = ()) -> RunConfig:
    """Return the configuration, checked in full, and print its warnings; raise `ValueError` with all that is wrong.

    `last` checks are those that a run makes itself at its start, with the libraries that it has loaded by then.
    """
    from roll.configs.checks.machine_checks import machine_warnings, this_machine
    from roll.configs.full_check import load_checked
    from roll.configs.rules.validate import warnings_of
    from roll.envs.env_registry import env_violations
    from roll.gateway.agents.checks import agent_violations
    from roll.tracking.replay_check import replay_violations

    checks = [env_violations, agent_violations, replay_violations]
    config = load_checked(file, overrides, extra=checks, last=last, tell=lambda note: say(f"note: {note}"))
    for warning in (*warnings_of(config), *machine_warnings(config, this_machine())):
        say(f"warning: {warning}")
    return config


def run_logged(config: RunConfig) -> RunResult:
    """Run the pipeline with a log; a failure's traceback is written to `<logging_dir>/error.txt`, and raised."""
    from roll.pipelines import log_plan, run_pipeline
    from roll.pipelines.ray_start import loaded
    from roll.utils.locking import FolderInUse, run_lock
    from roll.utils.logging import setup_logging
    from roll.utils.memory import reuse_freed_memory
    from roll.utils.secrets import redacted

    if config.executor == "inline":  # engine, trainer and controller in one process
        reuse_freed_memory()
    # Before the log is opened: a run that is refused leaves the folder of the other one alone.
    with run_lock(config.exclusive_folders):
        pass
    setup_logging(file=config.logging_path / "controller.log")
    try:
        log_plan(config)
        with loaded(config):
            return run_pipeline(config)
    except FolderInUse:
        raise  # the folder is another run's
    except Exception:
        # A full disk may be what went wrong.
        with contextlib.suppress(OSError):
            (config.logging_path / ERROR_FILE).write_text(redacted(traceback.format_exc()), encoding="utf-8")
        raise


@contextlib.contextmanager
def resumed(folder: Path, overrides: Sequence[str]) -> Iterator[RunConfig]:
    """Yield the configuration that goes on with a run, in the directory that it was started from."""
    folder = folder.resolve()
    file = stored_config_file(folder)
    keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    with inside(run_directory(folder)):
        extra = [] if "resume_from_checkpoint" in keys else ["resume_from_checkpoint=true"]
        if "checkpoint_config.load_contents" not in keys:  # of what the run itself started from, if at all
            extra.append(f"checkpoint_config.load_contents=[{','.join(STATE_CONTENTS)}]")
        extra += [] if "output_dir" in keys else relocated(stored_config(folder), folder)
        config = stored_config(folder, [*overrides, *extra])
        remote = config.checkpoint_config.address is not None  # it is looked at when the run starts
        there = remote or CheckpointStore(config.checkpoint_path).complete()
        if config.resume_from_checkpoint is True and not there:
            saves = config.save_steps or config.save_best
            unsaved = "; save_steps is 0, so that it saves none" if not saves else ""
            raise ValueError(
                f"{folder} has no checkpoint to go on from{unsaved}. To start anew: roll train {file}"
                + ("" if saves else " save_steps=10")
            )
        yield load(file, [*overrides, *extra])


def stored_config(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration that a run keeps; the machine and files that it names aren't looked at."""
    file = stored_config_file(folder)
    with inside(run_directory(folder)):
        return load_config(file.parent.resolve(), file.stem, overrides)


def relocated(config: RunConfig, folder: Path) -> list[str]:
    """Return the override for a run whose folder was moved."""
    if config.output_path.resolve() == folder:
        return []
    say(f"the run's folder was {config.output_path}; it is {folder} now")
    return [f"output_dir='{folder}'"]


@contextlib.contextmanager
def inside(directory: Path) -> Iterator[None]:
    """Work in a directory inside the block: a run's relative paths are read from where it was started."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
