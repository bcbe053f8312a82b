"""`roll train` and `roll check`: from a YAML file to a running pipeline.

The file is composed by Hydra (defaults lists, interpolation) and checked in full before anything heavy is imported.
`examples/start_pipeline.py` comes in by `start_pipeline`, and does the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roll.api.launch import ERROR_FILE, load, run_logged
from roll.cli.exits import DEBUG_VARIABLE, Exit, guarded, interrupted, report, was_interrupted
from roll.cli.parsers import start_pipeline_parser
from roll.configs.parsing.find import find_by_name, find_config
from roll.utils.importing import long_imports
from roll.utils.signals import ending_at_once
from roll.utils.terminal import say

if TYPE_CHECKING:
    from roll.configs.schema.run_config import RunConfig


def start_pipeline(arguments: Sequence[str], examples: Path) -> int:
    """Run what the arguments of `examples/start_pipeline.py` name; return its exit code.

    A `--config_name` without `--config_path` is looked up in the folder `examples`.
    """
    options = start_pipeline_parser().parse_intermixed_args(arguments)
    if options.debug:
        os.environ[DEBUG_VARIABLE] = "1"

    def command() -> int:
        file = _named_file(options.config_path, options.config_name, examples)
        if options.check or options.print_config:
            return show(file, options.overrides, every_key=options.print_config)
        with ending_at_once(), long_imports():
            config = load(file, options.overrides)
        return run(config)

    return guarded(command)


def _named_file(folder: str | None, name: str, examples: Path) -> Path:
    if folder is None:
        return find_by_name(name, examples)
    for path in (Path(folder), examples / folder):
        if path.is_dir():
            return find_config(path / name)
    raise ValueError(f"--config_path: there is no folder {folder!r}, neither in {Path.cwd()} nor in {examples}")


def train(options: argparse.Namespace) -> int:
    """Run the pipeline of a file."""
    with ending_at_once(), long_imports():  # nothing is there yet that would have to be closed
        config = load(find_config(options.file), options.overrides)
    return run(config)


def check(options: argparse.Namespace) -> int:
    """Check everything that can be checked without loading a model, and print the plan."""
    return show(find_config(options.file), options.overrides, every_key=options.print_config)


def show(file: Path, overrides: Sequence[str], *, every_key: bool) -> int:
    """Print every key with its value, or check the machine as well and print the plan."""
    from roll.configs.checks.chat_template_checks import template_notes
    from roll.configs.checks.endpoint_checks import endpoint_notes
    from roll.configs.errors import ConfigError
    from roll.configs.parsing.loader import load_config, to_yaml
    from roll.pipelines.check_process import StartCheck
    from roll.pipelines.run.run_dtype import foreseen

    if every_key:
        sys.stdout.write(to_yaml(load_config(file.parent, file.stem, overrides)))
        return Exit.DONE
    start = StartCheck()
    try:
        config = load(file, overrides, last=[start.violations])
    except ConfigError:
        if not start.has_run:
            say("not looked at, before this is mended: rows of data, tokenizer, chat template, the model's options")
        raise
    for warning in start.warnings:
        say(f"warning: {warning}")
    for note in (*endpoint_notes(config), *template_notes(config)):
        say(f"note: {note}")
    for unread in start.unread:
        say(f"not looked at: {unread}")
    lines = (config.batch.explain(), config.placement.explain(), foreseen(config), config.explain_results())
    sys.stdout.write("".join(f"{line}\n" for line in lines if line is not None))
    if config.profile_steps and "nsight" in config.profiler.tools and config.executor == "inline":
        from roll.tracking.profiling.profile_plan import command

        sys.stdout.write(f"start it as: {command(config.profiler_path, ['roll', 'train', str(file), *overrides])}\n")
    return Exit.DONE


def run(config: RunConfig) -> int:
    """Run the pipeline and return its exit code; a failure's traceback goes to `<logging_dir>/error.txt`."""
    try:
        run_logged(config)
    except KeyboardInterrupt:
        return interrupted(extra=_way_on(config))
    except Exception as error:  # noqa: BLE001 - as in `guarded`, with a file for the traceback
        if was_interrupted(error):
            return interrupted(extra=_way_on(config))
        details = config.logging_path / ERROR_FILE
        return report(error, details if _tells(details, error) else None, [*config.output_folders.values()])
    return Exit.DONE


def _tells(file: Path, error: Exception) -> bool:
    """Return whether the file has the traceback of this error, not that of an earlier run."""
    try:
        return type(error).__name__ in file.read_text(encoding="utf-8").rstrip().rpartition("\nTraceback")[2]
    except OSError:
        return False


def _way_on(config: RunConfig) -> str:
    """Say how an interrupted run goes on: from its newest checkpoint, if it has one."""
    from roll.checkpoint import CheckpointStore
    from roll.pipelines.run.stored_config import CONFIG_FILE

    if config.only_validates:
        return "nothing was trained, so there is nothing to resume"
    latest = CheckpointStore(config.checkpoint_path).latest()
    if latest is None:
        saves = f"save_steps is {config.save_steps}" if config.save_steps else "save_steps=10 would save every 10 steps"
        saves = f"save_best is {config.save_best}" if config.save_best and not config.save_steps else saves
        return f"no checkpoint was saved yet, so the next start begins at the first step ({saves})"
    if (config.output_path / CONFIG_FILE).is_file():
        return f"roll resume {config.output_dir} goes on after step {latest.step}"
    return f"resume_from_checkpoint=auto goes on after step {latest.step}"
