"""Arguments that a form writes as bare text (`5`, `true`, `[1, 2]`) become what the tool's JSON schema says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll.envs.tools.parsing.base import BadCall, read_value
from roll.types.chat import ToolSpec

_DEEPEST = 16
"""References and combinations within each other that are followed."""
_MAX_OPTIONS = 256
"""Parts of a schema that are looked at for one argument: a few references can name each other very often."""
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_OF_VALUES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def parameters_of(tools: Sequence[ToolSpec], name: str) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments; empty for an unknown tool."""
    return next((tool.parameters for tool in tools if tool.name == name), {})


def typed_argument(text: str, key: str, parameters: Mapping[str, Any]) -> Any:
    """Return an argument that was written as bare text as the schema `parameters` of the tool wants it; the text itself
    where it doesn't fit, or nothing is known of it."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = parameters.get("additionalProperties")
    if not isinstance(schema, Mapping):
        return text
    facts = _Facts(parameters)
    kinds = facts.kinds(schema, 0)
    if not kinds or kinds == {"string"}:
        return text
    value, is_json = _json(text.strip())
    if facts.values:  # an enum: of all readings, the one that it names
        for reading in (text, text.strip(), *([value] if is_json else [])):
            if any(reading == each and type(reading) is type(each) for each in facts.values):
                return reading
    if not is_json:
        word = text.strip().lower()
        return _WORDS[word] if word in _WORDS and _kind(_WORDS[word]) in kinds else text
    if "string" in kinds and (_kind(value) not in kinds or isinstance(value, str) or _is_number(value)):
        return text
    return value


def _json(text: str) -> tuple[Any, bool]:
    """Return what a text says as JSON, and whether it is JSON as a whole."""
    try:
        value, end = read_value(text, 0)
        json.dumps(value, allow_nan=False)
    except (BadCall, ValueError, RecursionError):  # 1e400 is read as infinity, which no JSON text holds
        return None, False
    return value, end == len(text)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Facts:
    """What a schema says of a value, its references into the whole of the tool's schema followed."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MAX_OPTIONS
        self.values: list[Any] = []
        """That an `enum` or a `const` names."""

    def kinds(self, schema: Any, depth: int) -> set[str]:
        """Return the types that a schema allows; empty: it doesn't say."""
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _DEEPEST or self._left < 0:
            return set()
        kinds = _types(schema.get("type"))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, (list, tuple)):
            self.values += [value for value in values[:_MAX_OPTIONS] if type(value) in _OF_VALUES]
            kinds = kinds or {_kind(value) for value in values[:_MAX_OPTIONS]}
        if not kinds and "$ref" in schema:
            kinds = self.kinds(self._referred(schema["$ref"]), depth + 1)
        if not kinds:
            kinds = self._combined(schema, depth)
        if not kinds and any(key in schema for key in ("properties", "additionalProperties", "patternProperties")):
            kinds = {"object"}
        if not kinds and ("items" in schema or "prefixItems" in schema):
            kinds = {"array"}
        return kinds | ({"null"} if kinds and schema.get("nullable") is True else set())

    def _combined(self, schema: Mapping[str, Any], depth: int) -> set[str]:
        """Combine schemas: all parts of `allOf` hold at once, one of those of `anyOf` and `oneOf`."""
        kinds: set[str] = set()
        for part in _parts(schema.get("allOf")):
            more = self.kinds(part, depth + 1)
            kinds = (kinds & more or kinds) if kinds and more else kinds | more
        for key in ("anyOf", "oneOf"):
            more = set().union(*(self.kinds(part, depth + 1) for part in _parts(schema.get(key))))
            kinds = (kinds & more or kinds) if kinds and more else kinds | more
        return kinds

    def _referred(self, reference: Any) -> Any:
        """Return what `#/$defs/Unit` stands for; None for references elsewhere."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target: Any = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        return target


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _types(named: Any) -> set[str]:
    return {kind for kind in ([named] if isinstance(named, str) else _parts(named)) if isinstance(kind, str)}


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "array"
    return _OF_VALUES.get(type(value), "object")
