"""Rules about a key that names an entry of a table, and about the entry's options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from roll.configs.catalog.entries import OWN_PATH, Entry
from roll.configs.errors import Violation, nearest


def named_rules(value: str, path: str, known: tuple[str, ...]) -> Iterator[Violation]:
    """A name that the table has, or a path of the user's own."""
    if value not in known and not OWN_PATH.match(value):
        expected = f"one of {', '.join(known)}; or your own as package.module:name or file.py:name"
        yield Violation(path, expected, nearest(value, known), value)


def given_twice(config: Any, path: str, entry: Entry, default_of: Callable[[str], Any]) -> Iterator[Violation]:
    """An option that is written, and whose own key isn't at its default; `default_of` knows those of keys."""
    for name, value in getattr(config, path).items():
        option = entry.options.get(name)
        key = option.source or option.key if option is not None else ""
        if option is not None and key and getattr(config, key) != default_of(key):
            expected = f"no option {name}, because {option.key} says the same"
            yield Violation(f"{path}.{name}", expected, "keep one of the two", value)
