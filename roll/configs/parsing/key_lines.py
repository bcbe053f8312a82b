"""Where the keys of a configuration stand: file and line, for messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from roll.configs.errors import Violation
from roll.configs.parsing.yaml_files import lines_of

_LAST = re.compile(r"(\.[^.\[\]]*|\[\d+\])$")


class KeyLines:
    """Finds the line of a key in a file, or of the nearest section around it that the file has."""

    def __init__(self, file: Path | None, overrides: Sequence[str] = ()) -> None:
        self._file = file
        keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
        self._overridden = tuple(key for key in keys if key)

    @cached_property
    def _lines(self) -> dict[str, int]:
        try:
            return {} if self._file is None else lines_of(self._file)
        except Exception:  # noqa: BLE001 - a message without its line is better than none
            return {}

    def added_to(self, violations: Iterable[Violation]) -> list[Violation]:
        """Return the violations with their places."""
        return [one if one.where else replace(one, where=self._where(one.path)) for one in violations]

    def _where(self, path: str) -> str:
        if any(path == key or path.startswith((f"{key}.", f"{key}[")) for key in self._overridden):
            return "the command line"
        for place in _outwards(path):
            if place in self._lines:
                return f"{self._file}:{self._lines[place]}"
        return ""


def _outwards(path: str) -> Iterable[str]:
    """The path itself, then every section around it; options of `x: {name: ..., option: ...}` stand below `x`."""
    yield path
    for other in ("_args", "_kwargs"):
        first, dot, rest = path.partition(".")
        if first.endswith(other) and dot:
            yield f"{first.removesuffix(other)}.{rest}"
            yield first.removesuffix(other)
    while match := _LAST.search(path):
        path = path[: match.start()]
        yield path
