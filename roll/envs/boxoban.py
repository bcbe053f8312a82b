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
    levels: dict[int, str] = {}
    number, rows, begin = -1, list[str](), 0
    for line_number, line in enumerate([*file.read_text(encoding="utf-8").splitlines(), ";"], start=1):
        line = line.rstrip()
        if not line.startswith(";"):
            if line and number < 0:
                raise ValueError(f"{file}:{line_number}: got {line!r}, expected a heading such as '; 0' before a level")
            if line:
                rows.append(line)
            continue
        if number >= 0:
            levels[number] = _level(file, begin, number, rows)
        number, rows, begin = _heading(file, line_number, line, levels), [], line_number
    if not levels:
        raise ValueError(f"{file}: no level in it; expected '; 0', then rows such as '#@$.#'")
    return MappingProxyType(levels)


def _heading(file: Path, line_number: int, line: str, levels: Mapping[int, str]) -> int:
    if line == ";":  # the end, as added above
        return -1
    text = line[1:].strip()
    if not text.isdecimal():
        raise ValueError(f"{file}:{line_number}: got {line!r}, expected ';' and the number of the level")
    if int(text) in levels:
        raise ValueError(f"{file}:{line_number}: there is a level {int(text)} already; numbers must differ")
    return int(text)


def _level(file: Path, begin: int, number: int, rows: list[str]) -> str:
    if not rows:
        raise ValueError(f"{file}:{begin}: level {number} has no rows")
    text = "\n".join(rows)
    try:
        parse_board(text)
    except ValueError as error:
        raise ValueError(f"{file}:{begin}: level {number}: {error}") from None
    return text
