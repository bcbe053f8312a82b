"""What an environment process and its parent tell each other: tuples of plain values.

`roll/isolation/processes/frames.py` says how they travel.

A request is `("open", instance, tag, seed, options, responses)`, `("step", instance, response)` or
`("close", instance)`; options are pickled. `open` with responses is a replay: its answer is the last one's. An answer
is `("ok", result)`, `("error", text)` or `("closed", resident megabytes, error)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from roll.envs.base import Message, Observation, StepResult

MAX_CHARS = 1_000_000
"""Of an observation."""

PackedObservation = tuple[tuple[tuple[str, str], ...], str, str]
PackedStep = tuple[float, bool, bool, "PackedObservation | None", dict[str, float], dict[str, float], dict[str, float]]
Packed = tuple[Any, ...]  # One of the two above: what the last call of an episode gave


class PlainStep(NamedTuple):
    """A step's result in plain floats and bools, and dicts that nobody else has."""

    reward: float
    terminated: bool
    truncated: bool
    observation: Observation | None
    reward_parts: dict[str, float]
    metrics: dict[str, float]
    role_rewards: dict[str, float]


def pack_observation(observation: Observation) -> PackedObservation:
    """As plain values. The wrappers have checked its types."""
    state, role = str(observation.state), str(observation.role)
    messages, texts = [], [state, role]
    for message in observation.messages:
        messages.append(packed := (str(message.role), str(message.content)))
        texts += packed
    _check_texts(texts)
    return tuple(messages), state, role


def _check_texts(texts: Sequence[str]) -> None:
    """Refuse what no tokenizer takes and no context holds, before it costs more than its own episode."""
    size = sum(map(len, texts))
    if size > MAX_CHARS:
        raise ValueError(f"the observation has {size:,} characters, expected at most {MAX_CHARS:,}")
    try:
        for text in texts:
            if not text.isascii():
                text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the observation isn't valid Unicode: {error}; decode bytes with errors='replace'") from None


def unpack_observation(packed: Packed) -> Observation:
    """Undo `pack_observation`."""
    messages, state, role = cast(PackedObservation, packed)
    shown = tuple([Message(speaker, content) for speaker, content in messages])  # type: ignore[arg-type]
    return Observation(shown, state, role)


def pack_step(result: StepResult) -> PackedStep:
    """As plain values."""
    observation = None if result.observation is None else pack_observation(result.observation)
    parts, metrics, role_rewards = dict(result.reward_parts), dict(result.metrics), dict(result.role_rewards)
    return result.reward, result.terminated, result.truncated, observation, parts, metrics, role_rewards


def pack_plain_step(result: PlainStep) -> PackedStep:
    """As plain values, which all but the observation are already."""
    reward, terminated, truncated, observation, parts, metrics, role_rewards = result
    packed = None if observation is None else pack_observation(observation)
    return reward, terminated, truncated, packed, parts, metrics, role_rewards


def unpack_step(packed: Packed) -> StepResult:
    """Undo `pack_step`."""
    reward, terminated, truncated, observation, parts, metrics, role_rewards = cast(PackedStep, packed)
    return StepResult(
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        observation=None if observation is None else unpack_observation(observation),
        reward_parts=parts,
        metrics=metrics,
        role_rewards=role_rewards,
    )


def is_packed(value: object, *, step: bool) -> bool:
    """Return whether this is a packed observation, or a packed step: what runs in a process can write to its pipe
    too."""
    if not step:
        return _is_observation(value)
    if type(value) is not tuple or len(value) != 7:
        return False
    reward, terminated, truncated, observation, parts, metrics, role_rewards = value
    if type(reward) is not float or type(terminated) is not bool or type(truncated) is not bool:
        return False
    shows = observation is None if terminated or truncated else _is_observation(observation)
    return shows and _are_numbers(parts) and _are_numbers(metrics) and _are_numbers(role_rewards)


def _is_observation(value: object) -> bool:
    if type(value) is not tuple or len(value) != 3:
        return False
    messages, state, role = value
    if type(state) is not str or type(role) is not str or type(messages) is not tuple or not messages:
        return False
    for pair in messages:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) is not str:
            return False
    return True


def _are_numbers(named: object) -> bool:
    if type(named) is not dict:
        return False
    for name, number in named.items():  # noqa: SIM110 - `all` takes twice as long
        if type(name) is not str or type(number) is not float:
            return False
    return True


def is_over(packed: Packed) -> bool:
    """Return whether this ended the episode."""
    return _is_step(packed) and bool(packed[1] or packed[2])


def _is_step(packed: Packed) -> bool:
    return isinstance(packed[0], float)


def difference(before: Packed, again: Packed) -> str:
    """Return what a replay showed otherwise than the first time; empty: nothing."""
    if len(before) != len(again):
        return "a step that is a reset"  # pragma: no cover - our own bug
    if not _is_step(before):
        return _unlike("observation", before[0], again[0]) or _unlike("role", before[2], again[2])
    pairs = (
        ("reward", before[0], again[0]),
        ("end", before[1:3], again[1:3]),
        ("observation", before[3], again[3]),
        ("role_rewards", before[6], again[6]),
    )
    return next((first for name, old, new in pairs if (first := _unlike(name, old, new))), "")


def _unlike(name: str, before: Any, again: Any) -> str:
    return "" if before == again else f"{name} {_shown(before)}, then {_shown(again)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:60]}...{text[-60:]}"
