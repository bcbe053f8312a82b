"""Where keys stand in the schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    return get_type_hints(cls)


def key_paths(cls: type, path: str = "") -> Iterator[str]:
    """Dotted path of every key below `cls`; `<name>` stands for a user's own key."""
    for name, hint in hints_of(cls).items():
        below = f"{path}.{name}" if path else name
        yield below
        for section, suffix in sections_of(hint):
            yield from key_paths(section, below + suffix)


@cache
def homes_of(cls: type) -> dict[str, tuple[str, ...]]:
    """Dotted paths of the keys below `cls` by their last name."""
    homes: dict[str, tuple[str, ...]] = {}
    for key_path in key_paths(cls):
        last = key_path.rpartition(".")[2]
        homes[last] = (*homes.get(last, ()), key_path)
    return homes


def sections_of(hint: Any) -> Iterator[tuple[type, str]]:
    """Dataclasses inside a type hint, each with what stands between the key and their own keys."""
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint, ""
    origin = get_origin(hint)
    for member in get_args(hint):
        suffix = ".<name>" if origin is dict else "[]" if origin is tuple else ""
        for section, rest in sections_of(member):
            yield section, suffix + rest
