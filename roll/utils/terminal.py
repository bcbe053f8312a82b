"""Text from files, models and services on a terminal."""

from __future__ import annotations

import contextlib
import sys

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text with control characters, which a terminal would obey, as escapes; lines and tabs stay."""
    return text.translate(_ESCAPES)


def say(text: str) -> None:
    """Print a line to standard error, if anybody reads it; what a terminal would obey is written as escapes."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"{printable(text)}\n")
