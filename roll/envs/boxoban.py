"""Level files of Boxoban (github.com/google-deepmind/boxoban-levels): `; <number>`, then the rows of a level."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from roll.envs.sokoban_board import parse_board


def load_levels(path: str | Path) -> Mapping[int, str]:
    """The levels of a file by their numbers, as text (`sokoban_board`). Read once per process and version of the file.

    A ValueError names the file and the line of what is wrong.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no level file {str(path)!r}; expected a text file in the format of Boxoban")
    status = file.stat()
    return _read(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=16)
def _read(file: Path, modified: int, size: int) -> Mapping[int, str]:  # noqa: ARG001 (they are there for the cache)
    rows: dict[int, list[str]] = {}
    headings: dict[int, str] = {}  # Where they are
    for line_number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        line, where = line.rstrip(), f"{file}:{line_number}"
        if line.startswith(";"):
            text = line[1:].strip()
            if not text.isdecimal():
                raise ValueError(f"{where}: got {line!r}, expected ';' and the number of the level")
            number = int(text)
            if number in rows:
                raise ValueError(f"{where}: there is a level {number} already; numbers must differ")
            rows[number], headings[number] = [], where
        elif line and not rows:
            raise ValueError(f"{where}: got {line!r}, expected a heading such as '; 0' before a level")
        elif line:
            rows[number].append(line)
    if not rows:
        raise ValueError(f"{file}: no level in it; expected '; 0', then rows such as '#@$.#'")
    levels = {number: "\n".join(level) for number, level in rows.items()}
    for number, level in levels.items():
        if not level:
            raise ValueError(f"{headings[number]}: level {number} has no rows")
        try:
            parse_board(level)
        except ValueError as error:
            raise ValueError(f"{headings[number]}: level {number}: {error}") from None
    return MappingProxyType(levels)
