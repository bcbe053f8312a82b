"""`weighted`: a sum of named parts, each scored by a reward function of its own."""

from __future__ import annotations

from collections.abc import Mapping

from roll.rewards.base import Reward, explained


def weighted(scores: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward | None:
    """Return the sum of weight times score over the parts of `rewards.<domain>.parts` that score this row.

    Each part is logged under its own name, unweighted; what it names itself follows as `<part>.<its part>`. A part that
    doesn't score the row is left out of its sum, as in TRL; None: no part does. The answer is that of the first part
    with one.
    """
    if not weights:
        raise ValueError("weighted: there are no parts; name them in rewards.<domain>.parts")
    if not scores:
        return None
    inner = {f"{name}.{part}": value for name, score in scores.items() for part, value in score.parts.items()}
    named = {name: score.value for name, score in scores.items()}
    stated = next((score.answer for score in scores.values() if score.answer is not None), None)
    total = sum(weights[name] * value for name, value in named.items())
    why = explained({name: score.explanation for name, score in scores.items()})
    return Reward(total, {**inner, **named}, stated, why)
