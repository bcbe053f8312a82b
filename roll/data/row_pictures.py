"""Pictures of a row, put where its messages show them.

A message that shows pictures has a `PLACE` for each of them in its content, and the pictures themselves under the key
`pictures`, in this order. Rows say it in one of these ways; counts must be equal in all of them:

* `<image>` in the texts of messages, and the pictures in a column (verl's rows, and LLaVA's conversations);
* parts of type `image`, without a picture, and the pictures in a column (TRL);
* parts that have their picture themselves: `image`, `image_url`, `source`;
* pictures in a column and nothing in the texts: they stand before the first text of the user (TRL).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.data.messages import RowMessage
from roll.data.picture_reader import PictureError, PictureReader
from roll.data.row_conversations import CONVERSATION_COLUMNS, Messages, RowColumns
from roll.types.chat import PICTURES, pictures_of
from roll.types.picture import Picture
from roll.utils.pictures import is_media_part
from roll.utils.rows import BadRowError, DataError, Row, Source, column_value

PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for a picture in a text, as Unicode has it."""

_PLACEHOLDER = "<image>"
_PICTURE_PARTS = ("image", "image_url", "input_image")
_PICTURE_KEYS = ("image", "image_url", "source", "bytes", "path", "url")
_HEEDLESS_KEYS = ("type", "text", "detail", "cache_control")
"""Beside a picture, and without a meaning for what a model sees."""


class PictureFolder:
    """Reads the pictures of one source after another, each of them once."""

    def __init__(self, column: str, *, shares: bool = True) -> None:
        """Start with none read; `column` is the one that `data_args.images` names. `shares`: see `PictureReader`."""
        self.column, self.count, self._shares = column, 0, shares
        self._readers: dict[str, PictureReader] = {}
        self._sources: dict[str, None] = {}

    def columns(self, source: Source, row: Row) -> PictureColumns:
        """Return the columns of a row of a source."""
        self._sources[source.location] = None
        folder = picture_folder(source)
        if folder not in self._readers:
            self._readers[folder] = PictureReader(folder, shares=self._shares)
        return PictureColumns(row, self, self._readers[folder])

    def refuse_none(self) -> None:
        """Raise `DataError` if no row that was read had a picture."""
        if not self.count:
            raise DataError(
                f"{', '.join(self._sources)}: no row has a picture in the column {self.column!r} (data_args.images); "
                "name the column that holds them, or remove the key if the model shall learn from text alone"
            )


def picture_folder(source: Source) -> str:
    """Return where the relative paths of a source's rows begin: at its file, or at a folder of a saved data set."""
    if source.format == "saved":
        return source.location.partition("#")[0]
    if source.format in ("hub", "own"):
        return "."
    return str(Path(source.location).parent)


class PictureColumns(RowColumns):
    """The columns of a row that may show pictures."""

    def __init__(self, row: Row, folder: PictureFolder, reader: PictureReader) -> None:
        """Start with none read."""
        super().__init__(row)
        self._folder, self._column, self._reader = folder, folder.column, reader
        self.picture_columns = (folder.column,)

    def get(self, column: str, role: str) -> Any:
        value = super().get(column, role)
        if isinstance(value, str) and role == "messages":
            value = self._all_parsed(_json_list(value), column)
        return value

    def optional(self, column: str) -> Any:
        value = super().optional(column)
        if isinstance(value, str) and column in CONVERSATION_COLUMNS:
            value = _json_list(value)
        return self._all_parsed(value, column)

    def placed(self, messages: Messages) -> Messages:
        """Return messages with the pictures of the column at their places; raise `BadRowError` for other counts."""
        opened = tuple(self._open(message, i) for i, message in enumerate(messages))
        column = self._of_column()
        if column and not any(PICTURES in message for message in opened):
            opened = self._before_first_text(opened, len(column))
        wanted = [sum(each is None for each in message.get(PICTURES, ())) for message in opened]
        if sum(wanted) != len(column):
            where = ", ".join(f"{count} in messages[{i}]" for i, count in enumerate(wanted) if count) or "none"
            raise BadRowError(
                f"{self.where}: {len(column)} pictures in the column {self._column!r}, and {sum(wanted)} places for "
                f"them in the texts ({where}); each picture has one place: <image>, or a part of type image"
            )
        left = iter(column)
        filled = [
            {**message, PICTURES: tuple(next(left) if each is None else each for each in message[PICTURES])}
            if PICTURES in message
            else message
            for message in opened
        ]
        self._folder.count += len(pictures_of(filled))
        return tuple(filled)

    def place_into(self, payload: dict[str, Any]) -> None:
        messages = payload["messages"]
        placed = self.placed(tuple(messages or ({"role": "user", "content": payload["prompt"]},)))
        if shown := pictures_of(placed):
            payload["messages"], payload["prompt"] = list(placed), None
        if self._column in payload and self._column not in ("prompt", "messages"):
            payload[self._column] = shown

    # --- messages ---------------------------------------------------------------------------

    def _all_parsed(self, value: Any, column: str) -> Any:
        if isinstance(value, Mapping):
            return self._parsed(value, column)
        if isinstance(value, list | tuple):
            return [self._parsed(item, f"{column}[{i}]") for i, item in enumerate(value)]
        return value

    def _parsed(self, message: Any, name: str) -> Any:
        """Return a message as a data set has it with parts that are pictures replaced by places."""
        key = "value" if isinstance(message, Mapping) and "from" in message else "content"
        if isinstance(message, Mapping) and message.get(PICTURES):
            raise BadRowError(
                f"{self.where}: {name} has the key {PICTURES!r}, which nothing reads; a row's pictures stand in a "
                "column, or in parts of type image: move them there"
            )
        parts = message.get(key) if isinstance(message, Mapping) else None
        if not isinstance(parts, list | tuple) or not any(_is_picture_part(part) for part in parts):
            return message
        texts, pictures = [], list[Picture | None]()
        for part in parts:
            if _is_picture_part(part):
                texts.append(PLACE)
                pictures.append(self._of_part(part, f"{name} has a part of type {part.get('type', 'image')}, and"))
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str) and not is_media_part(part):
                texts.append(self._text(part["text"], name))
            else:
                return message  # whoever parses it says what is wrong
        if any(_PLACEHOLDER in text for text in texts):
            raise BadRowError(
                f"{self.where}: {name} has parts that are pictures, and {_PLACEHOLDER} in its text; keep one of them"
            )
        return {**message, key: "".join(texts), PICTURES: tuple(pictures)}

    def _open(self, message: RowMessage, position: int) -> RowMessage:
        """Return a message with None for every picture that the column has to give."""
        text, name = message["content"], f"messages[{position}]"
        if PICTURES not in message and _PLACEHOLDER in self._text(text, name):
            count = text.count(_PLACEHOLDER)
            message = {**message, "content": text.replace(_PLACEHOLDER, PLACE), PICTURES: (None,) * count}
        if PICTURES in message and message["role"] == "assistant":
            raise BadRowError(
                f"{self.where}: {name}, the assistant's, has a place for a picture, and a model writes none; mend the "
                "row or drop it"
            )
        return message

    def _before_first_text(self, messages: Messages, count: int) -> Messages:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            return messages
        shown = {**messages[first], "content": PLACE * count + messages[first]["content"], PICTURES: (None,) * count}
        return (*messages[:first], shown, *messages[first + 1 :])

    def _text(self, text: str, name: str) -> str:
        if PLACE in text:
            raise BadRowError(
                f"{self.where}: {name} has the character U+FFFC in its text, which stands for a picture here; remove it"
            )
        return text

    # --- pictures ---------------------------------------------------------------------------

    def _of_column(self) -> list[Picture]:
        value = column_value(self.row.values, self._column)
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = _json_list(value)
        if not isinstance(value, list | tuple):
            values: Sequence[Any] = () if value is None or value == "" else (value,)
        elif any(isinstance(item, Mapping) and not item.keys().isdisjoint(("role", "from")) for item in value):
            return []  # messages, whose parts hold the pictures
        else:
            values = value
        values = [None if _is_empty(item) else item for item in values]
        self.used.add(self._column)
        if not any(item is not None for item in values):
            return []
        return [self._read(item, f"{self._column}[{i}]") for i, item in enumerate(values)]

    def _of_part(self, part: Mapping[str, Any], what: str) -> Picture | None:
        """Return the picture of a part; None where the column has to give it."""
        filled = {key: value for key, value in part.items() if not _is_empty(value)}
        odd = [key for key in filled if key not in (*_HEEDLESS_KEYS, *_PICTURE_KEYS)]
        if odd:
            raise BadRowError(
                f"{self.where}: {what} {odd[0]!r}, which isn't supported: pictures have the sizes that the model's "
                "preprocessor_config.json says; remove it, or scale the picture"
            )
        values = [filled[key] for key in _PICTURE_KEYS if key in filled]
        if not values:
            return None
        value = values[0] if "bytes" not in filled else filled["bytes"]
        if isinstance(value, Mapping) and "data" in value:  # Anthropic's
            value = f"data:{value.get('media_type', 'image/png')};base64,{value['data']}"
        return self._read(value, what.removesuffix(", and"))

    def _read(self, value: Any, what: str) -> Picture:
        if value is None:
            raise BadRowError(f"{self.where}: {what} is null; drop it, or the row")
        try:
            return self._reader.read(value)
        except PictureError as error:
            raise BadRowError(f"{self.where}: {what}: {error}") from None


def _is_picture_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if kind is not None:
        return kind in _PICTURE_PARTS
    return not _is_empty(part.get("image")) or not _is_empty(part.get("image_url"))


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_empty(item) for item in value.values())
    return value is None or (isinstance(value, str | bytes | os.PathLike) and not value)


def _json_list(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list) else text
