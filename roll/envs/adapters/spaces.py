"""gymnasium's spaces as text: how an observation reads, and how a text becomes an action.

Spaces are told apart by the names of their classes, so that nothing here imports gymnasium.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from roll.envs.base import InvalidAction

MAX_NUMBERS = 64
"""Numbers of an array that is shown; a picture has more."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_LONGEST = 2000  # Characters of an action that numbers are looked for in


def kind_of(space: Any) -> str:
    """Return `Discrete`, `Box`, ...: the name of the space's nearest class of gymnasium."""
    for cls in type(space).__mro__:
        if cls.__module__.startswith("gymnasium."):
            return cls.__name__
    return type(space).__name__


def unreadable(space: Any) -> str:
    """Why an observation of this space has no text of its own; empty: it has."""
    kind = kind_of(space)
    if kind in ("Discrete", "Text"):
        return ""
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        count = 1
        for length in space.shape:
            count *= length
        return "" if count <= MAX_NUMBERS else f"{count} numbers, which is more than {MAX_NUMBERS}"
    if kind in ("Dict", "Tuple"):
        inner = space.spaces.values() if kind == "Dict" else space.spaces
        return next((why for one in inner if (why := unreadable(one))), "")
    return f"a {kind} space"


def as_text(space: Any, value: Any, names: Sequence[str] = ()) -> str:
    """Return an observation as text: numbers with 4 significant digits, one line for each part of a Dict.

    Args:
        names: of the numbers of an array.
    """
    kind = kind_of(space)
    if kind == "Dict":
        return "\n".join(f"{key}: {as_text(inner, value[key])}" for key, inner in space.spaces.items())
    if kind == "Tuple":
        return ", ".join(as_text(inner, part) for inner, part in zip(space.spaces, value, strict=True))
    if kind == "Discrete":
        return str(int(value))
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        return _array(value, names)
    return str(value)


def _array(value: Any, names: Sequence[str]) -> str:
    if getattr(value, "ndim", 0) > 1:
        return "\n".join(_array(row, ()) for row in value)
    numbers = [_number(entry) for entry in value.reshape(-1)]
    if names and len(names) == len(numbers):
        return ", ".join(f"{name} {number}" for name, number in zip(names, numbers, strict=True))
    return " ".join(numbers)


def _number(value: Any) -> str:
    text = f"{float(value):.4g}"
    return "0" if text == "-0" else text


def reader(space: Any) -> Callable[[str], Any] | None:
    """Return what makes an action of a text, and raises `InvalidAction` for one that isn't one. None: there is none for
    this space. Not for `Discrete`, whose actions have names."""
    kind = kind_of(space)
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        return lambda text: _read_array(space, kind, text)
    if kind == "Text":
        return lambda text: _read_text(space, text)
    return None


def drawn(space: Any, rng: random.Random) -> str:
    """Draw an action from the space, as text. Changes the space's own generator."""
    space.seed(rng.randrange(2**31))
    return as_text(space, space.sample())


def how_to_act(space: Any) -> str:
    """Return a sentence for the policy about an action of such a space."""
    kind = kind_of(space)
    if kind == "Box":
        low, high = (" ".join(_number(entry) for entry in bound.reshape(-1)) for bound in (space.low, space.high))
        return f"An action is {_count(space)}, from {low} to {high}."
    if kind == "MultiDiscrete":
        starts = getattr(space, "start", space.nvec * 0).reshape(-1)
        highest = [start + count - 1 for start, count in zip(starts, space.nvec.reshape(-1), strict=True)]
        return (
            f"An action is {_count(space)}, from {' '.join(map(str, starts))} to {' '.join(map(str, highest))}, "
            "without fractions."
        )
    if kind == "MultiBinary":
        return f"An action is {_count(space)}, each 0 or 1."
    return f"An action is a text of {space.min_length} to {space.max_length} characters."


def _count(space: Any) -> str:
    count = 1
    for length in space.shape:
        count *= length
    return "a number" if count == 1 else f"{count} numbers with spaces between them"


def _read_array(space: Any, kind: str, text: str) -> Any:
    import numpy as np

    texts = _NUMBER.findall(text[:_LONGEST])
    wanted = int(np.prod(space.shape))
    if len(texts) != wanted or _NUMBER.sub("", text[:_LONGEST]).strip(" \t\n,;[]()"):
        raise InvalidAction(f"got {text[:60]!r}, expected {_count(space)}. {how_to_act(space)}")
    numbers = np.array([float(number) for number in texts]).reshape(space.shape)
    if kind != "Box" and (numbers != np.round(numbers)).any():
        raise InvalidAction(f"got {text[:60]!r}: {how_to_act(space)}")
    with np.errstate(over="ignore"):
        action = numbers.astype(space.dtype)
    if not space.contains(action):
        raise InvalidAction(f"got {text[:60]!r}, which is out of bounds: {how_to_act(space)}")
    return action


def _read_text(space: Any, text: str) -> str:
    if not space.contains(text):
        raise InvalidAction(f"got {text[:60]!r}: {how_to_act(space)}")
    return text
