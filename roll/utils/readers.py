"""Which files and datasets are meant, and their rows. The formats are in `row_formats.py`."""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from roll.utils.row_formats import READERS
from roll.utils.rows import BadRow, BadRowError, DataError, Row, Source

__all__ = ["BadRowError", "DataError", "Row", "Source", "read_rows", "resolve_sources", "scan_rows"]

_FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?:/[\w.-]+)?(?:#[\w.\[\]:%-]+)?")
_GZIP = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Formats that are also read with `.gz` after them."""


def resolve_sources(files: str | Sequence[str]) -> list[Source]:
    """Return the sources meant by file names, folders, globs and Hub ids, in this order (a folder or glob: sorted by
    name).

    `data.jsonl`; `data/*.parquet`; a folder of such files; a folder written by `save_to_disk`; a Hub dataset
    `owner/name[/config][#split]`. The split of a Hub or saved dataset is `train` unless given after `#`.
    """
    patterns = [files] if isinstance(files, str) else list(files)
    if not patterns:
        raise DataError("no data files are given; set data_args.file_name")
    resolved = [item for pattern in patterns for item in _resolve(pattern)]
    sources: list[Source] = []
    used: set[str] = set()
    for location, kind in resolved:
        if any(source.location == location for source in sources):
            raise DataError(f"{location} is given twice in {patterns}")
        packed = kind not in ("hub", "saved") and location.endswith(".gz")
        sources.append(Source(_unique_name(location, used), location, kind, packed))
    return sources


def _unique_name(location: str, used: set[str]) -> str:
    path = Path(location.partition("#")[0])
    path = path.with_suffix("") if path.suffix == ".gz" else path
    stem = path.stem if path.suffix in _FORMATS else path.name
    candidates = [stem, f"{path.parent.name}/{stem}", *(f"{stem}~{i}" for i in range(2, len(used) + 3))]
    name = next(candidate for candidate in candidates if candidate not in used)
    used.add(name)
    return name


def _resolve(pattern: str) -> list[tuple[str, str]]:
    path_text, _, _ = pattern.partition("#")
    path = Path(path_text).expanduser()
    if path.is_dir():
        return _resolve_folder(path, pattern)
    if path.is_file():
        return [(str(path), _format(path))]
    if glob.has_magic(str(path)):
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise DataError(f"no file matches {pattern!r} (looked from {str(Path.cwd())!r})")
        return [(match, _format(Path(match))) for match in matches if Path(match).is_file()]
    if path.suffix not in (*_FORMATS, ".gz") and not path.is_absolute() and _HUB_ID.fullmatch(pattern):
        return [(pattern, "hub")]
    folder = path.parent
    near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=3) if folder.is_dir() else []
    hint = (
        f"; did you mean {' or '.join(map(repr, near))}?"
        if near
        else ("" if folder.is_dir() else f"; its folder {str(folder)!r} doesn't exist")
    )
    raise DataError(f"no data file {str(path)!r} (looked from {str(Path.cwd())!r}){hint}")


def _resolve_folder(path: Path, pattern: str) -> list[tuple[str, str]]:
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return [(pattern, "saved")]
    files = sorted(p for p in path.iterdir() if _suffix(p) in _FORMATS and p.is_file() and p.name[0] != ".")
    if not files:
        others = sorted(p.name for p in path.iterdir())[:5]
        there = f"; it has {', '.join(others)}" if others else ""
        raise DataError(f"folder {str(path)!r} holds no data file; expected one of {sorted(_FORMATS)}{there}")
    return [(str(file), _format(file)) for file in files]


def _suffix(path: Path) -> str:
    """Return the suffix that says the format: without the `.gz` of a text file."""
    if path.suffix.lower() == ".gz" and path.with_suffix("").suffix.lower() in _GZIP:
        return path.with_suffix("").suffix.lower()
    return path.suffix.lower()


def _format(path: Path) -> str:
    try:
        return _FORMATS[_suffix(path)]
    except KeyError:
        raise DataError(f"{path}: unknown format {path.suffix!r}; expected one of {sorted(_FORMATS)}") from None


def scan_rows(source: Source) -> Iterator[Row | BadRow]:
    """Yield the rows of a source, and in their places those that can't be read; raise `DataError` where it can't go
    on, with file and line."""
    return READERS[source.format](source)


def read_rows(source: Source) -> Iterator[Row]:
    """Yield the rows of a source; raise `DataError` at the first that can't be read, with file and line."""
    for row in scan_rows(source):
        if isinstance(row, BadRow):
            raise BadRowError(f"{row.where}: {row.reason}")
        yield row
