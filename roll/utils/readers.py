"""Rows out of json, jsonl, csv, tsv, parquet and Hugging Face datasets, one format per function."""

from __future__ import annotations

import csv
import difflib
import glob
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A dataset that can't be used as it is; the message names the file, the line and the fix."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file or dataset. `name` is short and unique among the sources of a run: it becomes part of task ids."""

    name: str
    location: str
    """Path, or Hub id with an optional `#split`."""
    format: str
    """json, jsonl, csv, tsv, parquet, saved (a `save_to_disk` folder), hub"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it is."""

    number: int
    """From 1, within its source."""
    where: str
    """`file:line`, for messages."""
    values: Mapping[str, Any]


_FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?:/[\w.-]+)?(?:#[\w.\[\]:%-]+)?")
_MAX_FIELD = 2**31 - 1
_BATCH_ROWS = 1024


def resolve_sources(files: str | Sequence[str]) -> list[Source]:
    """Return the sources meant by file names, folders, globs and Hub ids, in this order (a folder or glob: sorted by
    name).

    `data.jsonl`; `data/*.parquet`; a folder of such files; a folder written by `save_to_disk`; a Hub dataset
    `owner/name[/config][#split]`. The split of a Hub or saved dataset is `train` unless given after `#`.
    """
    patterns = [files] if isinstance(files, str) else list(files)
    if not patterns:
        raise DataError("no data files are given; set data_args.file_name")
    found = [item for pattern in patterns for item in _resolve(pattern)]
    sources: list[Source] = []
    used: set[str] = set()
    for location, kind in found:
        if any(source.location == location for source in sources):
            raise DataError(f"{location} is given twice in {patterns}")
        sources.append(Source(_unique_name(location, used), location, kind))
    return sources


def _unique_name(location: str, used: set[str]) -> str:
    path = Path(location.partition("#")[0])
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
    if path.suffix not in _FORMATS and not path.is_absolute() and _HUB_ID.fullmatch(pattern):
        return [(pattern, "hub")]
    folder = path.parent
    near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=3) if folder.is_dir() else []
    hint = (
        f"; did you mean {near}?"
        if near
        else ("" if folder.is_dir() else f"; its folder {str(folder)!r} doesn't exist")
    )
    raise DataError(f"no data file {str(path)!r} (looked from {str(Path.cwd())!r}){hint}")


def _resolve_folder(path: Path, pattern: str) -> list[tuple[str, str]]:
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return [(pattern, "saved")]
    files = sorted(p for p in path.iterdir() if p.suffix in _FORMATS)
    if not files:
        raise DataError(f"folder {str(path)!r} holds no data file; expected one of {sorted(_FORMATS)}")
    return [(str(file), _format(file)) for file in files]


def _format(path: Path) -> str:
    try:
        return _FORMATS[path.suffix.lower()]
    except KeyError:
        raise DataError(f"{path}: unknown format {path.suffix!r}; expected one of {sorted(_FORMATS)}") from None


def read_rows(source: Source) -> Iterator[Row]:
    """Yield the rows of a source; raise `DataError` at one that can't be read, with file and line."""
    return _READERS[source.format](source)


def _row(number: int, where: str, values: object) -> Row:
    if not isinstance(values, Mapping):
        raise DataError(f"{where}: a row is {values!r:.60}, expected an object with columns")
    return Row(number, where, values)


def _read_json(source: Source) -> Iterator[Row]:
    try:
        text = Path(source.location).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{source.location}: not UTF-8: {error}") from error
    try:
        data = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from _read_jsonl(source)  # JSON Lines under the name .json, as many hubs have it
            return
        raise DataError(f"{source.location}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    rows = data.get("data") if isinstance(data, Mapping) else data
    if not isinstance(rows, list):
        raise DataError(f'{source.location}: expected a list of rows or {{"data": [rows]}}, got {type(data).__name__}')
    for number, values in enumerate(rows, 1):
        yield _row(number, f"{source.location}[row {number}]", values)


def _read_jsonl(source: Source) -> Iterator[Row]:
    number = 0
    with open(source.location, "rb") as file:
        for line_number, raw in enumerate(file, 1):
            where = f"{source.location}:{line_number}"
            try:
                line = raw.decode("utf-8-sig" if line_number == 1 else "utf-8").strip()
                values = json.loads(line) if line else None
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8: {error}") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not JSON: {error.msg} (column {error.colno}): {line:.60}") from error
            if line:
                number += 1
                yield _row(number, where, values)


def _read_delimited(source: Source) -> Iterator[Row]:
    csv.field_size_limit(_MAX_FIELD)
    with open(source.location, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if source.format == "tsv" else ",", strict=True)
        header: list[str] = []
        number, start = 0, 1
        try:
            for fields in reader:
                where, start = f"{source.location}:{start}", reader.line_num + 1
                if not header:
                    header = fields
                    if len(set(header)) < len(header):
                        raise DataError(f"{where}: the header names a column twice: {header}")
                elif fields:  # else a blank line
                    if len(fields) != len(header):
                        raise DataError(f"{where}: {len(fields)} fields, but the header has {len(header)}: {header}")
                    number += 1
                    yield Row(number, where, dict(zip(header, fields, strict=True)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{source.location}:{reader.line_num}: not {source.format}: {error}") from error


def _read_parquet(source: Source) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(source.location)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{source.location}: not parquet: {error}") from error
    number = 0
    with file:
        for batch in file.iter_batches(_BATCH_ROWS):
            for values in batch.to_pylist():
                number += 1
                yield Row(number, f"{source.location}[row {number}]", values)


def _read_dataset(source: Source) -> Iterator[Row]:
    import datasets

    location, _, split = source.location.partition("#")
    if source.format == "hub":
        parts = location.split("/")
        try:
            data = datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split or "train")
        except (ValueError, OSError) as error:
            raise DataError(
                f"{location!r} is neither a file here (looked from {str(Path.cwd())!r}) nor a dataset that loads "
                f"from the Hub: {type(error).__name__}: {error}"
            ) from error
    else:
        data = datasets.load_from_disk(str(Path(location).expanduser()))
        if isinstance(data, datasets.DatasetDict):
            if (split or "train") not in data:
                raise DataError(
                    f"{location}: no split {split or 'train'!r}; splits: {sorted(data)} (write {location}#split)"
                )
            data = data[split or "train"]
        elif split:
            raise DataError(f"{location}: a single dataset without splits; drop '#{split}'")
    for number, values in enumerate(data, 1):
        yield Row(number, f"{source.location}[row {number}]", values)


_READERS: dict[str, Callable[[Source], Iterator[Row]]] = {
    "json": _read_json,
    "jsonl": _read_jsonl,
    "csv": _read_delimited,
    "tsv": _read_delimited,
    "parquet": _read_parquet,
    "saved": _read_dataset,
    "hub": _read_dataset,
}
