"""One format per function: json, jsonl, csv, tsv, parquet and Hugging Face datasets.

Each yields rows and, in their place, the ones that can't be read; it raises `DataError` when it can't go on.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from roll.utils.arrow_values import Decode, json_decoder, without_padding
from roll.utils.rows import BadRow, DataError, Row, Source

_MAX_FIELD = 2**31 - 1
_BATCH_ROWS = 1024
_MAX_LINE = 2**28
"""Bytes of one line: a file without line ends must not fill the memory."""
_MAX_JSON = 2**31
"""Bytes of a json list, which can only be read whole."""
_MAX_DEPTH = 200
_OTHER_ENCODINGS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}

RowOrBad = Row | BadRow


def parse_json(text: str | bytes) -> Any:
    """Return the JSON value; raises `ValueError` saying what is wrong, also for keys given twice and deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("not usable JSON: it is nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except ValueError as error:
        reason = "a number has too many digits" if "digits" in str(error) else str(error)
        raise ValueError(f"not usable JSON: {reason}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} is given twice")
    return values


def parse_line(raw: bytes, *, first: bool = False) -> Mapping[str, Any] | None:
    """Return the row of one line of JSON Lines, None for a blank one; raises `ValueError` with what is wrong."""
    try:
        line = raw.decode("utf-8-sig" if first else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(raw, error, first=first)) from error
    if not line:
        return None
    try:
        values = parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno}): {line:.60}") from error
    if line.count("[") + line.count("{") > _MAX_DEPTH:
        _check_depth(values)
    return _mapping(values)


def _check_depth(value: object) -> None:
    """Raise `ValueError` for a value that can't be handed to another process, because it is nested too deeply."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [part for part in level if isinstance(part, (dict, list))]
        level = [item for part in inner for item in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return
    raise ValueError(f"not usable JSON: it is nested too deeply, by more than {_MAX_DEPTH} levels")


def _mapping(values: object) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"a row is {_short(values)}, expected an object with columns")
    return values


def _short(value: object) -> str:
    try:
        return f"{value!r:.60}"
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        return f"a {type(value).__name__}"


def _not_utf8(raw: bytes, error: UnicodeDecodeError, *, first: bool = True) -> str:
    other = next((name for mark, name in _OTHER_ENCODINGS.items() if first and raw.startswith(mark)), None)
    hint = f"; it looks like {other}, write the file as UTF-8" if other else ""
    return f"not UTF-8: {error.reason} ({raw[error.start]:#04x} at byte {error.start + 1}){hint}"


def _opened(source: Source) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(source.location)) if source.compressed else open(source.location, "rb")


def _lines(source: Source, file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number, offset, bytes) of each line."""
    number = offset = 0
    while True:
        try:
            raw = file.readline(_MAX_LINE + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{source.location}:{number + 1}: not gzip, or cut short: {error}") from error
        if not raw:
            return
        number += 1
        if len(raw) > _MAX_LINE:
            raise DataError(
                f"{source.location}:{number}: a line of more than {_MAX_LINE >> 20} MiB; is this {source.format}?"
            )
        yield number, offset, raw
        offset += len(raw)


def read_json(source: Source) -> Iterator[RowOrBad]:
    """Read a list of rows, `{"data": [rows]}`, or JSON Lines."""
    with _opened(source) as file:
        begin = file.read(4096).decode("utf-8", "ignore").lstrip("\ufeff \t\r\n")
        if begin.startswith("{") and _is_lines(source):
            yield from read_jsonl(source)  # JSON Lines under the name .json, as many hubs have it
            return
        file.seek(0)
        raw = file.read(_MAX_JSON + 1)
    if len(raw) > _MAX_JSON:
        raise DataError(f"{source.location}: a json list of more than {_MAX_JSON >> 30} GiB; write it as jsonl")
    try:
        text = raw.decode("utf-8-sig")
        data = parse_json(text) if text.strip() else []
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{source.location}:{line}: {_not_utf8(raw, error)}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{source.location}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except ValueError as error:
        raise DataError(f"{source.location}: {error}") from error
    rows = data.get("data") if isinstance(data, Mapping) else data
    if not isinstance(rows, list):
        raise DataError(f'{source.location}: expected a list of rows or {{"data": [rows]}}, got {type(data).__name__}')
    for number, values in enumerate(rows, 1):
        where = f"{source.location}[row {number}]"
        try:
            _check_depth(values)
            yield Row(number, where, _mapping(values))
        except ValueError as error:
            yield BadRow(number, where, str(error))


def _is_lines(source: Source) -> bool:
    """Return whether the first line of a file is a whole JSON object, and something follows it."""
    with _opened(source) as file:
        lines = (raw for _, _, raw in _lines(source, file) if raw.strip())
        try:
            values = parse_line(next(lines, b""), first=True)
        except ValueError:
            return False
        return values is not None and next(lines, None) is not None


def read_jsonl(source: Source) -> Iterator[RowOrBad]:
    """Read one object a line; blank lines don't count as rows."""
    number = 0
    with _opened(source) as file:
        for line, offset, raw in _lines(source, file):
            where = f"{source.location}:{line}"
            try:
                values = parse_line(raw, first=line == 1)
            except ValueError as error:
                number += 1
                yield BadRow(number, where, str(error))
                continue
            if values is not None:
                number += 1
                yield Row(number, where, values, None if source.compressed or line == 1 else (offset, len(raw)))


def read_delimited(source: Source) -> Iterator[RowOrBad]:
    """Read csv or tsv with a header."""
    csv.field_size_limit(_MAX_FIELD)
    at = 0  # of the line that the csv reader was given last

    def decoded(file: IO[bytes]) -> Iterator[str]:
        nonlocal at
        for line, _, raw in _lines(source, file):
            at = line
            try:
                yield raw.decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError as error:
                reason = _not_utf8(raw, error, first=line == 1)
                raise DataError(f"{source.location}:{line}: {reason}") from error

    with _opened(source) as file:
        reader = csv.reader(decoded(file), delimiter="\t" if source.format == "tsv" else ",", strict=True)
        header: list[str] = []
        number, start = 0, 1
        try:
            for fields in reader:
                where, start = f"{source.location}:{start}", at + 1
                if not header:
                    header = fields
                    if len(set(header)) < len(header):
                        raise DataError(f"{where}: the header names a column twice: {header}")
                elif fields:  # else a blank line
                    number += 1
                    if len(fields) == len(header):
                        yield Row(number, where, dict(zip(header, fields, strict=True)))
                    else:
                        reason = f"{len(fields)} fields, but the header has {len(header)}: {header}"
                        yield BadRow(number, where, reason)
        except csv.Error as error:
            raise DataError(f"{source.location}:{at}: not {source.format}: {error}") from error


def read_parquet(source: Source) -> Iterator[RowOrBad]:
    """Read parquet, a batch of rows at a time; columns of JSON, as datasets writes those of mixed types, as values."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(source.location) as file:
            decoders = {
                field.name: decode for field in file.schema_arrow if (decode := json_decoder(field.type, _json_value))
            }
            for batch in file.iter_batches(_BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield _decoded(Row(number, f"{source.location}[row {number}]", values), decoders)
    except (pyarrow.ArrowException, OSError) as error:
        after = f"[row {number + 1}]" if number else ""
        raise DataError(f"{source.location}{after}: not parquet: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{source.location}: after row {number}: a text is not UTF-8: {error}") from error


def _decoded(row: Row, decoders: Mapping[str, Decode]) -> RowOrBad:
    """Return a row of parquet with its JSON columns as values."""
    values = dict(row.values)
    for name, decode in decoders.items():
        try:
            values[name] = decode(values[name])
        except ValueError as error:
            return BadRow(row.number, row.where, f"column {name!r} is of type JSON, and its text isn't: {error}")
    return Row(row.number, row.where, without_padding(values))


def _json_value(text: str) -> Any:
    value = parse_json(text)
    _check_depth(value)
    return value


def read_dataset(source: Source) -> Iterator[RowOrBad]:
    """Read a dataset of the Hub, or a folder written by `save_to_disk`."""
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
        yield Row(number, f"{source.location}[row {number}]", without_padding(values))


READERS: dict[str, Callable[[Source], Iterator[RowOrBad]]] = {
    "json": read_json,
    "jsonl": read_jsonl,
    "csv": read_delimited,
    "tsv": read_delimited,
    "parquet": read_parquet,
    "saved": read_dataset,
    "hub": read_dataset,
}
