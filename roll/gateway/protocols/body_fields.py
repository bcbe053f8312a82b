"""Fields of request bodies: which act, which are harmless, which are refused, and readers that say what is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from roll.gateway.base import RefusedCall

Kind = Literal["acts", "harmless", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """A top-level field of a protocol's request.

    Args:
        says: what it does, or why it is refused; a line of the documentation.
        neutral: values of a refused field that ask for nothing.
        expects: what the value of a harmless field must be; nothing: it isn't looked at.
    """

    name: str
    kind: Kind
    says: str
    neutral: tuple[Any, ...] = ()
    expects: type | tuple[type, ...] = object


Table = Mapping[str, Field]


def table(*fields: Field) -> Table:
    """Return fields by name."""
    return {field.name: field for field in fields}


def checked(body: Any, fields: Table, ignored: Collection[str]) -> dict[str, Any]:
    """Return the fields of a body that act, without nulls; raises `RefusedCall` for one that would lose its meaning.

    Args:
        ignored: fields that the owner of the endpoint says to leave out.
    """
    if not isinstance(body, dict):
        raise RefusedCall(400, f"the body is {_kind(body)}, expected a JSON object")
    accepted: dict[str, Any] = {}
    for name, value in body.items():
        # A name among several still says who is asked: without it, calls of a frozen model would be trained.
        if value is None or (name in ignored and not (name == "model" and isinstance(value, str))):
            continue
        field = fields.get(name)
        if field is None:
            raise _unknown(name, fields)
        if field.kind == "refused" and value not in field.neutral:
            refuse_lost(name, field.says)
        if not isinstance(value, field.expects):
            wrong(name, value, "an object" if field.expects is dict else "a text")
        if field.kind == "acts":
            accepted[name] = value
    return accepted


def refuse_lost(name: str, why: str, ignore_as: str | None = None) -> NoReturn:
    """Raise for a field whose meaning would be lost; `ignore_as` is its name in `ignore_fields`, by default its own."""
    key = ignore_as or name
    raise RefusedCall(
        400, f"{name}: {why}. Leave it out, or have whoever runs this endpoint add {key!r} to ignore_fields", name
    )


def hosted(kind: Any, where: str, why: str, ignored: Collection[str]) -> None:
    """Raise for a tool that isn't a function, unless its type is to be left out (`tools.web_search`)."""
    name = f"tools.{kind}"
    if isinstance(kind, str) and name in ignored:
        return
    ignore = f", or have whoever runs this endpoint add {name:.80} to ignore_fields" if isinstance(kind, str) else ""
    raise RefusedCall(
        400, f"{where}.type: {why}. Leave it out{ignore}: agents bring functions of their own", f"{where}.type"
    )


def _unknown(name: str, fields: Table) -> RefusedCall:
    shown = name[:80]
    near = difflib.get_close_matches(shown, fields, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return RefusedCall(
        400,
        f"{shown!r} isn't a field that this endpoint knows{hint} Leave it out, or have whoever runs this endpoint add "
        "it to ignore_fields",
        shown,
        code="unknown_parameter",
    )


def wrong(name: str, value: Any, expected: str) -> NoReturn:
    """Raise for a value that isn't what it must be."""
    raise RefusedCall(400, f"{name}: got {_shown(value)}, expected {expected}", name)


def integer(body: Mapping[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    """Return a whole number of at least `low` and at most `high`, or None if it isn't there."""
    value = body.get(name)
    if value is None:
        return None
    fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits or value < low or (high is not None and value > high):
        wrong(name, value, f"a whole number from {low} to {high}" if high is not None else f"a whole number >= {low}")
    return int(value)


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """Return a number between `low` and `high`, or None if it isn't there."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        wrong(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def boolean(body: Mapping[str, Any], name: str, default: bool = False, where: str = "") -> bool:
    """Return true or false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        wrong(where + name, value, "true or false")
    return bool(value)


def text(body: Mapping[str, Any], name: str, where: str = "") -> str | None:
    """Return a text, or None if it isn't there; `where` is the place of the body for messages."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        wrong(where + name, value, "a text")
    return str(value)


def needed_text(body: Mapping[str, Any], name: str, where: str = "", longest: int = 1 << 20) -> str:
    """Return a text that must be there and have 1 to `longest` characters."""
    value = text(body, name, where)
    if not value or len(value) > longest:
        wrong(where + name, value, f"a text of 1 to {longest} characters")
    return value


def texts(body: Mapping[str, Any], name: str, most: int, longest: int = 256) -> tuple[str, ...]:
    """Return a text or a list of at most `most` texts, none of them empty or of more than `longest` characters."""
    value = body.get(name)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    right = isinstance(values, list) and len(values) <= most
    if not right or not all(isinstance(each, str) and 0 < len(each) <= longest for each in values):
        wrong(name, value, f"a text or a list of at most {most} texts, each of 1 to {longest} characters")
    return tuple(values)


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        wrong(where, value, "an object")
    return dict(value)


def items(value: Any, where: str, most: int) -> list[Any]:
    """Return a list of at most `most` things."""
    if not isinstance(value, list) or len(value) > most:
        wrong(where, value, f"a list of at most {most}")
    return list(value)


def only(body: Mapping[str, Any], known: Collection[str], where: str, ignored: Collection[str], prefix: str) -> None:
    """Raise for a part of a nested object that nobody reads; `prefix` stands before its name in `ignore_fields`.

    Nulls and empty lists and objects say nothing.
    """
    for name, value in body.items():
        if name not in known and value not in (None, [], {}, "") and f"{prefix}.{name}" not in ignored:
            refuse_lost(f"{where}.{name[:80]}", "this endpoint doesn't know it", f"{prefix}.{name[:80]}")


def texts_of_parts(value: Any, where: str, types: Sequence[str], key: str = "text") -> str:
    """Return the text of a content: a text, or a list of parts of these types, joined."""
    if isinstance(value, str):
        return value
    parts = []
    for i, part in enumerate(items(value, where, 4096)):
        part = mapping(part, f"{where}[{i}]")
        if part.get("type") not in types:
            wrong(f"{where}[{i}].type", part.get("type"), f"{' or '.join(types)}: the policy reads text only")
        piece = part.get(key, part.get("refusal") if part.get("type") == "refusal" else None)
        if not isinstance(piece, str):
            wrong(f"{where}[{i}].{key}", piece, "a text")
        parts.append(piece)
    return "".join(parts)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, (str, int, float, bool, type(None))) else _kind(value)
