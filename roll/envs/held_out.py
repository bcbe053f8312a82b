"""Keeping a fifth of all generated rooms and maps for validation, by what they look like.

Other seeds alone don't do that: of small rooms there are few, and another seed soon gives one that is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar, get_args

from roll.utils.seeding import stable_hash

T = TypeVar("T")
Part = Literal["all", "train", "held_out"]

ONE_IN = 5
_ATTEMPTS = 1000


def check_part(part: str) -> None:
    """Raise `ValueError` for a word that names no part."""
    if part not in get_args(Part):
        raise ValueError(f"part: got {part!r}, expected one of {', '.join(get_args(Part))}")


def is_held_out(layout: str) -> bool:
    """Return whether a layout is for validation; the same in every run."""
    return stable_hash("held-out", layout) % ONE_IN == 0


def room_of_part(part: Part, seed: int, make: Callable[[int], T], layout_of: Callable[[T], str]) -> T:
    """Return what `make` gives for the seed, or for the first one derived from it whose layout lies in the part.

    Args:
        part: `all` takes what the seed gives.
        make: a room from a seed.
        layout_of: what of a room must not be known from training.

    Raises:
        ValueError: there seem to be no such rooms.
    """
    for attempt in range(_ATTEMPTS):
        made = make(seed if attempt == 0 else stable_hash("held-out", seed, attempt))
        if part == "all" or is_held_out(layout_of(made)) == (part == "held_out"):
            return made
    raise ValueError(
        f"part: got {part!r}, but none of {_ATTEMPTS} rooms is in that part: there are too few different ones; choose "
        "larger ones, or 'all'"
    )
