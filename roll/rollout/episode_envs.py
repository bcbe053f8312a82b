"""Environments as the episode player sees them: a reward function's, and those of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from roll.data.messages import as_chat
from roll.envs.base import Message, Observation, StepResult
from roll.envs.env_pool import EnvPool
from roll.rewards.base import RewardRequest, RewardResult
from roll.rollout.episode_key import Action
from roll.types.trajectory import EpisodeError, Task

SubmitReward = Callable[[RewardRequest], "Future[RewardResult]"]
"""Queues one response for scoring; the future always gets a result, a failed reward function included."""


def row_messages(task: Task) -> tuple[Message, ...]:
    """Return the conversation that a dataset row begins with."""
    messages = task.payload.get("messages")
    if messages is None:
        return (Message("user", str(task.payload.get("prompt", ""))),)
    return as_chat(messages)


def check_scored(result: RewardResult) -> None:
    """Raise `EpisodeError` for a result without a reward: its function failed, or doesn't score this row."""
    if result.status == "unscored":
        raise EpisodeError("unscored", result.error)
    if result.reward is None:
        raise EpisodeError("reward_error", f"{result.status} after {result.attempts} attempts: {result.error}")


class RewardEnv:
    """RLVR's: hands over the prompt, takes one response, asks a reward function. `name` is the id of the request."""

    waits_for = "reward"

    def __init__(self, submit: SubmitReward, task: Task, name: str) -> None:
        self._submit = submit
        self._task = task
        self._name = name

    async def reset(self, task: Task) -> Observation:
        return Observation(row_messages(task))

    async def step(self, action: Action) -> StepResult:
        request = RewardRequest(
            id=self._name,
            domain=self._task.domain,
            response=action.text,
            task=replace(self._task, opens_thought=True) if action.opens_thought else self._task,
            finish_reason=action.finish_reason,
            completion_ids=action.completion_ids(),
            completion_text=action.completion_text() if action.messages else None,
            messages=action.messages,
            step=action.step,
        )
        result = await asyncio.wrap_future(self._submit(request))
        check_scored(result)
        assert result.reward is not None
        # Whoever takes a single response knows that one without an end was the episode's last word.
        return StepResult(
            reward=result.reward.value,
            terminated=True,
            truncated=action.finish_reason == "length",
            reward_parts=result.reward.parts,
            answer=result.reward.answer,
            explanation=result.reward.explanation,
        )

    async def close(self) -> None:
        pass


class PooledEnv:
    """One episode's of a pool: the task's tag says which environment, its seed and payload what is played."""

    waits_for = "environment"

    def __init__(self, pool: EnvPool, _: Task, name: str) -> None:
        self._pool = pool
        self._name = name

    async def reset(self, task: Task) -> Observation:
        return await self._pool.reset(self._name, task.tag, task.seed, task.payload)

    async def step(self, action: Action) -> StepResult:
        return await self._pool.step(self._name, action.text)

    async def close(self) -> None:
        await self._pool.close(self._name)


class NoEnv:
    """That of an episode whose rollout scores it itself, by `Episode.finish`."""

    waits_for = "agent"

    async def reset(self, task: Task) -> Observation:
        raise AssertionError(f"{task.id} has no environment to reset")

    async def step(self, action: Action) -> StepResult:
        raise AssertionError(f"there is no environment that takes {action.text!r:.80}")

    async def close(self) -> None:
        pass
