"""Environments: values of `custom_envs.<tag>.env_type`."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.catalog.entries import Entry

ENVS: dict[str, Entry] = {
    "sokoban-v1": Entry(path="roll.envs.sokoban:Sokoban"),
    "frozen_lake-v1": Entry(path="roll.envs.frozen_lake:FrozenLake"),
    "countdown-v1": Entry(path="roll.envs.countdown:Countdown"),
    "nim-v1": Entry(path="roll.envs.nim:Nim"),
    "question_answer-v1": Entry(path="roll.envs.question_answer:QuestionAnswer"),
}
"""Classes of `roll.envs.base.Env` by id. A change that alters what a seed plays bumps the version."""


@dataclass(frozen=True, kw_only=True)
class Hub(Entry):
    """A collection of environments in a package of others; `path` is the adapter, which takes any of their ids."""

    package: str
    """What is imported."""
    install: str
    """What pip is asked for."""
    example: str
    """An id, for messages."""


ENV_HUBS: dict[str, Hub] = {
    "gymnasium": Hub(
        path="roll.envs.adapters.gymnasium_env:GymnasiumEnv",
        package="gymnasium",
        install="gymnasium",
        example="gymnasium:CliffWalking-v1",
    ),
    "minigrid": Hub(
        path="roll.envs.adapters.minigrid_env:MiniGridEnv",
        package="minigrid",
        install="minigrid",
        example="minigrid:MiniGrid-DoorKey-5x5-v0",
    ),
    "gem": Hub(
        path="roll.envs.adapters.gem_env:GemEnv",
        package="gem",
        install="gem-llm",
        example="gem:game:GuessTheNumber-v0-easy",
    ),
    "textarena": Hub(
        path="roll.envs.adapters.textarena_env:TextArenaEnv",
        package="textarena",
        install="textarena",
        example="textarena:Wordle-v0",
    ),
    "reasoning_gym": Hub(
        path="roll.envs.adapters.reasoning_gym_env:ReasoningGymEnv",
        package="reasoning_gym",
        install="reasoning-gym",
        example="reasoning_gym:chain_sum",
    ),
    "openenv": Hub(
        path="roll.envs.adapters.openenv_env:OpenEnvEnv",
        package="aiohttp",
        install="aiohttp",
        example="openenv:http://127.0.0.1:8000",
    ),
}
"""Adapters of `roll/envs/adapters` by what stands before the first colon of an `env_type`."""


def hub_of(env_type: str) -> Hub | None:
    """Return the hub that an `env_type` names an environment of; None for bundled ones and classes of the user's
    own."""
    scheme, colon, _ = env_type.partition(":")
    return ENV_HUBS.get(scheme) if colon else None


POLICY, ENDPOINT = "policy", "endpoint"
"""The model that is trained, and one behind a chat service. Others play in the environment's process."""

PLAYERS: dict[str, Entry] = {
    "random": Entry(path="roll.envs.players:RandomPlayer"),
    "solution": Entry(path="roll.envs.players:SolutionPlayer"),
}
"""Classes of `roll.envs.players.Player` by name."""
