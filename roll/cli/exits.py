"""Exit codes, and the boundary that turns what goes wrong in a command into a sentence and one of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

from roll.utils import signals
from roll.utils.terminal import say

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
    CLOSED_OUTPUT = 141
    """What reads the output, such as `head`, left before all was said; the code that shells use for it."""
    TERMINATED = 143
    """By SIGTERM; the code that shells use for it."""


def guarded(command: Callable[[], int]) -> int:
    """Call a command and return its exit code; report what it raises."""
    signals.begin_work()
    try:
        status = int(command())
    except SystemExit as end:
        # Ray replaces the handler of SIGTERM by one that exits so, wherever it is imported.
        if end.code != signal.SIGTERM:
            raise
        signals.end_work()
        status = interrupted(Exit.TERMINATED)
    except KeyboardInterrupt:
        signals.end_work()
        status = interrupted()
    except Exception as error:  # noqa: BLE001 - the last boundary: everything is reported, nothing is hidden
        signals.end_work()
        status = _status_of(error)
    signals.end_work()
    _flush()
    signals.exit_with(status)
    return status


def _status_of(error: Exception) -> int:
    if was_interrupted(error):
        return interrupted()
    if isinstance(error, BrokenPipeError) and _stdout_is_closed():
        return Exit.CLOSED_OUTPUT
    return report(error)


def was_interrupted(error: BaseException) -> bool:
    """Return whether a signal is behind an error: what was under way may turn the exception into one of its own."""
    visited: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in visited:
        if isinstance(each, KeyboardInterrupt):
            return True
        visited.append(each)
        each = each.__cause__ or each.__context__
    return signals.received() is not None


def interrupted(code: int | None = None, extra: str = "") -> int:
    """Say that the command was ended by the signal that came, and return the exit code for it."""
    terminated = code == Exit.TERMINATED or signals.received() == signal.SIGTERM
    say(signals.WORDS[signal.SIGTERM if terminated else signal.SIGINT] + (f"; {extra}" if extra else ""))
    return Exit.TERMINATED if terminated else Exit.INTERRUPTED


def report(error: Exception, details: Path | None = None, folders: Sequence[Path] = ()) -> int:
    """Print what went wrong, and return the exit code for it: a `ValueError` is the user's mistake, all else a failure.

    `details` is the file that holds the traceback, if there is one; `folders` are those that were written to.
    """
    from roll.utils.disk import disk_full_sentence, is_disk_full

    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        say("".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip())
    if is_disk_full(error):
        # What writes whole folders names them itself.
        names_file = type(error).__name__ == "CheckpointWriteError"
        say(f"error: {error if names_file else disk_full_sentence(error, [*folders, Path(tempfile.gettempdir())])}")
        return Exit.FAILED
    mistake = isinstance(error, ValueError)
    say(f"error: {error}" if mistake else f"error: {type(error).__name__}: {error}")
    if details is not None:
        say(f"(traceback: {details})")
    elif not mistake:
        say("(--debug shows the traceback)")
    return Exit.MISTAKE if mistake else Exit.FAILED


def _stdout_is_closed() -> bool:
    """Return whether nobody reads what is printed any more."""
    with contextlib.suppress(OSError, ValueError):
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)  # an error is always reported
        return bool(output.poll(0))
    return False


def _flush() -> None:
    """Write what is still to be written. Where nobody reads it, the interpreter mustn't try once more."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
