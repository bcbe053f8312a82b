"""`length`: how long is the response?"""

from __future__ import annotations

import math
from typing import Literal

from roll.rewards.base import Reward
from roll.types.trajectory import FinishReason, Task

Unit = Literal["words", "characters"]


def length(
    response: str,
    task: Task,  # noqa: ARG001 - every reward takes it
    *,
    mode: Literal["target", "overlong", "cosine"] = "target",
    target: int = 0,
    tolerance: int = 0,
    maximum: int = 0,
    buffer: int = 0,
    start: float = 1.0,
    end: float = 0.0,
    unit: Unit = "words",
    finish_reason: FinishReason = "stop",
) -> Reward:
    """Score the length in words (separated by white space) or characters. Part: `length`, that number.

    `target`: 1 within `tolerance` of `target`, from there down to 0 in a straight line over `target`.
    `overlong`: the soft penalty of DAPO (arXiv:2503.14476): 0 up to `maximum - buffer`, down to -1 at `maximum`, -1
    beyond it and for a response that the token limit cut off. `cosine` (arXiv:2502.03373): from `start` at length 0 to
    `end` at `maximum` and beyond, along half a cosine. Tokens are counted by the run's own `overlong_shaping`.
    """
    if unit not in ("words", "characters"):
        raise ValueError(f"length: unit is words or characters, got {unit!r}")
    count = len(response.split()) if unit == "words" else len(response)
    if mode == "target":
        if target < 1 or tolerance < 0:
            raise ValueError(f"length: target must be at least 1 and tolerance 0, got {target} and {tolerance}")
        value = max(0.0, 1.0 - max(0, abs(count - target) - tolerance) / target)
    elif mode == "overlong":
        if not 0 <= buffer < maximum:
            raise ValueError(f"length: overlong needs 0 <= buffer < maximum, got {buffer} and {maximum}")
        over = count - (maximum - buffer)
        value = -float(count > maximum or finish_reason == "length")
        value = value or (-over / buffer if over > 0 else 0.0)
    elif mode == "cosine":
        if maximum < 1:
            raise ValueError(f"length: cosine needs a maximum of at least 1, got {maximum}")
        value = end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * min(1.0, count / maximum)))
    else:
        raise ValueError(f"length: mode is target, overlong or cosine, got {mode!r}")
    return Reward(value, {"length": float(count)})
