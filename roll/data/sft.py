"""Rows of prompts with responses, or of conversations, as tokens to be taught; and the order in which they come.

files --read_conversations--> Conversation --ConversationEncoder--> TaughtRow --RowOrder--> TokenBatch
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from roll.configs.schema.sft_config import SFTDataArgs
from roll.data.chat_masks import ConversationEncoder
from roll.data.sources import encodable, parse_conversation
from roll.data.task_ids import with_epoch
from roll.data.templates import TemplateError
from roll.data.threads import encode_all
from roll.types.batch import TokenBatch
from roll.utils.readers import read_rows, resolve_sources
from roll.utils.rows import DataError, Row, Source, column_value, has_column
from roll.utils.seeding import keyed_shuffle, stable_hash

Truncation: TypeAlias = Literal["error", "filter", "right"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a file; the assistant has the last word."""

    id: str
    """`<file>:<row number>`"""
    where: str
    """`file:line`, for messages."""
    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class TaughtRow:
    """A tokenised conversation with at least one token that is taught."""

    id: str
    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]

    @property
    def taught(self) -> int:
        """Tokens that are taught."""
        return int(self.trained.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtRows:
    """All rows that can be trained on, and what became of the others."""

    rows: tuple[TaughtRow, ...]
    filtered: int = 0
    """Left out for their length."""
    truncated: int = 0
    """Cut to the limit, those without a taught token included."""
    untaught: int = 0
    """Left out, because no token of the assistant was left after the cut."""

    def metrics(self) -> dict[str, float]:
        """For the tracker."""
        lengths = [len(row.token_ids) for row in self.rows]
        return {
            "data/rows": float(len(self.rows)),
            "data/rows_filtered": float(self.filtered),
            "data/rows_truncated": float(self.truncated),
            "data/rows_untaught": float(self.untaught),
            "data/row_length_mean": sum(lengths) / len(lengths),
            "data/row_length_max": float(max(lengths)),
            "data/taught_tokens": float(sum(row.taught for row in self.rows)),
        }

    def split(self, share: float, seed: int) -> tuple[TaughtRows, tuple[TaughtRow, ...]]:
        """Return the rows to train on, and the held-out ones: the nearest number to `share`, at least one, drawn by
        (seed, row id), which is file and number."""
        count = max(1, round(share * len(self.rows)))
        if count >= len(self.rows):
            raise DataError(
                f"validation_share {share:g} of {len(self.rows)} rows leaves nothing to train on; lower it, or name "
                "held-out files in validation.data_args"
            )
        drawn = sorted(self.rows, key=lambda row: stable_hash(seed, "validation", row.id))[:count]
        held = {row.id for row in drawn}
        rest = replace(self, rows=tuple(row for row in self.rows if row.id not in held))
        return rest, tuple(row for row in self.rows if row.id in held)


def read_conversations(data: SFTDataArgs) -> list[Conversation]:
    """Return all rows of all files, in order; raises `DataError` naming file and line of the first bad one."""
    found: list[Conversation] = []
    for source in resolve_sources(data.file_name):
        before = len(found)
        for row in read_rows(source):
            found.append(conversation_of(source, row, data))
        if len(found) == before:
            raise DataError(f"{source.location}: no rows")
    return found


def conversation_of(source: Source, row: Row, data: SFTDataArgs) -> Conversation:
    """Return the conversation of a row; raises `DataError`."""
    return Conversation(f"{source.name}:{row.number}", row.where, _messages(row, data))


def _messages(row: Row, data: SFTDataArgs) -> tuple[Mapping[str, str], ...]:
    if data.messages is not None:
        messages = parse_conversation(_cell(row, data.messages, "messages"), row.where)
        if messages[-1]["role"] != "assistant":
            raise DataError(
                f"{row.where}: the last message is of the {messages[-1]['role']}, expected the assistant's answer; "
                "drop what nobody answers"
            )
    else:
        assert data.prompt is not None, "the configuration names the columns"
        assert data.response is not None, "the configuration names the columns"
        prompt = _text(row, data.prompt, "prompt")
        response = _text(row, data.response, "response")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    for position, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip():
            which = f"messages[{position}], the assistant's," if data.messages is not None else "the response"
            raise DataError(f"{row.where}: {which} is empty, so there is nothing to learn; mend the row or drop it")
    return tuple(messages)


def _cell(row: Row, column: str, role: str) -> Any:
    if not has_column(row.values, column):
        raise DataError(f"{row.where}: no column {column!r} (named for {role}); columns: {sorted(row.values)}")
    return column_value(row.values, column)


def _text(row: Row, column: str, role: str) -> str:
    value = _cell(row, column, role)
    if not isinstance(value, str) or (role == "prompt" and not value.strip()):
        raise DataError(f"{row.where}: the {role} is {value!r:.80}, expected a non-empty string")
    return encodable(value, row.where)


def encode_rows(
    conversations: Sequence[Conversation],
    encoder: ConversationEncoder,
    *,
    sequence_length: int,
    truncation: Truncation = "error",
    num_workers: int = 1,
) -> TaughtRows:
    """Tokenise all rows; the result doesn't depend on `num_workers`.

    A row of more than `sequence_length` tokens: `error` raises, `filter` leaves it out, `right` cuts its end. A row in
    which no token of the assistant is left is left out too. Raises `DataError` when no row remains.
    """
    if not conversations:
        raise DataError("there are no rows to tokenise")
    lengths: list[int] = []
    rows: list[TaughtRow] = []
    long: list[str] = []
    untaught = 0
    for conversation, row in zip(conversations, encode_all(conversations, encoder, _encode, num_workers), strict=True):
        lengths.append(len(row.token_ids))
        if lengths[-1] > sequence_length:
            long.append(f"{conversation.where} with {lengths[-1]}")
            if truncation != "right":
                continue
            row = TaughtRow(row.id, row.token_ids[:sequence_length], row.trained[:sequence_length])
        if row.taught:
            rows.append(row)
        else:
            untaught += 1
    if long and truncation == "error":
        raise DataError(
            f"{len(long)} of {len(conversations)} rows have more than sequence_length = {sequence_length} tokens, the "
            f"first is {long[0]}, the longest has {max(lengths)}; raise sequence_length, or set truncation to filter "
            "or right"
        )
    if not rows:
        raise DataError(
            f"none of {len(conversations)} rows has a token of the assistant within sequence_length = "
            f"{sequence_length} tokens (the shortest row has {min(lengths)}); raise sequence_length"
        )
    cut = truncation == "right"
    return TaughtRows(
        rows=tuple(rows), filtered=0 if cut else len(long), truncated=len(long) if cut else 0, untaught=untaught
    )


def _encode(encoder: ConversationEncoder, conversation: Conversation) -> TaughtRow:
    try:
        marked = encoder.encode(conversation.messages)
    except TemplateError as error:
        raise DataError(f"{conversation.where}: {error}") from error
    if not any(marked.trained):
        raise DataError(
            f"{conversation.where}: the template leaves no token of the assistant to learn; mend the row or template"
        )
    return TaughtRow(
        conversation.id, np.array(marked.token_ids, dtype=np.int32), np.array(marked.trained, dtype=np.bool_)
    )


class RowOrder:
    """An endless sequence of rows, epoch after epoch, each in an order that depends on (seed, epoch) alone.

    The cursor is the number of rows that were taken.
    """

    def __init__(self, rows: Sequence[TaughtRow], *, seed: int, shuffle: bool = True) -> None:
        self._rows = rows
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
        picked: list[tuple[str, TaughtRow]] = []
        for position in range(self.taken, self.taken + count):
            epoch, place = divmod(position, len(self._rows))
            row = self._rows[self._order_of(epoch)[place]]
            picked.append((with_epoch(row.id, epoch), row))
        self.taken += count
        return batch_of(picked)

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
            places = range(len(self._rows))
            order = keyed_shuffle(places, self._seed, "sft", epoch) if self._shuffle else places
            self._order = (epoch, order)
        return self._order[1]


def fingerprint(rows: Sequence[TaughtRow]) -> str:
    """Hash the rows' ids, tokens and masks, and their order."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        for part in (row.id.encode(), row.token_ids.tobytes(), row.trained.tobytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return f"{len(rows)} rows, {digest.hexdigest()}"


def batch_of(rows: Sequence[tuple[str, TaughtRow]]) -> TokenBatch:
    """Return rows, under these ids, as a training batch."""
    ids = tuple(row_id for row_id, _ in rows)
    trained = torch.from_numpy(np.concatenate([row.trained for _, row in rows]))
    return TokenBatch(
        row_ids=ids,
        group_ids=ids,
        offsets=torch.tensor([0, *np.cumsum([len(row.token_ids) for _, row in rows]).tolist()]),
        token_ids=torch.from_numpy(np.concatenate([row.token_ids for _, row in rows])).long(),
        action_mask=trained,
        loss_mask=trained,
    )
