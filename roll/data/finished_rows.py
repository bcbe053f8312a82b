"""What every data set of finished rows has: rows within a limit, a share held out, and the order they come in.

items --encoded_rows--> EncodedRows --RowOrder--> TokenBatch
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from roll.data.task_ids import with_epoch
from roll.types.batch import TokenBatch
from roll.utils.readers import read_rows, resolve_sources
from roll.utils.rows import DataError, Row, Source
from roll.utils.seeding import keyed_shuffle, stable_hash

Truncation: TypeAlias = Literal["error", "filter", "right"]


class OfflineRow(Protocol):
    """One row of a file as tokens; what it holds is the pipeline's business."""

    @property
    def id(self) -> str:
        """Return `<file>:<row number>`."""

    @property
    def length(self) -> int:
        """Return the number of tokens of its longest sequence."""

    @property
    def taught(self) -> int:
        """Return the number of tokens that something is learnt from; 0: the row is of no use."""

    def cut(self: R, length: int) -> R:
        """Return the row with the ends of its sequences cut off beyond `length` tokens."""

    def parts(self) -> Iterable[bytes]:
        """Return all that it is, for a fingerprint."""


class Located(Protocol):
    """What rows are made from."""

    @property
    def where(self) -> str:
        """Return `file:line`, for messages."""


T = TypeVar("T")
R = TypeVar("R", bound=OfflineRow)
BatchOf: TypeAlias = Callable[[Sequence[tuple[str, R]]], TokenBatch]
"""(ids with rows) -> a training batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows(Generic[R]):
    """All rows that can be trained on, and what became of the others."""

    rows: tuple[R, ...]
    filtered: int = 0
    """Left out for their length."""
    truncated: int = 0
    """Cut to the limit, those without a taught token included."""
    untaught: int = 0
    """Left out, because no token of the assistant was left after the cut."""

    def metrics(self) -> dict[str, float]:
        """Return the figures for the tracker."""
        lengths = [row.length for row in self.rows]
        return {
            "data/rows": float(len(self.rows)),
            "data/rows_filtered": float(self.filtered),
            "data/rows_truncated": float(self.truncated),
            "data/rows_untaught": float(self.untaught),
            "data/row_length_mean": sum(lengths) / len(lengths),
            "data/row_length_max": float(max(lengths)),
            "data/taught_tokens": float(sum(row.taught for row in self.rows)),
        }

    def split(self, share: float, seed: int) -> tuple[EncodedRows[R], tuple[R, ...]]:
        """Return the rows to train on, and the held-out ones: the nearest number to `share`, at least one, drawn by
        (seed, row id), which is file and number."""
        held = held_out([row.id for row in self.rows], share, seed)
        rest = replace(self, rows=tuple(row for row in self.rows if row.id not in held))
        return rest, tuple(row for row in self.rows if row.id in held)


def held_out(ids: Sequence[str], share: float, seed: int) -> set[str]:
    """Return the ids of rows to hold out: the nearest number to `share`, at least one, drawn by (seed, id)."""
    count = max(1, round(share * len(ids)))
    if count >= len(ids):
        raise DataError(
            f"validation_share {share:g} of {len(ids)} rows leaves nothing to train on; lower it, or name "
            "held-out files in validation.data_args"
        )
    return set(sorted(ids, key=lambda one: stable_hash(seed, "validation", one))[:count])


def read_all(files: Sequence[str], make: Callable[[Source, Row], T]) -> list[T]:
    """Return what `make` gives for each row of all files, in order; raises `DataError` for a file without rows."""
    items: list[T] = []
    for source in resolve_sources(files):
        before = len(items)
        items.extend(make(source, row) for row in read_rows(source))
        if len(items) == before:
            raise DataError(f"{source.location}: no rows")
    return items


def encoded_rows(
    items: Sequence[Located], encoded: Iterable[R], *, sequence_length: int, truncation: Truncation
) -> EncodedRows[R]:
    """Return the rows within the limit, `encoded` being those of `items`, in their order.

    A row of more than `sequence_length` tokens: `error` raises, `filter` leaves it out, `right` cuts its end. A row in
    which nothing is left to learn is left out too. Raises `DataError` when no row remains.
    """
    if not items:
        raise DataError("there are no rows to tokenise")
    lengths: list[int] = []
    rows: list[R] = []
    long: list[str] = []
    untaught = 0
    for item, row in zip(items, encoded, strict=True):
        lengths.append(row.length)
        if lengths[-1] > sequence_length:
            long.append(f"{item.where} with {lengths[-1]}")
            if truncation != "right":
                continue
            row = row.cut(sequence_length)
        if row.taught:
            rows.append(row)
        else:
            untaught += 1
    if long and truncation == "error":
        raise DataError(
            f"{len(long)} of {len(items)} rows have more than sequence_length = {sequence_length} tokens, the "
            f"first is {long[0]}, the longest has {max(lengths)}; raise sequence_length, or set truncation to filter "
            "or right"
        )
    if not rows:
        raise DataError(
            f"none of {len(items)} rows has a token of the assistant within sequence_length = "
            f"{sequence_length} tokens (the shortest row has {min(lengths)}); raise sequence_length"
        )
    cut = truncation == "right"
    return EncodedRows(
        rows=tuple(rows), filtered=0 if cut else len(long), truncated=len(long) if cut else 0, untaught=untaught
    )


class RowOrder(Generic[R]):
    """An endless sequence of rows, epoch after epoch, each in an order that depends on (seed, epoch) alone.

    The cursor is the number of rows that were taken.
    """

    def __init__(self, rows: Sequence[R], batch_of: BatchOf[R], *, seed: int, shuffle: bool = True) -> None:
        self._rows = rows
        self._batch_of = batch_of
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self.taken = 0
        """Rows, over all epochs."""

    @property
    def epoch(self) -> float:
        """Passes done, in fractions."""
        return self.taken / len(self._rows)

    def take(self, count: int) -> TokenBatch:
        """Return the next `count` rows. One that comes again in a later epoch has that in its id."""
        picked: list[tuple[str, R]] = []
        for position in range(self.taken, self.taken + count):
            epoch, index = divmod(position, len(self._rows))
            row = self._rows[self._order_of(epoch)[index]]
            picked.append((with_epoch(row.id, epoch), row))
        self.taken += count
        return self._batch_of(picked)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, as plain JSON values."""
        return {"taken": self.taken, "identity": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; raises `DataError` when the data or its order isn't the same."""
        mine, saved = self._identity(), state["identity"]
        for key, value in mine.items():
            if saved.get(key) != value:
                raise DataError(
                    f"the data cursor was saved with {key} = {saved.get(key)!r}, this run has {value!r}: resuming "
                    "would skip or repeat rows. Restore the data and its settings, or start without the checkpoint"
                )
        self.taken = int(state["taken"])

    def _identity(self) -> dict[str, Any]:
        return {"rows": fingerprint(self._rows), "seed": self._seed, "shuffle": self._shuffle}

    def _order_of(self, epoch: int) -> Sequence[int]:
        if self._order[0] != epoch:
            indices = range(len(self._rows))
            # The same key in every pipeline: it was the first one's.
            order = keyed_shuffle(indices, self._seed, "sft", epoch) if self._shuffle else indices
            self._order = (epoch, order)
        return self._order[1]


def fingerprint(rows: Sequence[OfflineRow]) -> str:
    """Hash the rows' ids and contents, and their order."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        for part in row.parts():
            digest.update(len(part).to_bytes(8, "little") + part)
    return f"{len(rows)} rows, {digest.hexdigest()}"
