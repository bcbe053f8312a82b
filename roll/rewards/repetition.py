"""`repetition`: a penalty for saying the same again."""

from __future__ import annotations

from typing import Literal

from roll.rewards.base import Reward
from roll.types.trajectory import Task

MAX_CHARS = 1_000_000


def repetition(
    response: str,
    task: Task,  # noqa: ARG001 - every reward takes it
    *,
    n: int = 3,
    max_penalty: float = -1.0,
    unit: Literal["words", "characters"] = "words",
) -> Reward:
    """Return `max_penalty` times the share of n-grams that occurred before (arXiv:2502.03373); 0 when there are none.

    Words are compared without case. Use `characters` for languages that don't separate words. Part: `repeated`, that
    share.
    """
    if n < 1 or unit not in ("words", "characters") or max_penalty > 0:
        raise ValueError(
            "repetition: n is at least 1, unit words or characters, max_penalty at most 0; "
            f"got {n}, {unit!r}, {max_penalty}"
        )
    text = response[:MAX_CHARS].lower()
    pieces = text.split() if unit == "words" else list("".join(text.split()))
    total = len(pieces) - n + 1
    if total < 1:
        return Reward(0.0, {"repeated": 0.0})
    different = len({hash(tuple(pieces[i : i + n])) for i in range(total)})
    repeated = 1.0 - different / total
    return Reward(max_penalty * repeated, {"repeated": repeated})
