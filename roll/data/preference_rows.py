"""Rows of preferences as tokens: pairs of a chosen and a rejected response, or single ones with a label or a score.

files --read_preferences--> Preference --ConversationEncoder--> PreferenceRow --RowOrder--> TokenBatch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.configs.schema.preference_config import (
    LABEL_COLUMNS,
    SINGLE_COLUMNS,
    DPODataArgs,
    PreferenceDataArgs,
    RewardDataArgs,
)
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
    tools_of,
)
from roll.data.sft_rows import TaughtRow, picture_folder_of
from roll.data.templates import TemplateError
from roll.data.threads import encode_all
from roll.types.batch import TokenBatch
from roll.types.chat import pictures_of
from roll.utils.rows import DataError, Row, Source

if TYPE_CHECKING:
    from roll.data.row_pictures import PictureFolder
    from roll.types.picture import Picture

_LABELS = {"true": True, "1": True, "false": False, "0": False}
_SIDES = ("chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Preference:
    """One row of a file: a pair, the chosen response first, or a single response."""

    id: str
    """`<file>:<row number>`"""
    where: str
    """`file:line`, for messages."""
    conversations: tuple[Messages, ...]
    """Each ends with the response; the same before it."""
    desirable: bool | None = None
    """Label of a single response."""
    target: float | None = None
    """Margin of a pair, or score of a single response."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Offered in all of it, in OpenAI's form."""
    used: frozenset[str] = frozenset()
    """Columns that were read."""

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """What its first conversation shows."""
        return pictures_of(self.conversations[0])


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceRow:
    """A tokenised row."""

    id: str
    sequences: tuple[TaughtRow, ...]
    desirable: bool | None = None
    target: float | None = None

    @property
    def length(self) -> int:
        """Return the number of tokens of the longer sequence."""
        return max(sequence.length for sequence in self.sequences)

    @property
    def taught(self) -> int:
        """Return the number of tokens of all responses; 0 if one has none, or a pair has nothing to prefer."""
        counts = [sequence.taught for sequence in self.sequences]
        return sum(counts) if all(counts) and not self.is_tie else 0

    @property
    def is_tie(self) -> bool:
        """Return whether both sequences of a pair are the same."""
        first, *others = self.sequences
        return any(np.array_equal(first.token_ids, other.token_ids) for other in others)

    def cut(self, length: int) -> PreferenceRow:
        """Return the row with the end of each sequence cut off: a pair stays whole."""
        return replace(self, sequences=tuple(sequence.cut(length) for sequence in self.sequences))

    def parts(self) -> Iterable[bytes]:
        """Id, label and target, and all of the sequences."""
        yield f"{self.id} {self.desirable} {self.target}".encode()
        for sequence in self.sequences:
            yield from sequence.parts()


def read_preferences(data: PreferenceDataArgs, *, pairs: bool, some_shown: bool = True) -> list[Preference]:
    """Return all rows of all files, in order; raises `DataError` naming file and line of the first bad one.

    `some_shown`: with a column of pictures, also if no row has any.
    """
    folder = picture_folder_of(data)
    rows = read_all(data.file_name, lambda source, row: preference_of(source, row, data, folder, pairs=pairs))
    if folder is not None and some_shown:
        folder.refuse_none()
    return rows


def preference_of(
    source: Source, row: Row, data: PreferenceDataArgs, folder: PictureFolder | None = None, *, pairs: bool
) -> Preference:
    """Return what a row prefers, with the pictures that `folder` reads; raises `DataError`."""
    columns = RowColumns(row) if folder is None else folder.columns(source, row)
    keys = (
        {"chosen": data.chosen_key, "rejected": data.rejected_key} if pairs else {"response": _response(columns, data)}
    )
    # A column that is the response itself is a whole conversation, and has its own prompt.
    prompt = None if keys.get("response") in CONVERSATION_COLUMNS else prompt_of(columns, data.prompt)
    sequences = tuple(
        _bare(columns, columns.placed(conversation_of_column(columns, column, role, prompt)))
        for role, column in keys.items()
    )
    if len(sequences) == 2:
        chosen, rejected = sequences
        if chosen[:-1] != rejected[:-1]:
            raise DataError(
                f"{row.where}: chosen and rejected differ before the last message: they aren't answers to one prompt"
            )
        if chosen == rejected:
            raise DataError(f"{row.where}: chosen and rejected are the same, so there is nothing to prefer; drop it")
    desirable = target = None
    if isinstance(data, DPODataArgs) and not pairs:
        desirable = _label(columns, data.label)
    if isinstance(data, RewardDataArgs):
        key, number = ("margin", data.margin) if pairs else ("score", data.score)
        target = None if number is None else _number(columns, number, key)
    tools = tools_of(columns)
    refuse_unheeded(columns, sequences)
    return Preference(
        f"{source.name}:{row.number}", row.where, sequences, desirable, target, tools, frozenset(columns.used)
    )


def _response(columns: RowColumns, data: PreferenceDataArgs) -> str:
    """Name the column with the single response."""
    column = data.response or columns.first(SINGLE_COLUMNS)
    if column is None:
        raise DataError(
            f"{columns.where}: no column with the response ({', '.join(SINGLE_COLUMNS)}); columns: "
            f"{sorted(columns.row.values)}; name it in response"
        )
    return column


def _bare(columns: RowColumns, messages: Messages) -> Messages:
    """Return messages without flags; raises `DataError` for one that leaves the response out."""
    flags = learning_flags(messages, columns.where)
    if not flags.get(len(messages) - 1, True):
        raise DataError(f"{columns.where}: a flag leaves the response out, and it is what is compared; drop the row")
    return tuple(without_flags(message) for message in messages)


def _label(columns: RowColumns, column: str | None) -> bool:
    value = columns.get(column or columns.first(LABEL_COLUMNS) or LABEL_COLUMNS[0], "label")
    label = value if isinstance(value, bool) else _LABELS.get(str(value).strip().lower())
    if label is None:
        raise DataError(f"{columns.where}: the label is {value!r:.80}, expected true or false")
    return label


def _number(columns: RowColumns, column: str, role: str) -> float:
    value = columns.get(column, role)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:  # it is compared with scores in float32
        raise DataError(f"{columns.where}: the {role} is {value!r:.80}, expected a finite number")
    return number


def encode_preferences(
    preferences: Sequence[Preference],
    encoder: ConversationEncoder,
    *,
    sequence_length: int,
    truncation: Truncation = "error",
    num_workers: int = 1,
    without_end: Collection[int] = (),
) -> EncodedRows[PreferenceRow]:
    """Tokenise all rows, see `encoded_rows`; the result doesn't depend on `num_workers`.

    Both sequences of a pair are kept, cut or left out together. `without_end`: tokens that are taken off the ends
    of sequences.
    """
    encode = preference_encoding(without_end)
    encoded = encode_all(preferences, encoder, encode, num_workers)
    return encoded_rows(preferences, encoded, sequence_length=sequence_length, truncation=truncation)


def preference_encoding(
    without_end: Collection[int] = (),
) -> Callable[[ConversationEncoder, Preference], PreferenceRow]:
    """Return what tokenises one row, see `encode_preferences`."""

    def encode(encoder: ConversationEncoder, preference: Preference) -> PreferenceRow:
        sequences = []
        for messages in preference.conversations:
            try:
                marked = encoder.offering(preference.tools).encode(messages)
            except TemplateError as error:
                raise DataError(f"{preference.where}: {error}") from error
            ids, trained = np.array(marked.token_ids, dtype=np.int32), np.array(marked.trained, dtype=np.bool_)
            end = int(np.nonzero(~np.isin(ids, list(without_end)))[0].max(initial=-1)) + 1
            sequence = TaughtRow(preference.id, ids[:end], trained[:end], marked.pictures)
            if not sequence.taught:
                raise DataError(
                    f"{preference.where}: the template leaves no token of the response; mend row or template"
                )
            sequences.append(sequence)
        row = PreferenceRow(preference.id, tuple(sequences), preference.desirable, preference.target)
        if row.is_tie:
            raise DataError(f"{preference.where}: the template makes the same of chosen and rejected; drop the row")
        return row

    return encode


def batch_of(rows: Sequence[tuple[str, PreferenceRow]]) -> TokenBatch:
    """Return rows, under these ids, as a batch: a row is a unit, its chosen sequence comes first."""
    sequences = [sequence for _, row in rows for sequence in row.sequences]
    sides = [side for _, row in rows for side in _sides(row)]
    preferred = [side == "/chosen" or (not side and bool(row.desirable)) for _, row in rows for side in _sides(row)]
    trained = torch.from_numpy(np.concatenate([sequence.trained for sequence in sequences]))
    units = tuple(row_id for row_id, row in rows for _ in row.sequences)
    targets = torch.tensor([row.target or 0.0 for _, row in rows for _ in row.sequences], dtype=torch.float32)
    return TokenBatch(
        row_ids=tuple(unit + side for unit, side in zip(units, sides, strict=True)),
        group_ids=units,
        unit_ids=units,
        offsets=torch.tensor([0, *np.cumsum([sequence.length for sequence in sequences]).tolist()]),
        token_ids=torch.from_numpy(np.concatenate([sequence.token_ids for sequence in sequences])).long(),
        action_mask=trained,
        loss_mask=trained,
        preferred=torch.tensor(preferred),
        targets=targets,
        pictures=tuple(sequence.pictures for sequence in sequences),
    )


def _sides(row: PreferenceRow) -> list[str]:
    return [f"/{side}" for side in _SIDES] if len(row.sequences) == 2 else [""]


def scored_batch_of(rows: Sequence[tuple[str, PreferenceRow]]) -> TokenBatch:
    """Return rows as `batch_of` does, with the last token of each sequence as the one that is scored."""
    batch = batch_of(rows)
    last = torch.zeros_like(batch.action_mask).index_fill(0, batch.offsets[1:] - 1, True)
    return batch.with_columns(action_mask=last, loss_mask=last)


def mismatched(batch: TokenBatch, sequence_length: int) -> TokenBatch:
    """Return the prompt of each row with the response of the row before it, the first with the last one's.

    What is longer than `sequence_length` is cut. The policy's log-ratio of such rows estimates its KL from the
    reference (arXiv:2402.01306, section 4.1).
    """
    ids, masks = [], []
    for row in range(len(batch)):
        before = (row - 1) % len(batch)
        prompt = batch.row("token_ids", row)[: _first_action(batch, row)]
        response = slice(_first_action(batch, before), None)
        answer = batch.row("token_ids", before)[response], batch.row("action_mask", before)[response]
        ids.append(torch.cat([prompt, answer[0]])[:sequence_length])
        masks.append(torch.cat([torch.zeros(len(prompt), dtype=torch.bool), answer[1]])[:sequence_length])
    names = tuple(f"{name}~" for name in batch.row_ids)
    mask = torch.cat(masks)
    return TokenBatch(
        row_ids=names,
        group_ids=names,
        offsets=torch.tensor([0, *np.cumsum([len(part) for part in ids]).tolist()]),
        token_ids=torch.cat(ids),
        action_mask=mask,
        loss_mask=mask,
        pictures=batch.pictures,
    )


def _first_action(batch: TokenBatch, row: int) -> int:
    return int(batch.row("action_mask", row).nonzero()[0, 0])
