"""The tasks of one domain: a list, or rows that stay on disk and are read when they are drawn."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from roll.types.trajectory import Task
from roll.utils.row_formats import parse_line
from roll.utils.rows import DataError, Row, Source
from roll.utils.seeding import StableHasher, stable_hash

TaskMaker = Callable[[int, Row], Task]
"""From the number of a source and a row to its task, with its domain."""


class TaskTable(ABC, Sequence[Task]):
    """Tasks of a domain by their position, and positions by task id."""

    fingerprint: str
    """Depends on the tasks, what they ask and expect, and their order."""

    @abstractmethod
    def index_of(self, task_id: str) -> int | None:
        """Return the position of a task; None when there is none with this id."""

    @abstractmethod
    def item(self, index: int) -> Task:
        """Return one task."""

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self.item(i) for i in range(*index.indices(len(self)))]
        return self.item(index)


class ListTable(TaskTable):
    """Tasks in memory."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)
        self._positions = {task.id: index for index, task in enumerate(self._tasks)}
        fingerprint = Fingerprint()
        for task in self._tasks:
            fingerprint.add(task)
        self.fingerprint = str(fingerprint)

    def __len__(self) -> int:
        return len(self._tasks)

    def index_of(self, task_id: str) -> int | None:
        return self._positions.get(task_id)

    def item(self, index: int) -> Task:
        return self._tasks[index]


class Fingerprint:
    """A hash of tasks, what they ask and expect, and their order, over as many as there are."""

    def __init__(self) -> None:
        self._count = 0
        self._hasher = StableHasher()

    def add(self, task: Task) -> None:
        """Take in the next task."""
        payload = task.payload
        content = [task.id, payload.get("prompt"), payload.get("messages"), str(payload.get("ground_truth"))]
        self._count += 1
        self._hasher.add(json.dumps(content, default=str))  # pictures by their digest

    def __str__(self) -> str:
        return f"{self._count} tasks, {self._hasher.value:016x}"


class RowStore:
    """Where the rows of all sources are: rows of plain jsonl in their file, others in a temporary file.

    The temporary file has no name: it is gone when the process ends, however it ends.
    """

    def __init__(self, sources: Sequence[Source], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._sources = sources
        self._unpacked = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the run
        self._end = 0
        self._files: dict[int, int] = {}
        self._source, self._offset, self._size = array("H"), array("Q"), array("I")
        self._number, self._hash = array("I"), array("Q")

    def __len__(self) -> int:
        return len(self._offset)

    def add(self, source: int, row: Row) -> int:
        """Keep the place of a row and return its position here."""
        if row.span is not None:
            offset, size = row.span
            raw = os.pread(self._file(source), size, offset)
        else:
            try:
                raw = pickle.dumps((row.where, dict(row.values)))
            except Exception as error:  # whatever the values are, rewards get them by pickle too
                raise DataError(f"{row.where}: a value can't be pickled: {type(error).__name__}: {error}") from error
            offset, size = self._end, len(raw)
            self._unpacked.write(raw)
            self._end += size
        self._source.append(2 * source + (row.span is None))
        self._offset.append(offset)
        self._size.append(size)
        self._number.append(row.number)
        self._hash.append(_digest(raw))
        return len(self._offset) - 1

    def finish(self) -> None:
        """Make the rows that were added readable."""
        self._unpacked.flush()

    def read(self, position: int) -> tuple[int, Row]:
        """Return the number of the source, and the row; raises `DataError` if its file has changed."""
        source, unpacked = divmod(self._source[position], 2)
        offset, size, number = self._offset[position], self._size[position], self._number[position]
        raw = os.pread(self._unpacked.fileno() if unpacked else self._file(source), size, offset)
        location = self._sources[source].location
        if _digest(raw) != self._hash[position]:
            raise DataError(
                f"{location}[row {number}] has changed since the run began; leave files alone while a run streams them"
            )
        if unpacked:
            where, values = pickle.loads(raw)  # written by this process, into a file without a name
            return source, Row(number, where, values)
        values = parse_line(raw)
        assert values is not None, "blank lines are no rows"
        return source, Row(number, f"{location}[row {number}]", values)

    def _file(self, source: int) -> int:
        if source not in self._files:
            self._files[source] = os.open(self._sources[source].location, os.O_RDONLY)
        return self._files[source]

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._unpacked.close()


def _digest(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


class StreamedTable(TaskTable):
    """Tasks whose rows are on disk; about 50 bytes of memory each. `first` are tasks in memory, which come first."""

    def __init__(self, first: Sequence[Task], store: RowStore, make: TaskMaker) -> None:
        self._first = tuple(first)
        self._store, self._make = store, make
        self._offsets, self._ids = array("Q"), array("Q")
        self._first_ids = {task.id: index for index, task in enumerate(self._first)}
        self._fingerprint = Fingerprint()
        for task in self._first:
            self._fingerprint.add(task)
        self._by_hash: tuple[NDArray[np.int64], NDArray[np.uint64]] | None = None

    def add(self, task: Task, offset: int) -> None:
        """Take in the next task, whose row the store has at `offset`."""
        self._offsets.append(offset)
        self._ids.append(stable_hash("id", task.id))
        self._fingerprint.add(task)
        self._by_hash = None

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return str(self._fingerprint)

    def __len__(self) -> int:
        return len(self._first) + len(self._offsets)

    def item(self, index: int) -> Task:
        index = index + len(self) if index < 0 else index
        if index >= len(self):
            raise IndexError(index)
        if index < len(self._first):
            return self._first[index]
        return self._make(*self._store.read(self._offsets[index - len(self._first)]))

    def index_of(self, task_id: str) -> int | None:
        if task_id in self._first_ids:
            return self._first_ids[task_id]
        order, hashes = self._sorted()
        wanted = np.uint64(stable_hash("id", task_id))
        matches = order[np.searchsorted(hashes, wanted) : np.searchsorted(hashes, wanted, side="right")]
        indices = (int(index) + len(self._first) for index in matches)
        return next((index for index in indices if self.item(index).id == task_id), None)

    def repeated(self) -> Iterator[Task]:
        """Yield tasks whose id an earlier one has."""
        order, hashes = self._sorted()
        for at in np.flatnonzero(hashes[1:] == hashes[:-1]):
            one, two = (self.item(int(order[at + i]) + len(self._first)) for i in (0, 1))
            if one.id == two.id:
                yield two

    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        if self._by_hash is None:
            hashes = np.frombuffer(self._ids.tobytes(), dtype=np.uint64)
            order = np.argsort(hashes, kind="stable")
            self._by_hash = (order, hashes[order])
        return self._by_hash
