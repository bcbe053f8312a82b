"""What readers give: rows, rows that can't be read, and where each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class DataError(ValueError):
    """A dataset that can't be used as it is; the message names the file, the line and the fix."""


class BadRowError(DataError):
    """One row that can't be used. The rows after it can: `max_bad_rows` decides what happens."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file or dataset. `name` is short and unique among the sources of a run: it becomes part of task ids."""

    name: str
    location: str
    """Path, Hub id with an optional `#split`, or the path of a class of the user's own."""
    format: str
    """json, jsonl, csv, tsv, parquet, saved (a `save_to_disk` folder), hub, own"""
    compressed: bool = False
    """A gzip file."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it is."""

    number: int
    """From 1, within its source; rows that can't be read count."""
    where: str
    """`file:line`, for messages."""
    values: Mapping[str, Any]
    span: tuple[int, int] | None = None
    """Offset and size in bytes, where the row can be read again from its file."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be read; the ones after it can."""

    number: int
    where: str
    reason: str


_MISSING = object()


def column_value(values: Mapping[str, Any], column: str, default: Any = None) -> Any:
    """Return a column of a row. `a.b` is the column of that name, or else the entry `b` of column `a`."""
    if column in values:
        return values[column]
    value: Any = values
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def has_column(values: Mapping[str, Any], column: str) -> bool:
    """Return whether `column_value` finds the column, its value may be None."""
    return column_value(values, column, _MISSING) is not _MISSING
