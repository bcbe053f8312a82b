"""What the tables are made of: entries, their options, and how a name in YAML becomes an object."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roll.configs.catalog.signatures import signature_of
from roll.utils.importing import Kind, load_object, suggested_path

OWN_PATH = re.compile(r"^(?:[A-Za-z_][\w.]*|[^:]+\.py):[A-Za-z_]\w*$")
"""`package.module:name` or `path/to/file.py:name`: something of the user's own."""


@dataclass(frozen=True)
class Option:
    """An option of an entry, as YAML gives it. It is called what its implementation's parameter is called."""

    hint: Any
    """Its type, e.g. `float | None`."""
    key: str = ""
    """The key of the configuration that gives it where the option isn't written."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """`ge`, `gt`, `le`, `lt`."""
    source: str = ""
    """The property of the configuration that reads that key, where the key alone doesn't say it."""
    default: Any = None
    """Its value where it isn't written, if it has no key."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing of a kind."""

    path: str
    """`package.module:name` of its implementation."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """By name."""
    sandboxed: bool = False
    """Of a reward: it runs model output, and is given the run's sandbox as `sandbox`."""
    answers: bool = True
    """Of a reward: it says which answer a response states, where it states one."""


E = TypeVar("E", bound=Entry)


def implementation(table: Mapping[str, Entry], name: str, *, key: str, kind: Kind = "object") -> Any:
    """Import what `name` stands for: an entry of the table, or a path of the user's own.

    Raises `ValueError`, which names `key` and `kind`, if there is no such entry, file, module or object.
    """
    if name in table:
        return load_object(table[name].path, key=key)
    if not OWN_PATH.match(name):
        known = f"{nearest(name, table)}known: {', '.join(table)}; your own is {suggested_path(name)}"
        raise ValueError(f"{key}: unknown name {name!r}; {known}")
    return load_object(name, key=key, kind=kind)


def chosen(table: Mapping[str, Entry], name: str, args: Mapping[str, Any], *, key: str, skip: int = 1) -> Any:
    """Import what `name` stands for; raise `ValueError` also for `args` that something of the user's own doesn't take.

    `args` are those of the configuration's `<key>_args`; the caller gives the first `skip` parameters by position.
    """
    target = implementation(table, name, key=key)
    if name not in table:
        wrong = [f"{key}_args.{arg}: {problem}" for arg, problem in signature_of(target, skip=skip).problems(args)]
        if wrong:
            raise ValueError(f"{name} can't be called: {'; '.join(wrong)}")
    return target


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'? ` with the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
