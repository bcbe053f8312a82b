"""What can be said about data before a run: columns, lengths, repeats, bad rows, tags. One pass, little memory."""

from __future__ import annotations

import itertools
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from roll.configs.schema.offline_config import OfflineDataArgs
from roll.configs.schema.worker_config import DataArgs
from roll.data.chat_masks import Messages
from roll.data.finished_rows import OfflineRow
from roll.data.prompts import encode_some
from roll.data.quarantine import Quarantine
from roll.data.row_conversations import unused_columns
from roll.data.sources import TaskReader, data_sources, prompt_key, prompt_texts
from roll.data.templates import PromptEncoder, TemplateError
from roll.types.trajectory import Task
from roll.utils.pictures import has_placeholder
from roll.utils.readers import resolve_sources, scan_rows
from roll.utils.rows import BadRow, DataError, Row, Source
from roll.utils.seeding import stable_hash

if TYPE_CHECKING:
    from roll.data.picture_check import PictureFindings
    from roll.types.picture import Picture

LISTED = 10
"""Examples of each kind of finding that are kept."""
_CHUNK = 256
_BINS = 10
_PROGRESS_SECONDS = 5.0


class Learnt(Protocol):
    """What is learnt from a row."""

    @property
    def conversations(self) -> Sequence[Messages]:
        """Return its conversation, or both of its pair."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Offered in them."""

    @property
    def pictures(self) -> Sequence[Picture]:
        """Shown in its conversation, or the first of its pair."""

    @property
    def used(self) -> Collection[str]:
        """Columns that were read."""


LearntOf: TypeAlias = Callable[[Source, Row], Learnt]
"""A row -> what is learnt from it; raises `DataError`."""
Encode: TypeAlias = Callable[[Any], OfflineRow]
"""What is learnt from a row -> its tokens, as a run makes them; raises `DataError`."""

PLACEHOLDER_ONLY = "has a place for a picture in its text, such as <image>, and no picture: it is read as text"


@dataclass(slots=True)
class ColumnSummary:
    """What a column holds."""

    types: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    empty: int = 0
    """Rows in which it is null, or an empty text or list."""
    example: str = ""


@dataclass(slots=True)
class Findings:
    """What was found in one set of rows."""

    name: str
    rows: int = 0
    columns: dict[str, ColumnSummary] = field(default_factory=dict)
    bad: int = 0
    bad_listed: list[str] = field(default_factory=list)
    duplicates: int = 0
    repeated_ids: list[str] = field(default_factory=list)
    tags: Counter[str] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    longest: tuple[int, str] = (0, "")
    too_long: int = 0
    prompts: set[int] = field(default_factory=set)
    overlap: int = 0
    overlap_listed: list[str] = field(default_factory=list)
    odd: Counter[str] = field(default_factory=Counter)
    """What is odd about conversations, and how often; such rows are trained on."""
    untaught: int = 0
    pictures: PictureFindings | None = None
    """What its pictures are; None: rows of text."""
    unused: Counter[str] = field(default_factory=Counter)
    """Columns that nothing reads, but rewards where there are some, and in how many rows."""
    failure: str = ""
    """Why reading stopped before the end."""
    unread: bool = False
    """Whether there are rows that nobody looked at, because the time was up."""

    def add_row(self, row: Row) -> None:
        """Take in the columns of a row, nested ones with a dot."""
        for name, value in _flat(row.values):
            column = self.columns.setdefault(name, ColumnSummary())
            column.rows += 1
            column.types[type(value).__name__ if value is not None else "null"] += 1
            column.empty += value is None or value in ("", [])
            if not column.example and value not in (None, "", []):
                column.example = " ".join(f"{str(value)[:200]}".split())

    def add_unused(self, columns: Iterable[str]) -> None:
        """Take in the columns of a row that nothing reads."""
        self.unused.update(columns)

    def add_prompt(self, key: int, name: str, known: set[int]) -> None:
        """Note a prompt: a repeat, or one that is in `known` too."""
        self.duplicates += key in self.prompts
        self.prompts.add(key)
        if key in known:
            self.overlap += 1
            if len(self.overlap_listed) < LISTED:
                self.overlap_listed.append(name)

    def add_length(self, tokens: int, name: str, limit: int | None) -> None:
        """Note the length of a row in tokens."""
        self.lengths.append(tokens)
        self.longest = max(self.longest, (tokens, name))
        self.too_long += limit is not None and tokens > limit

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (from, to, rows) of equal bins of the lengths, the bounds included."""
        if not self.lengths:
            return []
        lengths = np.frombuffer(self.lengths, dtype=np.uint64).astype(np.int64)
        low, width = int(lengths.min()), max(1, math.ceil((int(lengths.max()) - int(lengths.min()) + 1) / _BINS))
        counts = np.bincount((lengths - low) // width)
        return [(low + i * width, low + (i + 1) * width - 1, int(n)) for i, n in enumerate(counts)]

    def quantile(self, share: float) -> int:
        """Return the length that this share of the rows doesn't exceed."""
        ordered = np.sort(np.frombuffer(self.lengths, dtype=np.uint64))
        return int(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)])


class _BadRows(Quarantine):
    """Lets every row be bad and lists the first."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(math.inf)
        self._findings = findings

    def add(self, where: str, reason: str) -> None:
        self._findings.bad += 1
        if len(self._findings.bad_listed) < LISTED:
            self._findings.bad_listed.append(f"{where}: {reason}")


class Progress:
    """Says how far a pass is, now and then, and when it has to end.

    Args:
        seconds: that all passes together may take; None: as long as they need.
    """

    def __init__(self, say: Callable[[str], None] | None, seconds: float | None = None) -> None:
        self._say, self._last = say, time.monotonic()
        self._end = math.inf if seconds is None else self._last + seconds

    @property
    def over(self) -> bool:
        """Return whether the time is up."""
        return time.monotonic() > self._end

    def at(self, rows: int, what: str) -> bool:
        """Say it if some seconds have passed; return whether the time is up."""
        now = time.monotonic()
        if self._say is not None and now - self._last > _PROGRESS_SECONDS:
            self._last = now
            self._say(f"{what}: {rows:,} rows so far")
        return now > self._end


def check_prompts(
    findings: Findings,
    data: DataArgs,
    encoder: PromptEncoder | None,
    *,
    prompt_length: int | None,
    default_tag: str | None,
    known: set[int],
    progress: Progress,
) -> Iterator[Task]:
    """Take in all rows of prompts and yield the tasks they make.

    Args:
        encoder: measures prompts; None: lengths stay unknown.
        known: prompts of the other set, for the overlap.
    """
    bad = _BadRows(findings)
    reader = TaskReader(data, seed=0, default_tag=default_tag, quarantine=bad, on_row=findings.add_row, keeps=False)
    ids: set[int] = set()
    try:
        tasks = reader.read(data_sources(data.file_name, data))
        while items := list(itertools.islice(tasks, _CHUNK)):
            chunk = [task for _, task, _ in items]
            for _, task, row in items:
                findings.add_unused(unused_columns(row.values, reader.used_columns(task.source)))
                findings.tags[task.tag] += 1
                if findings.pictures is not None:
                    findings.pictures.add(task.pictures, task.id)
                findings.odd[PLACEHOLDER_ONLY] += any(has_placeholder(text) for text in prompt_texts(task))
                findings.add_prompt(prompt_key(task), task.id, known)
                key = stable_hash(task.id)
                if key in ids and len(findings.repeated_ids) < LISTED:
                    findings.repeated_ids.append(task.id)
                ids.add(key)
            if encoder is not None:
                _measure(findings, chunk, encoder, prompt_length, bad)
            yield from chunk
            if progress.at(bad.rows, findings.name):
                findings.unread = True
                break
    except DataError as error:
        findings.failure = str(error)
    findings.rows, findings.duplicates = bad.rows, findings.duplicates + bad.duplicates


def _measure(findings: Findings, tasks: list[Task], encoder: PromptEncoder, limit: int | None, bad: Quarantine) -> None:
    for task, prompt in zip(tasks, encode_some(tasks, encoder, limit or 2**20, None, 1), strict=True):
        if isinstance(prompt, TemplateError):
            bad.add(task.id, str(prompt))
        else:
            findings.add_length(prompt.tokens, task.id, limit)


def check_conversations(
    findings: Findings,
    data: OfflineDataArgs,
    learnt_of: LearntOf,
    encode: Encode | None,
    *,
    unused_keys: Callable[[Messages], Collection[str]] | None,
    sequence_length: int | None,
    truncates: bool,
    known: set[int],
    progress: Progress,
) -> None:
    """Take in all rows to learn from, each one conversation or a pair: what would stop a run, and what is odd.

    Args:
        encode: what a run makes of a row; None: lengths stay unknown.
        unused_keys: which keys of messages the template leaves out.
        truncates: a run cuts rows beyond `sequence_length`.
        known: rows of the other set, for the overlap.
    """
    bad = _BadRows(findings)
    try:
        for source in resolve_sources(data.file_name):
            before = findings.rows
            for row in scan_rows(source):
                if progress.at(findings.rows, findings.name):
                    findings.unread = True
                    return
                findings.rows += 1
                if isinstance(row, BadRow):
                    bad.add(row.where, row.reason)
                    continue
                findings.add_row(row)
                try:
                    learnt = learnt_of(source, row)
                    encoded = encode(learnt) if encode is not None else None
                except (DataError, TemplateError) as error:
                    bad.add(row.where, str(error).removeprefix(f"{row.where}: "))
                    continue
                findings.add_unused(unused_columns(row.values, learnt.used))
                if unused_keys is not None:
                    keys = {key for messages in learnt.conversations for key in unused_keys(messages)}
                    findings.add_unused(f"{key} of messages" for key in sorted(keys))
                _conversation(findings, learnt, row.where, known)
                if findings.pictures is not None:
                    findings.pictures.add(learnt.pictures, row.where)
                if encoded is not None:
                    findings.add_length(encoded.length, row.where, sequence_length)
                    shown = encoded.cut(sequence_length) if truncates and sequence_length else encoded
                    findings.untaught += not shown.taught
            if findings.rows == before:
                raise DataError(f"{source.location}: no rows")
    except DataError as error:
        findings.failure = str(error)


def _conversation(findings: Findings, learnt: Learnt, where: str, known: set[int]) -> None:
    messages_ = [message for messages in learnt.conversations for message in messages]
    _roles(findings, [message["role"] for message in learnt.conversations[0]])
    findings.odd["has an empty message"] += any(
        not message["content"].strip() and len(message) == 2 for message in messages_
    )
    findings.odd[PLACEHOLDER_ONLY] += any(has_placeholder(message["content"]) for message in messages_)
    findings.add_prompt(
        stable_hash("prompt", str([dict(message) for message in messages_]), str(learnt.tools)), where, known
    )


def _roles(findings: Findings, roles: list[str]) -> None:
    """Note an order of roles that few templates are made for."""
    rest = roles[1:] if roles[0] == "system" else roles
    findings.odd["has a system message that isn't the first"] += "system" in rest
    findings.odd["begins with the assistant"] += rest[0] == "assistant"
    findings.odd["has two messages of one role in a row"] += any(a == b for a, b in itertools.pairwise(rest))
    unknown = set(roles) - {"system", "user", "assistant", "tool"}
    findings.odd["has a role other than system, user, assistant, tool"] += bool(unknown)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value and not prefix:
            yield from _flat(value, f"{name}.")
        else:
            yield f"{prefix}{name}", value
