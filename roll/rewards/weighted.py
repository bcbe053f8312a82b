"""`weighted`: a sum of named parts, each scored by a reward function of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roll.rewards.base import Reward, explained
from roll.types.episode import FinishReason, Task

Part = tuple[float, Callable[[str, Task, FinishReason], Reward]]
"""A weight, and what scores the part."""


def weighted(
    response: str, task: Task, *, parts: Mapping[str, Part] | None = None, finish_reason: FinishReason = "stop"
) -> Reward:
    """Return the sum of weight times score over the parts; they come from `rewards.<domain>.parts`.

    Each part is logged under its own name, unweighted; what it names itself follows as `<part>.<its part>`. A part that
    raises fails the whole: half of a sum says nothing about the response. The answer is that of the
    first part with one.
    """
    if not parts:
        raise ValueError("weighted: there are no parts; name them in rewards.<domain>.parts")
    scores = {name: function(response, task, finish_reason) for name, (_, function) in parts.items()}
    inner = {f"{name}.{part}": value for name, score in scores.items() for part, value in score.parts.items()}
    named = {name: score.value for name, score in scores.items()}
    stated = next((score.answer for score in scores.values() if score.answer is not None), None)
    total = sum(weight * named[name] for name, (weight, _) in parts.items())
    why = explained({name: score.explanation for name, score in scores.items()})
    return Reward(total, {**inner, **named}, stated, why)
