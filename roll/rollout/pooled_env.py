"""Environments of a pool, as the episode player sees them."""

from __future__ import annotations

from roll.envs.base import Observation, StepResult
from roll.envs.env_pool import EnvFailed, EnvPool
from roll.rollout.episode import Action, EpisodeError
from roll.types.episode import Task


class PooledEnv:
    """One per episode: the task's tag says which environment, its seed and payload what is played.

    `functools.partial(PooledEnv, pool)` is the player's `make_env`.
    """

    waits_for = "environment"

    def __init__(self, pool: EnvPool, _: Task, name: str) -> None:
        self._pool = pool
        self._name = name

    async def reset(self, task: Task) -> Observation:
        try:
            return await self._pool.reset(self._name, task.tag, task.seed, task.payload)
        except EnvFailed as error:
            raise EpisodeError(error.status, str(error)) from error

    async def step(self, action: Action) -> StepResult:
        try:
            return await self._pool.step(self._name, action.text)
        except EnvFailed as error:
            raise EpisodeError(error.status, str(error)) from error

    async def close(self) -> None:
        await self._pool.close(self._name)
