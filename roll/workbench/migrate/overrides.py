"""Overrides as Hydra writes them, `key=value`, `+key=value`, `~key`, into a nested dict."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml

from roll.workbench.migrate.shell_words import Word

OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w.@/-]*)(?:=(.*))?$", re.DOTALL)


_DEEPEST = 64
"""Words of a key."""


@dataclass(frozen=True)
class Unexpanded:
    """A value that would have to be run or worked out."""

    text: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@dataclass
class Overrides:
    """What a list of overrides says."""

    tree: dict[str, Any] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    """Keys with `~`."""
    conflicts: list[tuple[str, Any]] = field(default_factory=list)
    """Keys below a key that has a value itself."""
    choices: list[tuple[str, Any]] = field(default_factory=list)
    """Hydra's choices of a file of defaults for a section that has overrides, `optim=fsdp optim.lr=1e-5`."""


def read_overrides(words: Iterable[Word]) -> Overrides:
    """Return what the overrides among the words say; the last of a key counts."""
    found = Overrides()
    pairs = [(word, match.groups()) for word in words if (match := OVERRIDE.match(word.text)) is not None]
    sections = {key.partition(".")[0] for _, (_, key, _) in pairs if "." in key}
    for word, (sign, key, value) in pairs:
        if sign == "~":
            found.deleted.append(key)
        elif key in sections and value is not None and re.fullmatch(r"\w+", value):
            found.choices.append((key, value))
            if key == "engine":
                _set(found, "engine.strategy", value)
        elif value is not None:
            _set(found, key, Unexpanded(value, word.unexpanded) if word.unexpanded else parsed(value))
    return found


def _set(found: Overrides, key: str, value: Any) -> None:
    node = found.tree
    *sections, last = key.split(".")
    if len(sections) >= _DEEPEST:
        raise ValueError(f"the key {key[:60]}... has more than {_DEEPEST} words")
    for name in sections:
        below = node.setdefault(name, {})
        if not isinstance(below, dict):
            found.conflicts.append((key, value))
            return
        node = below
    if isinstance(node.get(last), dict) and isinstance(value, dict):
        node[last].update(value)
    else:
        node[last] = value


def parsed(text: str) -> Any:
    """Return the value that Hydra reads in a text, else what YAML does, else the text."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    text = text.strip()
    if len(text) > 2**16:
        return text
    if text in ("null", "None", ""):
        return None
    # Its parser has many ways to say no, and what isn't its notation is a text.
    with contextlib.suppress(Exception):
        override = OverridesParser.create().parse_override(f"key={text}")
        return [part for part in text.split(",") if part] if override.is_sweep_override() else override.value()
    try:
        # With aliases a short text can be a billion values.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            return text
        value = yaml.safe_load(text)
        return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else text
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
