"""An episode as the policy sees it, message by message: for `roll envs test`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll.envs.messages import Packed, unpack_observation
from roll.envs.wrappers import EnvSpec

MOST_TURNS, MOST_CHARACTERS = 12, 3000


def episode_lines(spec: EnvSpec, played: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (role, text, colour) of every message, and what each response led to.

    `played`: as `roll.envs.episode_shown` gives it. The messages are made by what makes those of a run.
    """
    from roll.rollout.conversation import Conversation  # brings torch, which `roll envs list` needn't wait for

    conversation = Conversation(tag=spec.tag, env=spec, instructions=played["instructions"])
    for message in conversation.system():
        yield message.role, _cut(message.content), "magenta"
    observation: Packed | None = played["observation"]
    for number, (response, (reward, terminated, truncated, following, _, metrics)) in enumerate(played["turns"], 1):
        assert observation is not None, "nothing is played after the end"
        shown = conversation.shown(unpack_observation(observation), number, spec.max_tokens_per_step or 0)
        for message in shown:
            yield message.role, _cut(message.content), "blue"
        yield "assistant", _cut(response), "green"
        counted = ", ".join(f"{name} {value:g}" for name, value in metrics.items() if value and name != "actions")
        end = ", terminated" if terminated else ", truncated" if truncated else ""
        yield f"reward {reward:g}{end}{', ' if counted else ''}{counted}", "", "yellow"
        observation = following
        if number == MOST_TURNS and number < len(played["turns"]):
            yield f"{len(played['turns']) - number} further turns", "", "yellow"
            return


def _cut(text: str) -> str:
    left = len(text) - MOST_CHARACTERS
    return text if left <= 0 else f"{text[:MOST_CHARACTERS]}... ({left:,} further characters)"
