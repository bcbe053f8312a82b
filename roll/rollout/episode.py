"""One episode player for every pipeline: RLVR is its one-turn case."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from roll.envs.base import Env, Observation, StepResult
from roll.rollout.agent import Agent, PromptTooLong
from roll.rollout.engines import Engines
from roll.strategies.base import Completion, Request, SamplingParams
from roll.types.episode import FinishReason, Status, Task, Trajectory, Turn
from roll.utils.seeding import stable_hash

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy did: the text of its response, and why it ended."""

    text: str
    finish_reason: FinishReason


class EpisodeError(RuntimeError):
    """The infrastructure of an episode failed. Its message ends in the trajectory; its status in the counters."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status: Status = status


class EpisodeEnv(Protocol):
    """An environment as the player sees it: asynchronous, one instance per episode."""

    waits_for: str
    """What `step` waits for, in error messages: `reward`, `environment`."""

    async def reset(self, task: Task) -> Observation:
        """Begin."""

    async def step(self, action: Action) -> StepResult:
        """Apply a response. Raises `EpisodeError` for a failure that isn't the policy's."""

    async def close(self) -> None:
        """Release resources."""


class ThreadedEnv:
    """Runs a plain `Env` in a thread, with a time limit per call."""

    waits_for = "environment"

    def __init__(self, env: Env, timeout: float = 600.0) -> None:
        self._env = env
        self._timeout = timeout

    async def reset(self, task: Task) -> Observation:
        """The environment gets the task's seed and payload."""
        return await self._run(lambda: self._env.reset(task.seed, task.payload))

    async def step(self, action: Action) -> StepResult:
        """The environment gets the text."""
        return await self._run(lambda: self._env.step(action.text))

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.to_thread(call), self._timeout)
        except asyncio.TimeoutError:
            raise EpisodeError("timeout", f"{type(self._env).__name__} took over {self._timeout:g} s") from None
        except Exception as error:
            raise EpisodeError("env_error", f"{type(self._env).__name__}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the environment."""
        self._env.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Names an episode; with the turn it is the key of every random draw in it."""

    seed: int
    purpose: str
    """`train`, `val` or `greedy`: the same task sampled for another purpose draws other numbers."""
    step: int
    position: int
    """Place of the task in the step's plan."""
    member: int

    def name(self, task: Task) -> str:
        """Unique name of the episode within a run."""
        return f"{self.group_name(task)}#{self.member}"

    def group_name(self, task: Task) -> str:
        """Name that the episodes of one group share."""
        return f"{self.purpose}/{self.step}/{task.id}"

    def request_seed(self, task: Task, turn: int) -> int:
        """128-bit key of one response."""
        return stable_hash(self.seed, "sample", self.purpose, self.step, task.id, self.member, turn, bits=128)


class EpisodePlayer:
    """Plays agent against environment through the engines.

    Args:
        engines: where tokens come from.
        agent: text to tokens and back.
        make_env: a fresh environment for a task and an episode's name.
        max_sequence_length: tokens of a whole trajectory.
        max_turns: responses per episode.
    """

    def __init__(
        self,
        engines: Engines,
        agent: Agent,
        make_env: Callable[[Task, str], EpisodeEnv],
        *,
        max_sequence_length: int,
        max_turns: int = 1,
    ) -> None:
        self._engines = engines
        self._agent = agent
        self._make_env = make_env
        self._max_sequence_length = max_sequence_length
        self._max_turns = max_turns

    async def play(self, task: Task, key: EpisodeKey, params: SamplingParams) -> Trajectory:
        """One episode. Never raises for what goes wrong inside it: that is the trajectory's status.

        The engines are told what it waits for, so that a stall can be explained.
        """
        recorder = _Recorder(task, key.member)
        env = self._make_env(task, key.name(task))
        try:
            await self._turns(env, task, key, params, recorder)
        except EpisodeError as error:
            recorder.fail(error.status, str(error))
        except PromptTooLong as error:
            recorder.fail("truncated", str(error))
        finally:
            await env.close()
        return recorder.trajectory()

    async def _turns(
        self,
        env: EpisodeEnv,
        task: Task,
        key: EpisodeKey,
        params: SamplingParams,
        recorder: _Recorder,
    ) -> None:
        name, affinity = key.name(task), key.group_name(task)
        self._engines.busy(name, f"reset of {env.waits_for}")
        prompt = self._agent.start(task, await env.reset(task))
        for turn in range(self._max_turns):
            context = (*recorder.context, *prompt)
            room = self._max_sequence_length - len(context)
            if room < 1:
                recorder.fail("truncated", f"turn {turn} has {len(context)} tokens of context and no room to respond")
                return
            request = Request(
                id=f"{name}/{turn}",
                prompt_ids=context,
                params=replace(params, max_new_tokens=min(params.max_new_tokens, room)),
                seed=key.request_seed(task, turn),
                order=(key.position, key.member, turn),
                affinity=affinity,
            )
            with recorder.span("generate"):
                completion = await self._engines.generate(name, request)
            if completion.finish_reason == "abort":
                recorder.add(prompt, completion, None)
                recorder.fail("aborted", "stopped by the scheduler")
                return
            self._engines.busy(name, env.waits_for)
            with recorder.span(env.waits_for):
                result = await env.step(Action(self._agent.action(completion, params), completion.finish_reason))
            recorder.add(prompt, completion, result)
            if result.terminated or result.truncated or result.observation is None:
                return
            prompt = self._agent.reply(result.observation, completion.token_ids)
        recorder.truncated = True


class _Recorder:
    """Collects the turns of one episode."""

    def __init__(self, task: Task, member: int) -> None:
        self._task = task
        self._member = member
        self._turns: list[Turn] = []
        self._parts: dict[str, float] = {}
        self._spans: dict[str, float] = {}
        self._status: Status = "ok"
        self._error = ""
        self.context: tuple[int, ...] = ()
        self.truncated = False

    def span(self, name: str) -> _Span:
        return _Span(self._spans, name)

    def add(self, prompt: tuple[int, ...], completion: Completion, result: StepResult | None) -> None:
        observation = "" if result is None or result.observation is None else result.observation.messages[-1].content
        self._turns.append(
            Turn(
                prompt_ids=prompt,
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                finish_reason=completion.finish_reason,
                observation=observation,
                reward=0.0 if result is None else result.reward,
                metrics={} if result is None else dict(result.metrics),
            )
        )
        self.context = (*self.context, *prompt, *completion.token_ids)
        if result is not None:
            for part, value in result.reward_parts.items():
                self._parts[part] = self._parts.get(part, 0.0) + value
            self.truncated = result.truncated or completion.finish_reason == "length"

    def fail(self, status: Status, error: str) -> None:
        self._status, self._error = status, error

    def trajectory(self) -> Trajectory:
        status = "truncated" if self._status == "ok" and self.truncated else self._status
        return Trajectory(
            task_id=self._task.id,
            member=self._member,
            turns=tuple(self._turns),
            reward=sum(turn.reward for turn in self._turns),
            reward_parts=self._parts,
            status=status,
            error=self._error,
            spans=self._spans,
        )


class _Span:
    """Adds the wall-clock seconds of a `with` block to a dictionary."""

    def __init__(self, spans: dict[str, float], name: str) -> None:
        self._spans, self._name = spans, name

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._spans[self._name] = self._spans.get(self._name, 0.0) + time.monotonic() - self._start
