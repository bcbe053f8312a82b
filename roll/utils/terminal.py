"""Text from files, models and services on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.segment import Segment
from rich.text import Text

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text with control characters, which a terminal would obey, as escapes; lines and tabs stay."""
    return text.translate(_ESCAPES)


def say(text: str) -> None:
    """Print a line to standard error, if anybody reads it; what a terminal would obey is written as escapes."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"{printable(text)}\n")


class Console(RichConsole):
    """Prints control characters of what it is given as escapes: rich itself passes most of them on to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text as rich makes it of a string, escaped before it is measured: cells are wide enough."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Return the segments of what is printed, escaped; those that move the cursor are rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
