"""An episode as the policy sees it, message by message: for `roll envs test`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from roll.envs.env_messages import Packed, unpack_observation
from roll.envs.wrappers import EnvSpec

MOST_TURNS, MOST_CHARACTERS = 12, 3000


def episode_lines(spec: EnvSpec, played: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (role, text, colour) of every message, and what each response led to.

    `played`: as `roll.envs.episode_shown` gives it. The messages are made by what makes those of a run.
    """
    from roll.rollout.conversation import Conversation  # brings torch, which `roll envs list` needn't wait for

    conversation = Conversation(tag=spec.tag, env=spec, instructions=played["instructions"])
    packed: Packed | None = played["observation"]
    steps: Counter[str] = Counter()  # Of each role; "" where there are none
    for number, (response, step) in enumerate(played["turns"], 1):
        reward, terminated, truncated, following, _, metrics, role_rewards = step
        assert packed is not None, "nothing is played after the end"
        observation = unpack_observation(packed)
        role = observation.role
        whose = f" ({role})" if role else ""
        for message in conversation.system(role) if not steps[role] else ():
            yield f"{message.role}{whose}", _cut(message.content), "magenta"
        steps[role] += 1
        for message in conversation.shown(observation, steps[role], spec.max_tokens_per_step or 0):
            yield f"{message.role}{whose}", _cut(message.content), "blue"
        yield f"assistant{whose}", _cut(response), "green"
        counted = ", ".join(f"{name} {value:g}" for name, value in metrics.items() if value and name != "actions")
        paid = "".join(f", {name} {value:g}" for name, value in role_rewards.items())
        end = ", terminated" if terminated else ", truncated" if truncated else ""
        yield f"reward {reward:g}{paid}{end}{', ' if counted else ''}{counted}", "", "yellow"
        packed = following
        if number == MOST_TURNS and number < len(played["turns"]):
            yield f"{len(played['turns']) - number} further turns", "", "yellow"
            return


def _cut(text: str) -> str:
    left = len(text) - MOST_CHARACTERS
    return text if left <= 0 else f"{text[:MOST_CHARACTERS]}... ({left:,} further characters)"
