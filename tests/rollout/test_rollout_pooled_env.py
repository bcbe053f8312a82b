"""A pool's environments behind the player's interface."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from roll.envs.env_pool import EnvPool
from roll.envs.wrappers import EnvSpec
from roll.rollout.episode_envs import PooledEnv
from roll.rollout.episode_key import Action
from roll.types.trajectory import EpisodeError, Task

FAULTY = Path(__file__).parents[1] / "envs" / "envs_faulty.py"


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    spec = EnvSpec(tag="count", env_type=f"{FAULTY}:Counter", action_pattern=None)
    with EnvPool({"count": spec}, timeout_s=0.5) as pool:
        yield pool


def task(seed: int, **payload: object) -> Task:
    return Task(id=f"t{seed}", source="counter", payload=payload, seed=seed, tag="count", domain="count")


def test_a_task_is_played_to_its_end(pool: EnvPool) -> None:
    async def play() -> list[str | float | bool]:
        env = partial(PooledEnv, pool)(task(40), "train/1/t40#0")
        first = await env.reset(task(40))
        added = await env.step(Action("add 2", "stop"))
        done = await env.step(Action("done", "stop"))
        await env.close()
        await env.close()
        return [first.text, added.reward, done.terminated, done.metrics["success"]]

    assert asyncio.run(play()) == ["total 40", 42.0, True, 1.0]


@pytest.mark.parametrize(("response", "status"), [("raise on purpose", "env_error"), ("hang", "timeout")])
def test_a_failure_is_an_episode_error_with_its_status(pool: EnvPool, response: str, status: str) -> None:
    async def play() -> None:
        env = PooledEnv(pool, task(1), f"{response}#0")
        try:
            await env.reset(task(1))
            await env.step(Action(response, "stop"))
        finally:
            await env.close()

    with pytest.raises(EpisodeError, match="count.*#0") as failed:
        asyncio.run(play())
    assert failed.value.status == status


def test_a_reset_that_fails_is_an_episode_error(pool: EnvPool) -> None:
    async def play() -> None:
        env = PooledEnv(pool, task(1), "r#0")
        try:
            await env.reset(task(1, on_reset="raise at once"))
        finally:
            await env.close()

    with pytest.raises(EpisodeError, match="IndexError: deliberate: at once"):
        asyncio.run(play())
