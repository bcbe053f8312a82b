"""Rows of a class of the user's own: `data_args.dataset: path/to/file.py:MyData`.

The class is called with `dataset_args`. It has `__len__` and `__getitem__` (rows 0, 1, ...), or `__iter__`. A row is a
mapping with the columns that a file would have. The same arguments must give the same rows in the same order: a
resumed run makes the object again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll.utils.importing import load_object
from roll.utils.rows import BadRow, DataError, Row, Source


def own_source(path: str) -> Source:
    """Return the source that stands for a class."""
    return Source(path.rpartition(":")[2], path, "own")


def own_rows(source: Source, arguments: Mapping[str, Any]) -> Iterator[Row | BadRow]:
    """Yield the rows of the class; raises `DataError` when it can't be made or isn't a dataset.

    An exception of `__getitem__` is one bad row. One of `__iter__` ends the run, since nothing comes after it.
    """
    make = load_object(source.location, key="data_args.dataset", kind="class")
    try:
        data = make(**arguments)
    except Exception as error:
        raise DataError(
            f"data_args.dataset: {source.location} can't be made with {dict(arguments)}: {_with_type(error)}"
        ) from error
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        yield from _indexed(source, data)
    elif hasattr(data, "__iter__"):
        yield from _iterated(source, data)
    else:
        raise DataError(
            f"data_args.dataset: {source.location} is no dataset; give the class __len__ and __getitem__, or __iter__"
        )


def _indexed(source: Source, data: Any) -> Iterator[Row | BadRow]:
    try:
        count = len(data)
    except Exception as error:
        raise DataError(f"data_args.dataset: {source.location}: __len__ raised {_with_type(error)}") from error
    for number in range(1, count + 1):
        where = f"{source.location}[row {number}]"
        try:
            values = data[number - 1]
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises
            yield BadRow(number, where, f"__getitem__({number - 1}) raised {_with_type(error)}")
            continue
        yield _row(number, where, values)


def _iterated(source: Source, data: Any) -> Iterator[Row | BadRow]:
    number = 0
    try:
        for values in data:
            number += 1
            yield _row(number, f"{source.location}[row {number}]", values)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{source.location}: __iter__ raised {_with_type(error)} after row {number}") from error


def _row(number: int, where: str, values: object) -> Row | BadRow:
    if isinstance(values, Mapping) and all(isinstance(key, str) for key in values):
        return Row(number, where, values)
    return BadRow(number, where, f"a row is {values!r:.60}, expected a mapping with columns")


def _with_type(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
