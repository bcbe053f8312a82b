"""What the tables of foreign keys are made of: a row per key, and short ways to write many of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Fate = Literal["translated", "dead", "decided", "absent"]

NOT_GIVEN: Any = object()
"""In place of a default that is the same here, or that nobody needs to write out."""
ROLE = "<role>"
"""Segment of a key that stands for any role, in ours and in theirs."""


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """A key of another system."""

    key: str
    """Theirs, dotted. `<role>` is one of their roles, `<name>` a name of the user's own, `**` everything below."""
    fate: Fate
    """`translated`: it has a counterpart. `dead`: nothing here needs it. `decided`: there is a choice, and `note` says
    which way and why. `absent`: nothing here does this."""
    to: tuple[str, ...] = ()
    """Ours, dotted; the first is where the value goes. For `dead` and `absent` keys: what to look at instead."""
    how: str = ""
    """Name of the conversion in `roll/migrate/conversions.py`. Empty: `values`, else the value as it is."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Their values by ours; others stay."""
    note: str = ""
    """Why, or what to know; a clause without a capital and a full stop."""
    default: Any = NOT_GIVEN
    """Theirs, where it differs from ours: it is written out for a file that leaves the key out."""

    @property
    def leaf(self) -> str:
        """The last word of the key that isn't a placeholder."""
        return next(part for part in reversed(self.key.split(".")) if part[0] not in "<*")


def moved(
    theirs: str, ours: str = "", note: str = "", *, how: str = "", values: Mapping[Any, Any] | None = None,
    default: Any = NOT_GIVEN,
) -> ForeignKey:  # fmt: skip
    """Return the row of a key that has counterparts, separated by spaces; none: it is called the same here."""
    to = tuple((ours or theirs).split())
    return ForeignKey(key=theirs, fate="translated", to=to, how=how, values=values or {}, note=note, default=default)


def decided(
    theirs: str, ours: str, note: str, *, how: str = "", values: Mapping[Any, Any] | None = None,
    default: Any = NOT_GIVEN,
) -> ForeignKey:  # fmt: skip
    """Return the row of a key that leaves a choice."""
    to = tuple(ours.split())
    return ForeignKey(key=theirs, fate="decided", to=to, how=how, values=values or {}, note=note, default=default)


def same(words: str, under: str = "", *, ours_under: str | None = None) -> list[ForeignKey]:
    """Return the rows of keys that are called the same here, below `under` (here below `ours_under`)."""
    return [moved(_below(under, word), _below(under if ours_under is None else ours_under, word))
            for word in words.split()]  # fmt: skip


def pairs(text: str, under: str = "", ours_under: str = "") -> list[ForeignKey]:
    """Return rows of lines `theirs ours`, theirs below `under`, ours below `ours_under`."""
    lines = [line.split() for line in text.strip().splitlines()]
    return [moved(_below(under, theirs), " ".join(_below(ours_under, word) for word in ours))
            for theirs, *ours in lines]  # fmt: skip


def dead(words: str, note: str, under: str = "", see: str = "") -> list[ForeignKey]:
    """Return the rows of keys that nothing here needs, for one reason; `see` are keys to look at."""
    to = tuple(see.split())
    return [ForeignKey(key=_below(under, word), fate="dead", to=to, note=note) for word in words.split()]


def absent(words: str, note: str, under: str = "", see: str = "") -> list[ForeignKey]:
    """Return the rows of keys whose work nothing here does, for one reason; `see` are keys to look at."""
    to = tuple(see.split())
    return [ForeignKey(key=_below(under, word), fate="absent", to=to, note=note) for word in words.split()]


def _below(under: str, word: str) -> str:
    return f"{under}.{word}" if under and word else under or word
