"""Rows of prompts with responses, or of conversations, as tokens to be taught.

files --read_conversations--> SFTConversation --ConversationEncoder--> TaughtRow --RowOrder--> TokenBatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from roll.configs.schema.offline_config import SINGLE_COLUMNS, OfflineDataArgs
from roll.configs.schema.sft_config import SFTDataArgs
from roll.data.chat_masks import ConversationEncoder
from roll.data.finished_rows import EncodedRows, Truncation, encoded_rows, read_all
from roll.data.messages import learning_flags, without_flags
from roll.data.row_conversations import (
    CONVERSATION_COLUMNS,
    Messages,
    RowColumns,
    conversation_of_column,
    prompt_of,
    refuse_unheeded,
    says_nothing,
    tools_of,
)
from roll.data.templates import TemplateError
from roll.data.threads import encode_all
from roll.types.batch import TokenBatch
from roll.types.chat import pictures_of
from roll.utils.rows import DataError, Row, Source

if TYPE_CHECKING:
    from roll.data.row_pictures import PictureFolder
    from roll.types.picture import Picture


@dataclass(frozen=True, slots=True)
class SFTConversation:
    """One row of a file; the assistant has the last word."""

    id: str
    """`<file>:<row number>`"""
    where: str
    """`file:line`, for messages."""
    messages: Messages
    flags: Mapping[int, bool] = field(default_factory=dict)
    """Which messages the row says are taught or not, by position; the others are as `train_on` says."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Offered in it, in OpenAI's form."""
    used: frozenset[str] = frozenset()
    """Columns that were read."""

    @property
    def conversations(self) -> tuple[Messages, ...]:
        """It alone."""
        return (self.messages,)

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """What its messages show."""
        return pictures_of(self.messages)


@dataclass(frozen=True, slots=True, eq=False)
class TaughtRow:
    """A tokenised conversation with at least one token that is taught."""

    id: str
    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    pictures: tuple[Picture, ...] = ()
    """What the tokens show, in the order of their places."""

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.token_ids)

    @property
    def taught(self) -> int:
        """Return the number of tokens that are taught."""
        return int(self.trained.sum())

    def cut(self, length: int) -> TaughtRow:
        """Return its first `length` tokens; a row with pictures is never cut, only left out."""
        if self.length <= length:
            return self
        assert not self.pictures, "rules refuse truncation: right with data_args.images"
        return TaughtRow(self.id, self.token_ids[:length], self.trained[:length])

    def parts(self) -> tuple[bytes, ...]:
        """Id, tokens, mask and pictures."""
        shown = tuple(picture.digest.encode() for picture in self.pictures)
        return self.id.encode(), self.token_ids.tobytes(), self.trained.tobytes(), *shown


TaughtRows: TypeAlias = EncodedRows[TaughtRow]


def read_conversations(data: SFTDataArgs, *, some_shown: bool = True) -> list[SFTConversation]:
    """Return all rows of all files, in order; raises `DataError` naming file and line of the first bad one.

    `some_shown`: with a column of pictures, also if no row has any.
    """
    folder = picture_folder_of(data)
    rows = read_all(data.file_name, lambda source, row: conversation_of(source, row, data, folder))
    if folder is not None and some_shown:
        folder.refuse_none()
    return rows


def picture_folder_of(data: OfflineDataArgs) -> PictureFolder | None:
    """Return what reads the pictures of rows; None for rows of text."""
    if data.images is None:
        return None
    from roll.data.row_pictures import PictureFolder

    return PictureFolder(data.images)


def conversation_of(
    source: Source, row: Row, data: SFTDataArgs, folder: PictureFolder | None = None
) -> SFTConversation:
    """Return the conversation of a row, with the pictures that `folder` reads; raises `DataError`."""
    columns = RowColumns(row) if folder is None else folder.columns(source, row)
    messages = columns.placed(_messages(columns, data))
    for position, message in enumerate(messages):
        if message["role"] == "assistant" and says_nothing(message):
            raise DataError(
                f"{row.where}: messages[{position}], the assistant's, is empty, so there is nothing to learn; mend the "
                "row or drop it"
            )
    flags, tools = learning_flags(messages, row.where), tools_of(columns)
    refuse_unheeded(columns, [messages])
    return SFTConversation(
        f"{source.name}:{row.number}",
        row.where,
        tuple(without_flags(message) for message in messages),
        flags,
        tools,
        frozenset(columns.used),
    )


def _messages(columns: RowColumns, data: SFTDataArgs) -> Messages:
    if data.messages is not None:
        return conversation_of_column(columns, data.messages, "messages", None)
    response = data.response or columns.first(SINGLE_COLUMNS)
    if response is None:
        raise DataError(
            f"{columns.where}: no column with the response ({', '.join(SINGLE_COLUMNS)}); columns: "
            f"{sorted(columns.row.values)}; name it in response, or a column of conversations in messages"
        )
    # A column that is the response itself is a whole conversation, and has its own prompt.
    is_conversation = response in CONVERSATION_COLUMNS and data.prompt is None
    return conversation_of_column(
        columns, response, "response", None if is_conversation else prompt_of(columns, data.prompt)
    )


def encode_rows(
    conversations: Sequence[SFTConversation],
    encoder: ConversationEncoder,
    *,
    sequence_length: int,
    truncation: Truncation = "error",
    num_workers: int = 1,
) -> TaughtRows:
    """Tokenise all rows, see `encoded_rows`; the result doesn't depend on `num_workers`."""
    encoded = encode_all(conversations, encoder, encode_conversation, num_workers)
    pairs = [(item, row) for item, rows in zip(conversations, encoded, strict=True) for row in rows]
    items, rows = [item for item, _ in pairs], [row for _, row in pairs]
    return encoded_rows(items, rows, sequence_length=sequence_length, truncation=truncation)


def encode_conversation(encoder: ConversationEncoder, conversation: SFTConversation) -> list[TaughtRow]:
    """Tokenise one row; raises `DataError`. It becomes several where the template writes earlier turns in another way
    than they are sampled."""
    try:
        sequences = encoder.offering(conversation.tools).encode_turns(conversation.messages, conversation.flags)
    except TemplateError as error:
        raise DataError(f"{conversation.where}: {error}") from error
    marked = [each for each in sequences if any(each.trained)]
    if not marked:
        why = "the flags of its messages leave" if not all(conversation.flags.values()) else "the template leaves"
        raise DataError(
            f"{conversation.where}: {why} no token of the assistant to learn; mend the row or template, or drop the row"
        )
    return [
        TaughtRow(
            conversation.id if len(marked) == 1 else f"{conversation.id}/{number}",
            np.array(each.token_ids, dtype=np.int32),
            np.array(each.trained, dtype=np.bool_),
            each.pictures,
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
        pictures=tuple(row.pictures for _, row in rows),
    )
