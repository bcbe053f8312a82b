"""Recorded rows by number, status and text: an index of the small columns in memory, the others read when asked for."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from roll.tracking.drops import last_words
from roll.tracking.recorded_responses import steps_of
from roll.tracking.rollouts import COUNT_COLUMNS, EXCERPT, KINDS, NUMBER_COLUMNS, Kind, columns, file_of

TEXTS = ("row_id", "task_id", "domain", "tag", "status", "finish_reason", "dropped")
NUMBERS = ("step", *COUNT_COLUMNS, *NUMBER_COLUMNS, "staleness")
EXCERPTS = ("prompt_end", "response_start", "ground_truth", "reward_parts")
INDEXED = ("step", *TEXTS, *COUNT_COLUMNS, *NUMBER_COLUMNS, *EXCERPTS)
SEARCHED = ("response", "prompt")
_BINS = 24
_LONGEST = {"dropped": 300, "ground_truth": 200}


class BadQuery(ValueError):
    """A request that asks for what there isn't."""


@dataclass(frozen=True)
class RowFilter:
    """The values that rows must have."""

    step: int | None = None
    equal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Text column -> allowed values."""
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    """In prompt or response; upper case counts if there is any in it."""

    @classmethod
    def of(cls, parameters: Mapping[str, list[str]]) -> RowFilter:
        """Read the parameters of a request. Raises `BadQuery`."""
        equal: dict[str, tuple[str, ...]] = {}
        bounds: dict[str, dict[str, float]] = {"min": {}, "max": {}}
        for name, values in parameters.items():
            prefix, _, column = name.partition("_")
            if name in TEXTS:
                equal[name] = tuple(values)
            elif prefix in bounds:
                if column not in NUMBERS:
                    raise BadQuery(f"{name}: there is no number {column!r}; there are {', '.join(NUMBERS)}")
                bounds[prefix][column] = number(name, values[-1])
        step = parameters.get("step")
        return cls(
            step=int(number("step", step[-1])) if step else None,
            equal=equal,
            least=bounds["min"],
            most=bounds["max"],
            text=parameters.get("q", [""])[-1],
        )

    def mask(self, table: pa.Table) -> Any:
        """Return which rows fit, text aside; None: all."""
        mask = None
        for name, values in self.equal.items():
            mask = _both(mask, pc.is_in(table[name], pa.array(values, pa.string())))
        for name, value in self.least.items():
            mask = _both(mask, pc.greater_equal(pc.cast(table[name], pa.float64()), value))
        for name, value in self.most.items():
            mask = _both(mask, pc.less_equal(pc.cast(table[name], pa.float64()), value))
        return None if mask is None else pc.fill_null(mask, False)


def _both(first: Any, second: Any) -> Any:
    return second if first is None else pc.and_(first, second)


def number(name: str, text: str) -> float:
    """Return a finite number of a request. Raises `BadQuery`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 2**53:
        raise BadQuery(f"{name}: {text[:40]!r} is no number")
    return value


class RowIndex:
    """The rows of one run's files. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[tuple[Kind, int], tuple[tuple[int, int], pa.Table]] = {}
        self._all: dict[Kind, tuple[tuple[Any, ...], pa.Table]] = {}
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="rows")

    def table(self, folder: Path | None, kind: Kind, step: int | None = None) -> pa.Table:
        """Return the indexed columns of a step or of all, with `row` (place in its file) and `staleness`."""
        if folder is None:
            return empty()
        steps = steps_of(folder, kind)
        if step is not None:
            if step not in steps:
                raise BadQuery(f"there are no {kind} rows of step {step}")
            return self._file(folder, kind, step)[1]
        parts = list(self._pool.map(lambda one: self._file(folder, kind, one), steps))
        key = tuple(stamp for stamp, _ in parts)
        with self._lock:
            cached = self._all.get(kind)
            if cached is None or cached[0] != key:
                cached = self._all[kind] = (key, pa.concat_tables([table for _, table in parts]) if parts else empty())
            return cached[1]

    def _file(self, folder: Path, kind: Kind, step: int) -> tuple[tuple[int, int], pa.Table]:
        path = file_of(folder, step, kind)
        try:
            stat = path.stat()
        except OSError as error:
            raise BadQuery(f"the {kind} rows of step {step} are gone") from error
        stamp = (stat.st_mtime_ns, stat.st_size)
        with self._lock:
            cached = self._files.get((kind, step))
        if cached is None or cached[0] != stamp:
            cached = (stamp, _indexed(_with_excerpts(path, read_columns(path, INDEXED)), step))
            with self._lock:
                self._files[kind, step] = cached
        return cached

    def matching(self, folder: Path | None, kind: Kind, wanted: RowFilter) -> pa.Table:
        """Return the rows that fit."""
        table = self.table(folder, kind, wanted.step)
        mask = wanted.mask(table)
        table = table if mask is None else table.filter(mask)
        if wanted.text and folder is not None:
            table = self._with_text(folder, kind, table, wanted.text)
        return table

    def _with_text(self, folder: Path, kind: Kind, table: pa.Table, text: str) -> pa.Table:
        steps = pc.unique(table["step"]).to_pylist()
        parts = {step: table.filter(pc.equal(table["step"], step)) for step in steps} if len(steps) > 1 else {}

        def search(step: int) -> pa.Table:
            part = parts.get(step, table)
            file = read_columns(file_of(folder, step, kind), SEARCHED)
            matches = None
            for name in SEARCHED:
                hit = pc.match_substring(file[name], text, ignore_case=text == text.lower())
                matches = hit if matches is None else pc.or_kleene(matches, hit)
            return part.filter(pc.fill_null(pc.take(matches, part["row"]), False))

        tables = list(self._pool.map(search, steps))
        return pa.concat_tables(tables) if tables else table.slice(0, 0)


def read_columns(path: Path, names: tuple[str, ...]) -> pa.Table:
    """Return columns of a file; those that an earlier version didn't have are null. Raises `BadQuery`."""
    fields = columns()
    try:
        with pq.ParquetFile(path) as file:
            there = set(file.schema_arrow.names)
            table = file.read(columns=[name for name in names if name in there], use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise BadQuery(f"{path.name} can't be read: {error}") from error
    for name in names:
        if name not in there:
            table = table.append_column(name, pa.nulls(table.num_rows, fields[name]))
    return table.select(list(names))


def _with_excerpts(path: Path, table: pa.Table) -> pa.Table:
    """Return the table with the excerpts that a file of the first version lacks."""
    if table.num_rows and table["response_start"].null_count == table.num_rows:
        texts = read_columns(path, ("prompt", "response"))
        for name, cut in (
            ("prompt_end", pc.utf8_slice_codeunits(texts["prompt"], -EXCERPT)),
            ("response_start", pc.utf8_slice_codeunits(texts["response"], 0, EXCERPT)),
        ):
            table = table.set_column(table.schema.get_field_index(name), name, cut)
    return table


def _indexed(table: pa.Table, step: int) -> pa.Table:
    """Return the table with what is computed: `row`, `staleness`."""
    rows = pa.array(range(table.num_rows), pa.int64())
    table = table.set_column(
        table.schema.get_field_index("step"), "step", pa.repeat(pa.scalar(step, pa.int64()), len(rows))
    )
    oldest = pc.if_else(pc.greater_equal(table["version_min"], 0), table["version_min"], None)
    reasons = pa.array([last_words(text) if text else text for text in table["dropped"].to_pylist()], pa.string())
    table = table.set_column(table.schema.get_field_index("dropped"), "dropped", reasons)
    for name, characters in _LONGEST.items():
        cut = pc.utf8_slice_codeunits(table[name], 0, characters)
        table = table.set_column(table.schema.get_field_index(name), name, cut)
    return table.append_column("row", rows).append_column("staleness", pc.subtract(step - 1, oldest)).combine_chunks()


def empty() -> pa.Table:
    """Return an index of no rows."""
    fields = columns()
    return _indexed(pa.schema([(name, fields[name]) for name in INDEXED]).empty_table(), 0)


def page(table: pa.Table, sort: str, order: str, offset: int, limit: int) -> pa.Table:
    """Return some rows of a table in an order; equal ones, and those without the value, in that of the run."""
    if sort:
        if sort not in (*TEXTS, *NUMBERS):
            raise BadQuery(f"sort: there is no column {sort!r}; there are {', '.join((*TEXTS, *NUMBERS))}")
        direction = "descending" if order == "desc" else "ascending"
        positions = pc.sort_indices(table, sort_keys=[(sort, direction), ("step", "ascending"), ("row", "ascending")])
        return table.take(positions.slice(offset, limit))
    return table.slice(offset, limit)


def records(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as JSON has them."""
    rows = [{name: plain(value) for name, value in row.items()} for row in table.to_pylist(maps_as_pydicts="lossy")]
    for row in rows:
        if row.get("seed") is not None:
            row["seed"] = str(row["seed"])  # a browser's numbers have 53 bits
    return rows


def plain(value: Any) -> Any:
    """Return a value without what JSON can't say: numbers that aren't finite are null, others have 9 digits."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def histogram(column: pa.ChunkedArray) -> dict[str, Any]:
    """Return counts of equal bins over the range of a column: `low`, `high`, `counts`. Few distinct values have a bin
    each: `values`."""
    values = pc.drop_null(pc.cast(column, pa.float64()))
    values = values.filter(pc.is_finite(values))
    if not len(values):
        return {"counts": []}
    distinct = pc.value_counts(values)
    if len(distinct) <= _BINS:
        pairs = sorted((one["values"].as_py(), one["counts"].as_py()) for one in distinct)
        return {"values": [plain(value) for value, _ in pairs], "counts": [count for _, count in pairs]}
    low, high = pc.min(values).as_py(), pc.max(values).as_py()
    bins = pc.floor(pc.divide(pc.multiply(pc.subtract(values, low), _BINS), high - low))
    counted = {int(one["values"].as_py()): one["counts"].as_py() for one in pc.value_counts(bins)}
    counts = [counted.get(index, 0) for index in range(_BINS)]
    counts[-1] += counted.get(_BINS, 0)
    return {"low": low, "high": high, "counts": counts}


def kind_of(text: str) -> Kind:
    """Return a kind of rows. Raises `BadQuery`."""
    for kind in KINDS:
        if kind == text:
            return kind
    raise BadQuery(f"kind: {text[:40]!r} is none of {', '.join(KINDS)}")
