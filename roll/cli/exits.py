"""Exit codes, and the boundary that turns what goes wrong in a command into a sentence and one of them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

DEBUG_VARIABLE = "ROLL_DEBUG"
"""Environment variable that `--debug` sets; anything but an empty text and `0` shows tracebacks."""


class Exit(IntEnum):
    """Exit codes of every command. The table for users is in docs/cli.md."""

    DONE = 0
    FAILED = 1
    """Something broke, or a test of an environment found errors."""
    MISTAKE = 2
    """The arguments, the configuration or the data can't be used; argparse ends with the same code."""
    INTERRUPTED = 130
    """By Ctrl-C; the code that shells use for it."""


def guarded(command: Callable[[], int]) -> int:
    """Call a command and return its exit code; report what it raises."""
    try:
        return int(command())
    except KeyboardInterrupt:
        say("interrupted")
        return Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last boundary: everything is reported, nothing is hidden
        return report(error)


def report(error: Exception, details: Path | None = None) -> int:
    """Print what went wrong, and return the exit code for it: a `ValueError` is the user's mistake, all else a failure.

    `details` is the file that holds the traceback, if there is one.
    """
    mistake = isinstance(error, ValueError)
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        say("".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip())
    say(f"error: {error}" if mistake else f"error: {type(error).__name__}: {error}")
    if details is not None:
        say(f"(traceback: {details})")
    elif not mistake:
        say("(--debug shows the traceback)")
    return Exit.MISTAKE if mistake else Exit.FAILED


def say(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"{text}\n")
