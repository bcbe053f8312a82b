"""Rows with pictures, videos or sound that nobody reads: they are refused, since a model would be trained blind."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from roll.utils.rows import BadRowError, Row

_KINDS = ("image", "video", "audio")
_NAMES = re.compile(r"(images?|imgs?|pictures?|photos?|screenshots?|videos?|audios?|sounds?)(_?\d+)?", re.IGNORECASE)
_POINTERS = re.compile(
    r"(images?|imgs?|pictures?|photos?|screenshots?|videos?|audios?)_?(paths?|urls?|files?|uris?|names?|bytes|base64)",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(r"<\|?/?(image|img|video|audio|picture)(_pad|_start|_end|_soft_token)?\|?>|<\|vision_\w+\|>")
"""Where models put a picture, video or sound into a text."""
_FILE = re.compile(
    r"(https?://|file://|data:(image|video|audio)/)\S+"
    r"|\S[^\n]{0,500}\.(jpe?g|png|gif|webp|bmp|tiff?|svg|heic|mp4|avi|mov|mkv|webm|mp3|wav|flac|ogg|m4a)",
    re.IGNORECASE,
)
_DATA = ("data:image/", "data:video/", "data:audio/")
_FIRST_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"ID3", b"fLaC", b"OggS")
_LISTED = 8
"""Items of a list that are looked at: lists of pictures hold nothing else."""


def refuse_pictures(row: Row, texts: Iterable[str] = (), *, shown: Collection[str] = ()) -> None:
    """Raise `BadRowError` for a row with a picture, a video or a sound in a column; `texts` are what is read of it,
    `shown` the columns whose pictures a model sees.

    A column is known by what it holds (a decoded picture, its bytes, a data URI), or by its name and something that
    names a file. Other texts under such a name, as of containers, count where `texts` have a place for a picture.
    """
    for name, value in row.values.items():
        named, points = _column_kind(name)
        if (
            name in shown
            or value is None
            or ((isinstance(value, int | float) or not _is_media(value)) and not (named or points))
        ):
            continue
        if _is_empty(value):
            continue
        if _is_media(value) or (named and _names_media(value)):
            raise no_pictures(row.where, f"the column {name!r}")
        if any(has_placeholder(text) for text in texts):
            raise no_pictures(row.where, f"the column {name!r}, which its text has a place for,")


@lru_cache(maxsize=4096)
def _column_kind(name: str) -> tuple[bool, bool]:
    """Return whether a column's name says that it holds pictures, and whether that it holds paths or links to some."""
    return _NAMES.fullmatch(name) is not None, _POINTERS.fullmatch(name) is not None


def no_pictures(where: str, what: str) -> BadRowError:
    """Return the error about a picture at `where`."""
    return BadRowError(
        f"{where}: {what} holds pictures, videos or sounds, which nothing here reads: a model would be trained on the "
        "text alone, without what it is about. For pictures name their column in data_args.images (docs/images.md); "
        "videos and sounds aren't supported. Else leave such rows out, or drop the column if the text stands by itself"
    )


def has_placeholder(text: str) -> bool:
    """Return whether a text has a placeholder for a picture, such as `<image>`."""
    return "<" in text and _PLACEHOLDER.search(text) is not None


def is_media_part(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a message's content is a picture, video or sound, in any of the spellings in use."""
    kind = str(part.get("type") or "").lower().removeprefix("input_")
    if kind.startswith(_KINDS):
        return True
    keys = (key for key in part if key != "type" and not _is_empty(part[key]))
    return any(key.lower().removeprefix("input_").startswith(_KINDS) for key in keys)


def _is_empty(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_empty(item) for item in value)
    return value is None or (isinstance(value, str | bytes | dict) and not value)


def _is_media(value: Any) -> bool:
    """Return whether a value is a picture, video or sound itself, decoded or not."""
    if isinstance(value, str):
        return value.startswith(_DATA)
    if isinstance(value, bytes):
        return value.startswith(_FIRST_BYTES)
    if isinstance(value, Mapping):
        if set(value) == {"bytes", "path"}:  # how datasets stores all of them
            return not (_is_empty(value["bytes"]) and _is_empty(value["path"]))
        return "array" in value and "sampling_rate" in value
    if isinstance(value, list | tuple):
        return any(_is_media(item) for item in value[:_LISTED] if not isinstance(item, list | tuple))
    return type(value).__module__.split(".")[0] in ("PIL", "torchcodec")


def _names_media(value: Any) -> bool:
    """Return whether a value, in a column named after pictures, is or names some."""
    if isinstance(value, str):
        return _FILE.fullmatch(value.strip()) is not None
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return any(_names_media(item) for item in value[:_LISTED])
    return isinstance(value, Mapping | bytes) or _is_media(value)
