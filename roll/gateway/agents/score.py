"""What an episode was worth: from what an agent returned, printed, posted or exited with to checked numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from roll.rewards.base import Reward, RewardOutputError, as_reward

_KEYS = ("reward", "parts", "role_rewards", "answer", "success")


class ScoreError(ValueError):
    """What an agent gave as its score is none; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScore:
    """The checked score of an episode."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    success: float | None = None
    """1 or 0; None: nobody said."""


def score_of(value: Any, what: str) -> EpisodeScore:
    """Return a number, or a mapping with `reward` and perhaps `parts`, `role_rewards`, `answer` and `success`, as a
    score. `what` names it in messages. Raises `ScoreError`."""
    if isinstance(value, Mapping):
        unknown = sorted(str(key) for key in value if key not in _KEYS)
        if unknown:
            raise ScoreError(f"{what} has {', '.join(unknown)[:200]}; known are {', '.join(_KEYS)}")
        if value.get("reward") is None:
            raise ScoreError(f"{what} has no reward")
        answer = value.get("answer")
        if not (answer is None or isinstance(answer, str)):
            raise ScoreError(f"{what} has an answer of type {type(answer).__name__}, expected a text")
        main = _checked(value["reward"], value.get("parts") or {}, what, answer)
        roles = _checked(0.0, value.get("role_rewards") or {}, what)
        success = value.get("success")
        if success not in (None, 0, 1):
            raise ScoreError(f"{what} has success = {success!r:.80}, expected true or false")
        return EpisodeScore(
            reward=main.value,
            parts=main.parts,
            role_rewards=roles.parts,
            answer=main.answer,
            success=None if success is None else float(success),
        )
    return EpisodeScore(reward=_checked(value, {}, what).value)


def _checked(value: Any, parts: Any, what: str, answer: str | None = None) -> Reward:
    if not isinstance(value, Real):
        hint = "; a text is scored by a reward function, `score: reward`" if isinstance(value, str) else ""
        raise ScoreError(f"{what} is {value!r:.80}, expected a number, or an object with a reward{hint}")
    try:
        return as_reward(Reward(value, parts, answer), what)  # type: ignore[arg-type]
    except (RewardOutputError, OverflowError) as error:
        raise ScoreError(str(error).removeprefix("reward function ")) from None


def last_json(lines: Sequence[str]) -> Any:
    """Return the last line that is a number or an object in JSON. Raises `ScoreError`."""
    for line in reversed(lines):
        text = line.strip()
        if not text or text[0] not in "{-0123456789NI":
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, (int, float, dict)):
            return value
    raise ScoreError('it printed no line of JSON such as {"reward": 1.0}')
