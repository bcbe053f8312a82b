"""configs/schema.json, a JSON Schema of the configuration for editors, written from the configuration classes.

    python docs/generate/config_schema.py configs/schema.json

An editor with a YAML language server then completes keys, shows what they mean, and marks unknown ones. Rules between
keys, and paths, aren't in it: `roll check` has them. A test compares the committed file with what this writes.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from config_reference import docstrings, line_of

from roll.configs.parsing.loader import PIPELINES

Schema = dict[str, Any]

REFERENCE: Schema = {"$ref": "#/$defs/reference"}

_SCALARS: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def json_schema() -> Schema:
    """Return the schema of a whole file; which keys it may have depends on its `pipeline`."""
    # `${name}` or `???` may stand for any value before Hydra has composed the file.
    definitions: dict[str, Schema] = {"reference": {"type": "string", "pattern": r"\$\{.+\}|^\?\?\?$"}}
    for cls in PIPELINES.values():
        _define(cls, definitions)
        # A file may begin with what Hydra composes it of.
        definitions[cls.__name__]["properties"]["defaults"] = {"type": "array"}
    chosen = [
        {
            "if": {"properties": {"pipeline": {"const": name}}, "required": ["pipeline"]},
            "then": {"$ref": f"#/$defs/{cls.__name__}"},
        }
        for name, cls in PIPELINES.items()
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of a run",
        "type": "object",
        "properties": {"pipeline": {"anyOf": [{"enum": list(PIPELINES)}, {"type": "string", "pattern": ":"}]}},
        "required": ["pipeline"],
        "allOf": chosen,
        "$defs": definitions,
    }


def _define(cls: type, definitions: dict[str, Schema]) -> Schema:
    """Return a reference to the schema of a section, which is made when it is met first."""
    if cls.__name__ not in definitions:
        section = definitions[cls.__name__] = {"type": "object"}
        hints, texts = get_type_hints(cls), docstrings(cls)
        section["properties"] = {
            spec.name: {**_key(spec, hints[spec.name], definitions), "description": texts[spec.name] + line_of(spec)}
            for spec in fields(cls)
        }
        required = [s.name for s in fields(cls) if s.default is MISSING and s.default_factory is MISSING]
        if required:
            section["required"] = required
        section["additionalProperties"] = any(spec.metadata.get("open") for spec in fields(cls))
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _key(spec: Field[Any], hint: Any, definitions: dict[str, Schema]) -> Schema:
    meta = spec.metadata
    if "table" in meta:
        tables = dict.fromkeys([*meta["table"].values(), meta["own_table"]])
        schemas = [_define(section, definitions) for section in tables]
    elif "parser" in meta:
        schemas = [{"description": meta["expected"]}]  # a notation of its own
    elif "choices" in meta:
        schemas = [{"enum": list(meta["choices"])}, *([{"type": "string", "pattern": ":"}] if meta["own"] else [])]
    elif "args" in meta:
        named = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        schemas = [{"type": "string"}, named]
        if meta.get("one_or_many"):
            schemas = [{"type": "array", "items": {"anyOf": [*schemas, REFERENCE]}}, *schemas]
    else:
        schemas = _types(hint, definitions, meta.get("bounds", {}))
        if meta.get("one_or_many"):
            schemas += [one for many in schemas if "items" in many for one in many["items"]["anyOf"]]
    if "also" in meta:
        schemas = [*schemas, {"enum": list(meta["also"])}]
    schema: Schema = {"anyOf": [*schemas, REFERENCE]} if {} not in schemas else {}
    if spec.default is not MISSING and isinstance(spec.default, (bool, int, float, str)):
        schema["default"] = spec.default
    return schema


def _types(hint: Any, definitions: dict[str, Schema], bounds: Mapping[str, float] | None = None) -> list[Schema]:
    """Return the schemas of which a value of this type fits one; `bounds` are those of its numbers."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return [{}]
    if origin in (Union, types.UnionType):
        return [schema for member in args for schema in _types(member, definitions, bounds)]
    if origin is Literal:
        return [{"enum": list(args)}]
    if origin is tuple:
        return [{"type": "array", "items": {"anyOf": [*_types(args[0], definitions), REFERENCE]}}]
    if origin is dict:
        return [{"type": "object", "additionalProperties": {"anyOf": [*_types(args[1], definitions), REFERENCE]}}]
    if is_dataclass(hint) and isinstance(hint, type):
        return [_define(hint, definitions)]
    limits = {_BOUNDS[name]: bound for name, bound in (bounds or {}).items()} if hint in (int, float) else {}
    return [{**_SCALARS[hint], **limits}]


def text() -> str:
    """Return the committed file's text."""
    return json.dumps(json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
