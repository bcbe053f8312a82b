"""A registry is a plain dict from the name in YAML to a function; these helpers add to it and look up."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def registering(table: dict[str, T], kind: str, name: str) -> Callable[[T], T]:
    """A decorator that files its function in `table` under `name`; taking a name that is in use raises."""

    def add(function: T) -> T:
        if table.setdefault(name, function) is not function:
            raise ValueError(f"{kind} {name!r} is registered already ({table[name]}); choose another name")
        return function

    return add


def look_up(table: Mapping[str, T], kind: str, name: str) -> T:
    """The entry called `name`; an unknown name raises with the nearest known one and the whole list."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown {kind} {name!r}; {hint}known: {', '.join(sorted(table))}")
