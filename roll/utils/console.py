"""rich's console, for text of files, models and services."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.segment import Segment
from rich.text import Text

from roll.utils.terminal import printable


class Console(RichConsole):
    """Prints control characters of what it is given as escapes: rich itself passes most of them on to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text as rich makes it of a string, escaped before it is measured: cells are wide enough."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Yield the segments of what is printed, escaped; those that move the cursor are rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
