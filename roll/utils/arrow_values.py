"""What Arrow tables hold in another form than the rows that were written: JSON as text, and keys that no row had.

Arrow stores JSON as text, in lists and structs too; only the type (`arrow.json`) says that it isn't one. And a struct
has all keys that any row has: what a row lacks is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Decode: TypeAlias = Callable[[Any], Any]


def json_decoder(kind: Any, parse: Callable[[str], Any]) -> Decode | None:
    """Return what makes values of a column of this Arrow type, None where none of it is JSON; `parse` reads a text."""
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):
        return (lambda text: None if text is None else parse(text)) if kind.extension_name == "arrow.json" else None
    if pyarrow.types.is_struct(kind):
        parts = {field.name: decode for field in kind if (decode := json_decoder(field.type, parse))}
        return (lambda value: value and {k: parts.get(k, _same)(v) for k, v in value.items()}) if parts else None
    if pyarrow.types.is_map(kind):
        key, item = json_decoder(kind.key_type, parse), json_decoder(kind.item_type, parse)
        decode_key, decode_item = key or _same, item or _same
        if key or item:
            return lambda value: value and [(decode_key(k), decode_item(v)) for k, v in value]
        return None
    if isinstance(getattr(kind, "value_type", None), pyarrow.DataType):
        decode = json_decoder(kind.value_type, parse)
        if decode is None or pyarrow.types.is_dictionary(kind):
            return decode
        return lambda value: value and [decode(item) for item in value]
    return None


def _same(value: Any) -> Any:
    return value


def without_padding(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row without the nulls that Arrow puts into tools and the arguments of calls, whose keys differ.

    A template would write them: a model would learn to call with `"city": null`. Other columns stay as they are.
    """
    changed = {}
    for name, value in values.items():
        if name == "tools" and isinstance(value, list):
            changed[name] = _without_nulls(value)
        elif isinstance(value, list) and any(isinstance(item, dict) and item.get("tool_calls") for item in value):
            changed[name] = [_with_bare_calls(item) for item in value]
    return {**values, **changed} if changed else values


def _with_bare_calls(message: Any) -> Any:
    calls = isinstance(message, dict) and message.get("tool_calls")
    return {**message, "tool_calls": _without_nulls(calls)} if isinstance(calls, list) else message


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
