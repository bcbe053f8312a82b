"""Rows of preferences as tokens: pairs of a chosen and a rejected response, or single ones with a label or a score.

files --read_preferences--> Preference --ConversationEncoder--> PreferenceRow --RowOrder--> TokenBatch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from roll.data.offline import EncodedRows, Truncation, encoded_rows, read_all
from roll.data.sft import TaughtRow
from roll.data.sources import encodable, parse_conversation
from roll.data.templates import TemplateError
from roll.data.threads import encode_all
from roll.types.batch import TokenBatch
from roll.utils.rows import DataError, Row, Source, column_value, has_column

Messages = tuple[Mapping[str, str], ...]

_PROMPT_COLUMNS = ("prompt", "conversations", "messages", "instruction")
_WHOLE_COLUMNS = ("messages", "conversations")
"""Where there is no column with the response, these end with it."""
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_PICTURES = ("image", "images", "video", "videos")
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


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceRow:
    """A tokenised row."""

    id: str
    sequences: tuple[TaughtRow, ...]
    desirable: bool | None = None
    target: float | None = None

    @property
    def length(self) -> int:
        """Tokens of the longer sequence."""
        return max(sequence.length for sequence in self.sequences)

    @property
    def taught(self) -> int:
        """Tokens of all responses; 0 if one has none, or a pair has nothing to prefer."""
        counts = [sequence.taught for sequence in self.sequences]
        return sum(counts) if all(counts) and not self.is_tie else 0

    @property
    def is_tie(self) -> bool:
        """Whether both sequences of a pair are the same."""
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


def read_preferences(data: PreferenceDataArgs, *, pairs: bool) -> list[Preference]:
    """Return all rows of all files, in order; raises `DataError` naming file and line of the first bad one."""
    return read_all(data.file_name, lambda source, row: preference_of(source, row, data, pairs=pairs))


def preference_of(source: Source, row: Row, data: PreferenceDataArgs, *, pairs: bool) -> Preference:
    """Return what a row prefers; raises `DataError`."""
    for column in _PICTURES:
        if has_column(row.values, column) and column_value(row.values, column):
            raise _no_pictures(row.where, f"the column {column!r}")
    keys = {"chosen": data.chosen_key, "rejected": data.rejected_key} if pairs else {"response": _response(row, data)}
    # A column that is the response itself is a whole conversation, and has its own prompt.
    prompt = None if keys.get("response") in _WHOLE_COLUMNS else _prompt(row, data)
    found = tuple(_conversation(row, column, role, prompt) for role, column in keys.items())
    if len(found) == 2:
        chosen, rejected = found
        if chosen[:-1] != rejected[:-1]:
            raise DataError(
                f"{row.where}: chosen and rejected differ before the last message: they aren't answers to one prompt"
            )
        if chosen == rejected:
            raise DataError(f"{row.where}: chosen and rejected are the same, so there is nothing to prefer; drop it")
    desirable = target = None
    if isinstance(data, DPODataArgs) and not pairs:
        desirable = _label(row, data.label)
    if isinstance(data, RewardDataArgs):
        key, number = ("margin", data.margin) if pairs else ("score", data.score)
        target = None if number is None else _number(row, number, key)
    return Preference(f"{source.name}:{row.number}", row.where, found, desirable, target)


def _prompt(row: Row, data: PreferenceDataArgs) -> Messages | None:
    column = data.prompt or _first_there(row, _PROMPT_COLUMNS)
    if column is None:
        return None
    value = _cell(row, column, "prompt")
    if isinstance(value, str):
        if column == "instruction" and data.prompt is None:
            return _alpaca(row)
        if not value.strip():
            raise DataError(f"{row.where}: the prompt is empty; mend the row or drop it")
        return (*_system(row), {"role": "user", "content": encodable(value, row.where)})
    messages = _with_system(row, _messages(value, row.where, column))
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{row.where}: the prompt ends with the assistant's words, so there is nothing to answer")
    return messages


def _first_there(row: Row, columns: Iterable[str]) -> str | None:
    return next((name for name in columns if has_column(row.values, name)), None)


def _response(row: Row, data: PreferenceDataArgs) -> str:
    """Name the column with the single response."""
    column = data.response or _first_there(row, SINGLE_COLUMNS)
    if column is None:
        raise DataError(
            f"{row.where}: no column with the response ({', '.join(SINGLE_COLUMNS)}); columns: {sorted(row.values)}; "
            "name it in response"
        )
    return column


def _system(row: Row) -> Messages:
    """The system message that stands in a column of its own, as LLaMA-Factory writes it."""
    value = column_value(row.values, "system") if has_column(row.values, "system") else None
    if value is not None and not isinstance(value, str):
        raise DataError(f"{row.where}: the column 'system' is {value!r:.80}, expected the text of the system message")
    if value is None or not value.strip():
        return ()
    return ({"role": "system", "content": encodable(value, row.where)},)


def _with_system(row: Row, messages: Messages) -> Messages:
    return messages if messages[0]["role"] == "system" else (*_system(row), *messages)


def _alpaca(row: Row) -> Messages:
    """Alpaca's columns: earlier turns in `history`, the prompt in `instruction`, what it is about in `input`."""
    messages: list[Mapping[str, str]] = [*_system(row)]
    history = column_value(row.values, "history") if has_column(row.values, "history") else None
    for turn in history if isinstance(history, Sequence) else (history,) if history else ():
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise DataError(f"{row.where}: history has {turn!r:.80}, expected pairs of a prompt and its answer")
        roles = zip(("user", "assistant"), turn, strict=True)
        messages += [{"role": role, "content": encodable(text, row.where)} for role, text in roles]
    parts = [_cell(row, name, "prompt") for name in ("instruction", "input") if has_column(row.values, name)]
    text = "\n".join(part for part in parts if isinstance(part, str) and part.strip())
    if not text:
        raise DataError(f"{row.where}: the prompt is empty; mend the row or drop it")
    return (*messages, {"role": "user", "content": encodable(text, row.where)})


def _conversation(row: Row, column: str, role: str, prompt: Messages | None) -> Messages:
    value = _cell(row, column, role)
    if isinstance(value, str):
        if prompt is None:
            raise DataError(
                f"{row.where}: {column!r} is a text, and no column has its prompt; name one in prompt, or give lists "
                "of messages"
            )
        said: Messages = ({"role": "assistant", "content": encodable(value, row.where)},)
    else:
        said = _messages([value] if isinstance(value, Mapping) else value, row.where, column)
    if said[-1]["role"] != "assistant":
        raise DataError(
            f"{row.where}: {column!r} ends with a message of the {said[-1]['role']}, expected the assistant's"
        )
    if not said[-1]["content"].strip():
        raise DataError(f"{row.where}: the response in {column!r} is empty; mend the row or drop it")
    if said[0]["role"] != "assistant":
        said = _with_system(row, said)
    if prompt is None or said[: len(prompt)] == prompt:
        if len(said) == 1:
            raise DataError(f"{row.where}: {column!r} has an answer and nothing that it answers; name a prompt column")
        return said
    if said[0]["role"] != "assistant":
        raise DataError(f"{row.where}: {column!r} begins with another prompt than the one in the prompt column")
    return (*prompt, *said)


def _messages(value: Any, where: str, column: str) -> Messages:
    """Return messages of either spelling as {role, content}; images are refused."""
    if not isinstance(value, Sequence):
        raise DataError(f"{where}: {column!r} is {value!r:.80}, expected a text or a list of messages")
    plain: list[Any] = []
    for message in value:
        if isinstance(message, Mapping):
            if "from" in message and "role" not in message:
                role = message["from"]
                role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
                message = {"role": role, "content": message.get("value")}
            content = message.get("content")
            parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
            if any(isinstance(part, Mapping) and str(part.get("type", "")).startswith(_PICTURES) for part in parts):
                raise _no_pictures(where, f"a message in {column!r}")
        plain.append(message)
    return tuple(parse_conversation(plain, where))


def _no_pictures(where: str, what: str) -> DataError:
    return DataError(f"{where}: {what} has an image or a video; preferences are learnt from text alone for now")


def _cell(row: Row, column: str, role: str) -> Any:
    if not has_column(row.values, column):
        raise DataError(f"{row.where}: no column {column!r} (named for {role}); columns: {sorted(row.values)}")
    return column_value(row.values, column)


def _label(row: Row, column: str | None) -> bool:
    value = _cell(row, column or _first_there(row, LABEL_COLUMNS) or LABEL_COLUMNS[0], "label")
    label = value if isinstance(value, bool) else _LABELS.get(str(value).strip().lower())
    if label is None:
        raise DataError(f"{row.where}: the label is {value!r:.80}, expected true or false")
    return label


def _number(row: Row, column: str, role: str) -> float:
    value = _cell(row, column, role)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:  # it is compared with scores in float32
        raise DataError(f"{row.where}: the {role} is {value!r:.80}, expected a finite number")
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
    encode = _encoding(without_end)
    encoded = encode_all(preferences, encoder, encode, num_workers)
    return encoded_rows(preferences, encoded, sequence_length=sequence_length, truncation=truncation)


def _encoding(without_end: Collection[int]) -> Callable[[ConversationEncoder, Preference], PreferenceRow]:
    def encode(encoder: ConversationEncoder, preference: Preference) -> PreferenceRow:
        sequences = []
        for messages in preference.conversations:
            try:
                marked = encoder.encode(messages)
            except TemplateError as error:
                raise DataError(f"{preference.where}: {error}") from error
            ids, trained = np.array(marked.token_ids, dtype=np.int32), np.array(marked.trained, dtype=np.bool_)
            said = int(np.nonzero(~np.isin(ids, list(without_end)))[0].max(initial=-1)) + 1
            sequence = TaughtRow(preference.id, ids[:said], trained[:said])
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
        said = batch.row("token_ids", before)[response], batch.row("action_mask", before)[response]
        ids.append(torch.cat([prompt, said[0]])[:sequence_length])
        masks.append(torch.cat([torch.zeros(len(prompt), dtype=torch.bool), said[1]])[:sequence_length])
    names = tuple(f"{name}~" for name in batch.row_ids)
    mask = torch.cat(masks)
    return TokenBatch(
        row_ids=names,
        group_ids=names,
        offsets=torch.tensor([0, *np.cumsum([len(part) for part in ids]).tolist()]),
        token_ids=torch.cat(ids),
        action_mask=mask,
        loss_mask=mask,
    )


def _first_action(batch: TokenBatch, row: int) -> int:
    return int(batch.row("action_mask", row).nonzero()[0, 0])
