"""One log format for the controller and every worker. Modules log to `logging.getLogger(__name__)`."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from roll.utils.secrets import RedactingFormatter
from roll.utils.terminal import printable

_FORMAT = "%(asctime)s %(levelname)s [{name}] %(name)s: %(message)s"


class _Formatter(RedactingFormatter):
    """Also shows control characters as escapes: a row, a response or a service may have said what is logged, and logs
    are read on terminals."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return printable(super().format(record))


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is now, not at set-up: a live display replaces it to print above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)


class _FileHandler(logging.FileHandler):
    """Says once that its file can't be written, on a full disk say, and not at every record with a traceback."""

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{self.baseFilename} can't be written any more: {error}\n")


def setup_logging(level: str = "INFO", *, name: str = "controller", file: Path | None = None) -> None:
    """Send the records of this process to stderr, and to `file` where given; a second call replaces the first.

    `name` says which process wrote a line, e.g. `actor_train-0`.
    """
    known = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if level not in known:
        raise ValueError(f"unknown log level {level!r}; expected one of {list(known)}")
    handlers: list[logging.Handler] = [_StderrHandler()]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(_Formatter(_FORMAT.format(name=name)))
    logging.basicConfig(level=level, handlers=handlers, force=True)


@contextlib.contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Let a library's logger say nothing below an error."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
