"""Keys of ours by their dotted path: what type they have, and values of other notations as that type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from roll.configs.schema.strategy_config import STRATEGIES
from roll.configs.schema.strategy_options import StrategyConfig

UNKNOWN: Any = object()
"""There is no such key."""


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _fields(cls: type) -> dict[str, Field[Any]]:
    return {spec.name: spec for spec in fields(cls)}


def hint_at(cls: type, path: str, strategies: Mapping[str, str]) -> Any:
    """Return the type of the key at `path` of the configuration `cls`, or `UNKNOWN`.

    `strategies` are the backends of roles, by name: their `strategy_config` has that backend's keys. A key of a mapping
    that takes any is `Any`.
    """
    return _walk(cls, path, strategies)[0]


def default_at(cls: type, path: str, strategies: Mapping[str, str]) -> Any:
    """Return what the key at `path` is where nobody writes it, or `UNKNOWN`."""
    spec = _walk(cls, path, strategies)[1]
    if spec is None:
        return UNKNOWN
    if spec.default_factory is not MISSING:
        return spec.default_factory()
    return UNKNOWN if spec.default is MISSING else spec.default


def _walk(cls: type, path: str, strategies: Mapping[str, str]) -> tuple[Any, Field[Any] | None]:
    """The type of a key, and its field where it is one of a section."""
    hint: Any = cls
    spec: Field[Any] | None = None
    role: list[str] = []
    for word in path.split("."):
        if hint is Any:
            return Any, None
        section = _section(hint)
        mapping = next((member for member in _members(hint) if get_origin(member) is dict), None)
        if mapping is not None and (section is None or word not in _fields(section)):
            hint, spec = get_args(mapping)[1], None
        else:
            if section is StrategyConfig:
                section = STRATEGIES.get(strategies.get(".".join(role[:-2]), ""), StrategyConfig)
            if section is None:
                return UNKNOWN, None
            if word not in _fields(section):
                is_open = any(field.metadata.get("open") for field in _fields(section).values())
                return (Any if is_open or section is StrategyConfig else UNKNOWN), None
            hint, spec = _hints(section)[word], _fields(section)[word]
        role.append(word)
    return hint, spec


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one."""
    return get_args(hint) if get_origin(hint) in (Union, type(int | str)) else (hint,)


def _section(hint: Any) -> type | None:
    """The dataclass, or the mapping, that a type allows."""
    return next((member for member in _members(hint) if is_dataclass(member) and isinstance(member, type)), None)


def takes_null(hint: Any) -> bool:
    """Return whether a key of this type may be null."""
    return hint is Any or type(None) in get_args(hint)


def is_section(hint: Any) -> bool:
    """Return whether a key of this type has keys of its own."""
    return _section(hint) is not None


def coerced(hint: Any, value: Any) -> Any:
    """Return the value as the type says, where it is another notation of the same: `"1e-6"`, `"True"`, `8.0`."""
    members = _members(hint)
    if isinstance(value, str) and str not in members:
        word = value.strip()
        if bool in members and word.lower() in ("true", "false"):
            return word.lower() == "true"
        if type(None) in members and word.lower() in ("null", "none", "~"):
            return None
        number = _number(word)
        if number is not None and (float in members or (int in members and number == int(number))):
            return number if int not in members else int(number)
    if isinstance(value, bool):
        return str(value).lower() if members == (str,) else value
    if isinstance(value, float) and int in members and float not in members and value.is_integer():
        return int(value)
    if isinstance(value, (int, float)) and str in members and not {int, float} & set(members):
        return str(value)
    if isinstance(value, Mapping) and get_origin(hint) is dict:
        return {str(key): coerced(get_args(hint)[1], entry) for key, entry in value.items()}
    return value


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
