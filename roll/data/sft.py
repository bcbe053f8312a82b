"""Rows of prompts with responses, or of conversations, as tokens to be taught.

files --read_conversations--> Conversation --ConversationEncoder--> TaughtRow --RowOrder--> TokenBatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from roll.configs.schema.sft_config import SFTDataArgs
from roll.data.chat_masks import ConversationEncoder
from roll.data.offline import EncodedRows, Truncation, encoded_rows, read_all
from roll.data.sources import encodable, parse_conversation
from roll.data.templates import TemplateError
from roll.data.threads import encode_all
from roll.types.batch import TokenBatch
from roll.utils.rows import DataError, Row, Source, column_value, has_column


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
    def length(self) -> int:
        """Tokens."""
        return len(self.token_ids)

    @property
    def taught(self) -> int:
        """Tokens that are taught."""
        return int(self.trained.sum())

    def cut(self, length: int) -> TaughtRow:
        """Return its first `length` tokens."""
        return TaughtRow(self.id, self.token_ids[:length], self.trained[:length])

    def parts(self) -> tuple[bytes, ...]:
        """Id, tokens and mask."""
        return self.id.encode(), self.token_ids.tobytes(), self.trained.tobytes()


TaughtRows: TypeAlias = EncodedRows[TaughtRow]


def read_conversations(data: SFTDataArgs) -> list[Conversation]:
    """Return all rows of all files, in order; raises `DataError` naming file and line of the first bad one."""
    return read_all(data.file_name, lambda source, row: conversation_of(source, row, data))


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
    """Tokenise all rows, see `encoded_rows`; the result doesn't depend on `num_workers`."""
    encoded = encode_all(conversations, encoder, _encode, num_workers)
    pairs = [(item, row) for item, rows in zip(conversations, encoded, strict=True) for row in rows]
    items, rows = [item for item, _ in pairs], [row for _, row in pairs]
    return encoded_rows(items, rows, sequence_length=sequence_length, truncation=truncation)


def _encode(encoder: ConversationEncoder, conversation: Conversation) -> list[TaughtRow]:
    """Return a row, or several where the template writes earlier turns in another way than they are sampled."""
    try:
        marked = [each for each in encoder.encode_turns(conversation.messages) if any(each.trained)]
    except TemplateError as error:
        raise DataError(f"{conversation.where}: {error}") from error
    if not marked:
        raise DataError(
            f"{conversation.where}: the template leaves no token of the assistant to learn; mend the row or template"
        )
    return [
        TaughtRow(
            conversation.id if len(marked) == 1 else f"{conversation.id}/{number}",
            np.array(each.token_ids, dtype=np.int32),
            np.array(each.trained, dtype=np.bool_),
        )
        for number, each in enumerate(marked)
    ]


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
