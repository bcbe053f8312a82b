"""Training prompts that stay on disk: one pass that checks every row, then each is read again when it is drawn.

Order, tokens, ids and the cursor are those of the same files read into memory (`load_tasks`, `encode_prompts`), so that
a run may be resumed with the other of the two.
"""

from __future__ import annotations

import copy
import itertools
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from roll.configs.schema.worker_config import DataArgs
from roll.data.curriculum import difficulty_of
from roll.data.prompts import CUT, LengthRule, encode_some, refuse
from roll.data.quarantine import Quarantine
from roll.data.sampler import EPOCH_IN_ID
from roll.data.sources import ID_HINT, TaskReader, data_sources, no_domain, owner_by_tag
from roll.data.task_ids import base_id, epoch_of
from roll.data.task_tables import RowStore, StreamedTable
from roll.data.templates import PromptEncoder, TemplateError
from roll.types.trajectory import Task
from roll.utils.rows import DataError, Row

_CHUNK = 256
_MAX_CACHED_PROMPTS = 4096


class StreamedPrompts:
    """Token ids of prompts, made when they are asked for; the last ones are kept. Thread-safe."""

    def __init__(self, encoder: PromptEncoder, limit: int, cut: str | None, metrics: Mapping[str, float]) -> None:
        self._encoder, self._limit, self._cut = copy.deepcopy(encoder), limit, cut
        self.metrics = metrics
        self.tasks: Sequence[Task] = ()
        """Those in memory: generated ones."""
        self._cache: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """Return the prompt's token ids; a repeat in a later epoch has those of the first."""
        key = base_id(task.id)
        with self._lock:
            if key not in self._cache:
                prompt = self._encoder.encode_within(task, self._limit, self._cut)
                long = self._cut is not None and prompt.tokens > self._limit
                self._cache[key] = CUT[self._cut or ""](prompt.ids, self._limit) if long else prompt.ids
                if len(self._cache) > _MAX_CACHED_PROMPTS:
                    self._cache.popitem(last=False)
            return self._cache[key]


@dataclass(frozen=True, slots=True)
class StreamedData:
    """What is known of rows on disk."""

    tables: Mapping[str, StreamedTable]
    """By domain."""
    prompts: StreamedPrompts
    difficulty: Mapping[str, Sequence[float]]
    """Of the rows of each table, where a curriculum asks for it."""


class Streamer:
    """Checks all rows in one pass and leaves them where they are.

    Args:
        tags: of each domain.
        default_tag: of rows without a tag; see `load_tasks`.
        folder: for the temporary file of formats that can't be read from the middle.
    """

    def __init__(
        self,
        data: DataArgs,
        encoder: PromptEncoder,
        rule: LengthRule,
        *,
        tags: Mapping[str, Sequence[str]],
        seed: int,
        default_tag: str | None,
        prompt_length: int,
        quarantine: Quarantine,
        folder: Path,
    ) -> None:
        self._data, self._encoder, self._rule = data, encoder, rule
        self._tags, self._owner = tags, owner_by_tag(tags)
        self._limit, self._quarantine = prompt_length, quarantine
        self._sources = data_sources(data.file_name, data)
        self._reader = TaskReader(data, seed=seed, default_tag=default_tag, quarantine=quarantine, keeps=False)
        self._store = RowStore(self._sources, folder)

    def scan(self, generated: Mapping[str, Sequence[Task]]) -> StreamedData:
        """Read all rows; `generated` are tasks in memory by domain, every domain there, which come first.

        Raises `DataError` as `load_tasks`, `route_by_tag` and `encode_prompts` do.
        """
        first = [task for tasks in generated.values() for task in tasks]
        fitting = [task for at, task in self._fitting(first)]
        tables = {
            domain: StreamedTable([task for task in fitting if task.domain == domain], self._store, self._task)
            for domain in generated
        }
        difficulty = {domain: array("d") for domain in generated}
        lost: Counter[str] = Counter()
        rows = self._reader.read(self._sources)
        while chunk := list(itertools.islice(rows, _CHUNK)):
            lost.update(task.tag for _, task, _ in chunk if self._owner(task.tag) is None)
            chunk = [item for item in chunk if self._owner(item[1].tag) is not None]
            for at, task in self._fitting([task for _, task, _ in chunk]):
                if epoch_of(task.id):
                    raise DataError(EPOCH_IN_ID)
                number, _, row = chunk[at]
                domain = self._owner(task.tag) or ""
                tables[domain].add(task, self._store.add(number, row))
                if self._data.curriculum.by == "column":
                    difficulty[domain].append(difficulty_of(row.values, self._data.curriculum.column or ""))
        self._store.finish()
        self._reader.finish()
        self._quarantine.finish()
        if lost:
            raise no_domain(lost, self._tags)
        prompts = StreamedPrompts(self._encoder, self._limit, self._rule.cut, self._rule.finish())
        prompts.tasks = fitting
        for table in tables.values():
            for task in table.repeated():
                raise DataError(f"id {task.id!r} is used twice; ids must be unique within a tag{ID_HINT}")
        return StreamedData(tables, prompts, difficulty if self._data.curriculum.by == "column" else {})

    def _fitting(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Task]]:
        """Yield (position, task) of those that the template fits and the length rule lets pass."""
        workers = self._data.preprocessing_num_workers
        encoded = encode_some(tasks, self._encoder, self._limit, self._rule.cut, workers) if tasks else []
        for at, (task, prompt) in enumerate(zip(tasks, encoded, strict=True)):
            if isinstance(prompt, TemplateError):
                refuse(task, prompt, self._quarantine)
            elif self._rule.accept(task, prompt) is not None:
                yield at, task

    def _task(self, number: int, row: Row) -> Task:
        task = self._reader.make(self._sources[number], row)
        return replace(task, domain=self._owner(task.tag) or "")
