"""When a key acts: stands on its field, and writes its own rule (rules/acts_if.py) and line of the reference page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROLE = "role"
"""In place of a key: the role that has the section."""
TRAINED = "trains"
"""In place of a key: whether that role trains, whatever it is called."""
BACKEND = "strategy_name"
"""In place of a key: the backend of that role; values are beginnings of its name."""


@dataclass(frozen=True, kw_only=True)
class ActsIf:
    """A condition on another key, without which a key has no effect."""

    key: str
    """A key or property of the same section, of the top level with `^`, or `ROLE`, `TRAINED` or `BACKEND`."""
    values: tuple[Any, ...] = ()
    """It has one of these, or a list has. Empty: it isn't null, false, 0 or empty."""
    unless: bool = False
    """The key acts if the condition does not hold."""
    words: str = ""
    """The condition as it goes on after "Acts only", where `key` and `values` don't say it."""
    why: str | Mapping[str, str] = ""
    """Why not otherwise; or by role, for `BACKEND` by the beginning of its name."""
    fix: str = ""
    """How to make the key act, or what to write instead; `{section}` stands for the path of the section."""

    @property
    def phrase(self) -> str:
        """Return the condition as it goes on after "Acts only"."""
        names = [f"`{value}`" for value in self.values]
        listed = " or ".join(names)
        if self.words:
            return self.words
        if self.key == ROLE:
            return f"for {' and '.join(names)}"
        if self.key == BACKEND:
            return f"with {' and '.join(f'`{value}_*`' for value in self.values)}"
        return f"{'without' if self.unless else 'with'} `{self.key.lstrip('^')}`{f' {listed}' if listed else ''}"

    def holds(self, actual: Any) -> bool:
        """Return whether the key acts, given what `key` is."""
        if self.key == BACKEND:
            there = str(actual).startswith(self.values)
        elif self.values:
            there = any(value in self.values for value in (actual if isinstance(actual, tuple) else (actual,)))
        else:
            there = bool(actual)
        return there is not self.unless


def acting(default: Any, *conditions: ActsIf, idle: tuple[Any, ...] = (), **metadata: Any) -> Any:
    """Declare a field that acts only under conditions. `idle`: values besides the default that ask for nothing.

    `accelerator` (in `metadata`): values that need one, each with the package that it also needs, or None.
    """
    return field(default=default, metadata={"acts_if": conditions, "idle": idle, **metadata})


def needs(key: str, *values: Any, **more: Any) -> ActsIf:
    """Return the condition that `key` is on, or has one of `values`."""
    return ActsIf(key=key, values=values, **more)


def unless(key: str, *values: Any, **more: Any) -> ActsIf:
    """Return the condition that `key` is off, or has none of `values`."""
    return ActsIf(key=key, values=values, unless=True, **more)


TRAINS = needs(TRAINED, words="for roles that train", why="it doesn't train")
