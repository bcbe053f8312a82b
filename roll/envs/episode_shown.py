"""One episode as a policy meets it, in plain values: what it is shown, what it says, what that leads to."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from roll.envs.base import Env, Observation
from roll.envs.baselines import random_action
from roll.envs.env_messages import pack_observation, pack_step
from roll.envs.wrappers import EnvSpec, ResponseEnv, parse_actions
from roll.utils.seeding import stable_hash

_MAX_CHARS = 200_000  # Of all observations that are shown


def play_shown(env: Env, spec: EnvSpec, seed: int) -> dict[str, Any]:
    """Play an episode with responses that name actions: those of the solution, else random ones.

    Returns:
        `instructions`; `observation`, the packed first one; `turns`: (response, packed step) each.
    """
    played = ResponseEnv(env, spec)
    first = played.reset(seed, {})
    solution = env.solution(spec.max_steps * spec.max_actions_per_step)
    rng = random.Random(stable_hash("episode shown", seed))

    def responses() -> Iterator[str]:
        yield from (response_for(spec, action) for action in solution or ())
        while True:
            yield response_for(spec, random_action(env, rng))

    return _turns(played, first, responses())


def play_responses(env: Env, spec: EnvSpec, seed: int, responses: Sequence[str]) -> dict[str, Any]:
    """Play recorded responses; returns the same."""
    played = ResponseEnv(env, spec)
    return _turns(played, played.reset(seed, {}), iter(responses))


def _turns(played: ResponseEnv, first: Observation, responses: Iterator[str]) -> dict[str, Any]:
    turns: list[tuple[str, Any]] = []
    size = len(first.text)
    for response in islice(responses, 10_000):
        result = played.step(response)
        turns.append((response, pack_step(result)))
        if result.observation is None:
            break
        size += len(result.observation.text)
        if size > _MAX_CHARS:
            break
    return {"instructions": played.instructions, "observation": pack_observation(first), "turns": turns}


def response_for(spec: EnvSpec, action: str) -> str:
    """Return the shortest response that is read as the action, by the name that a policy has for it; the bare action if
    the pattern doesn't show what that is."""
    names = {target: name for name, target in reversed(spec.action_lookup.items())}
    name = names.get(action, action)
    text, slots = re.subn(r"\(\.[*+]\??\)", "{action}", "(.*)" if spec.action_pattern is None else spec.action_pattern)
    text = re.sub(r"\\(.)", r"\1", text)
    response = text.replace("{action}", name) if slots == 1 else name
    return response if parse_actions(response, spec) == [name.strip()] else name
