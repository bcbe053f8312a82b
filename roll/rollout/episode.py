"""One episode player for every pipeline: RLVR is its one-turn case, and a rollout of the user's another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from roll.envs.base import Observation, StepResult
from roll.rollout.agent import Agent, PromptTooLong
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode_slots import EpisodeSlots
from roll.strategies.base import Completion, Request, SamplingParams
from roll.types.episode import EpisodeError, FinishReason, Status, Task, Trajectory, Turn
from roll.utils import spans
from roll.utils.seeding import stable_hash


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy did: the text of its response, and why it ended."""

    text: str
    finish_reason: FinishReason


class EpisodeEnv(Protocol):
    """An environment as the player sees it: asynchronous, one instance per episode."""

    waits_for: str  # What `step` waits for, in error messages: `reward`, `environment`

    async def reset(self, task: Task) -> Observation:
        """Begin."""

    async def step(self, action: Action) -> StepResult:
        """Apply a response. Raises `EpisodeError` for a failure that isn't the policy's."""

    async def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Names an episode; with the turn it is the key of every random draw in it."""

    seed: int
    purpose: str  # `train`, `val` or `greedy`: the same task sampled for another purpose draws other numbers
    step: int
    position: int  # Place of the task in the step's plan
    member: int

    def name(self, task: Task) -> str:
        """Return the unique name of the episode within a run."""
        return f"{self.group_name(task)}#{self.member}"

    def group_name(self, task: Task) -> str:
        """Return the name that the episodes of one group share."""
        return f"{self.purpose}/{self.step}/{task.id}"

    def request_seed(self, task: Task, turn: int) -> int:
        """Return the 128-bit key of one response."""
        return stable_hash(self.seed, "sample", self.purpose, self.step, task.id, self.member, turn, bits=128)


class Rollout(Protocol):
    """How episodes of a task are played. A class of the user's can take the place of `AgentRollout` for a domain."""

    async def play(self, episode: Episode) -> None:
        """Play one episode by `episode.generate` and `episode.step_env`; concurrent calls share the object."""


class Episode:
    """One episode under way. Tokens are carried: each turn adds to the context, or resets it.

    `task` and `params` say what is played and how tokens are drawn.
    """

    def __init__(
        self,
        engines: EngineDriver,
        agent: Agent,
        env: EpisodeEnv,
        task: Task,
        key: EpisodeKey,
        params: SamplingParams,
        max_sequence_length: int,
    ) -> None:
        self.task = task
        self.params = params
        self._engines = engines
        self._agent = agent
        self._env = env
        self._key = key
        self._name = key.name(task)
        self._max_sequence_length = max_sequence_length
        self._turns: list[Turn] = []
        self._context: tuple[int, ...] = ()  # Of the last response
        self._state = ""
        self._unanswered: Completion | None = None  # The last response, until the environment was asked
        self._parts: dict[str, float] = {}
        self._spans: dict[str, float] = {}
        self._status: Status = "ok"
        self._error = ""
        self._truncated = False
        self._answer: str | None = None
        self.env_stepped = False
        self.trace = ""  # Its name in a recording; empty: there is none

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompts and responses so far, since the context was last reset."""
        return (*self._context, *self._turns[-1].response_ids) if self._turns else ()

    async def reset(self) -> Observation:
        """Begin; what the environment shows first."""
        self._engines.mark_busy(self._name, f"reset of {self._env.waits_for}")
        with spans.span("reset"):
            observation = await self._env.reset(self.task)
        self._state = _state_of(observation)
        return observation

    async def first_prompt(self) -> tuple[int, ...]:
        """Begin; token ids of the task's prompt. Raises `PromptTooLong`, which ends the episode."""
        return self._agent.start(self.task, await self.reset())

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that is put between responses, as it stands: no chat template."""
        return self._agent.encode(text)

    def text(self, completion: Completion) -> str:
        """Return what a response says."""
        return self._agent.decode_response(completion.token_ids, self.params.stop_strings)

    async def generate(self, prompt_ids: Sequence[int], *, reset_context: bool = False, **changes: Any) -> Completion:
        """Return one response to everything so far plus `prompt_ids`, which may be empty.

        Args:
            prompt_ids: tokens to add first; the policy isn't trained on them.
            reset_context: drop everything so far, for this turn and those after it; they become a row of their own.
            changes: fields of `SamplingParams` that differ from the run's, e.g. `max_new_tokens=32`.
        """
        turn_number, prompt = len(self._turns), tuple(prompt_ids)
        context = prompt if reset_context else (*self.tokens, *prompt)
        room = self._max_sequence_length - len(context)
        if room < 1:
            turn = f"turn {turn_number} has {len(context)} tokens of context"
            raise EpisodeError(
                "truncated", f"{turn} and no room to respond: sequence_length is {self._max_sequence_length}"
            )
        params = replace(self.params, **changes) if changes else self.params
        request = Request(
            id=f"{self._name}/{turn_number}",
            prompt_ids=context,
            params=params if params.max_new_tokens <= room else replace(params, max_new_tokens=room),
            seed=self._key.request_seed(self.task, turn_number),
            order=(self._key.position, self._key.member, turn_number),
            affinity=self._key.group_name(self.task),
        )
        with self._span("generate", turn=turn_number, prompt_tokens=len(context)):
            completion, fire_tokens = await self._completed(request, first=not self._turns)
            _describe(completion)
        self._turns.append(
            Turn(
                prompt_ids=prompt,
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                finish_reason=completion.finish_reason,
                resets_context=reset_context,
                state=self._state,
                num_fire_tokens=fire_tokens,
            )
        )
        self._context, self._unanswered = context, completion
        if completion.finish_reason == "abort":
            raise EpisodeError("aborted", "stopped by the scheduler")
        return completion

    async def _completed(self, request: Request, *, first: bool) -> tuple[Completion, int]:
        """Return the response, and how many of its tokens were drawn by the rule of the first token."""
        rule, params = request.params.fire, replace(request.params, fire=None)
        if rule is None or not first:
            return await self._engines.generate(self._name, replace(request, params=params)), 0
        hot = replace(params, max_new_tokens=1, temperature=rule.temperature, top_k=rule.top_k, top_p=1.0)
        seed = stable_hash(request.seed, "fire", bits=128)
        first_token = await self._engines.generate(
            self._name, replace(request, id=f"{request.id}/first", params=hot, seed=seed)
        )
        if first_token.finish_reason != "length" or params.max_new_tokens == 1:
            return replace(first_token, id=request.id), len(first_token.token_ids)
        context = (*request.prompt_ids, *first_token.token_ids)
        params = replace(params, max_new_tokens=params.max_new_tokens - 1)
        rest = await self._engines.generate(self._name, replace(request, prompt_ids=context, params=params))
        whole = replace(
            rest,
            token_ids=(*first_token.token_ids, *rest.token_ids),
            logprobs=(*first_token.logprobs, *rest.logprobs),
            versions=(*first_token.versions, *rest.versions),
            steps=first_token.steps + rest.steps,
        )
        return whole, len(first_token.token_ids)

    async def step_env(self, text: str | None = None) -> StepResult:
        """Give a response to the environment, or in RLVR to the reward function; null: what the last one says."""
        completion = self._unanswered
        assert completion is not None, "step_env() comes after generate()"
        self._engines.mark_busy(self._name, self._env.waits_for)
        with self._span(self._env.waits_for, turn=len(self._turns) - 1):
            action = Action(self.text(completion) if text is None else text, completion.finish_reason)
            result = await self._env.step(action)
            spans.annotate(reward=float(result.reward), ended=result.terminated or result.truncated)
        shown = ""
        if result.observation is not None:
            shown, self._state = result.observation.text, _state_of(result.observation)
        self._turns[-1] = replace(
            self._turns[-1], observation=shown, reward=result.reward, metrics=dict(result.metrics)
        )
        for part, value in result.reward_parts.items():
            self._parts[part] = self._parts.get(part, 0.0) + value
        self._truncated, self._answer = result.truncated, result.answer
        self._unanswered, self.env_stepped = None, True
        return result

    def truncate(self) -> None:
        """Note that the episode was stopped before its end."""
        self._truncated = True

    def fail(self, status: Status, error: str) -> None:
        """Note that it failed."""
        self._status, self._error = status, error

    def finished(self) -> Trajectory:
        """Return what was played."""
        return Trajectory(
            task_id=self.task.id,
            member=self._key.member,
            turns=tuple(self._turns),
            reward=sum(turn.reward for turn in self._turns),
            reward_parts=self._parts,
            status="truncated" if self._status == "ok" and self._truncated else self._status,
            error=self._error,
            answer=self._answer,
            spans=self._spans,
            trace=self.trace,
        )

    @contextlib.contextmanager
    def _span(self, name: str, **attributes: Any) -> Iterator[None]:
        """Add the seconds of a block to `spans`."""
        begun = time.monotonic()
        try:
            with spans.span(name, **attributes):
                yield
        finally:
            self._spans[name] = self._spans.get(name, 0.0) + time.monotonic() - begun


def _describe(completion: Completion) -> None:
    """Say of the open span what came, without its text."""
    versions = completion.versions or (-1,)
    spans.annotate(
        request=completion.id,
        tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        weight_version_first=min(versions),
        weight_version_last=max(versions),
    )


def _state_of(observation: Observation) -> str:
    """Return a short name for what is shown."""
    shown = observation.state or observation.text
    return f"{stable_hash('state', shown):016x}" if shown else ""


class AgentRollout:
    """The usual rollout: the agent answers the environment turn by turn."""

    def __init__(self, agent: Agent, max_turns: int = 1) -> None:
        self._agent = agent
        self._max_turns = max_turns

    async def play(self, episode: Episode) -> None:
        prompt = await episode.first_prompt()
        for _ in range(self._max_turns):
            completion = await episode.generate(prompt)
            result = await episode.step_env()
            if result.terminated or result.truncated or result.observation is None:
                return
            prompt = self._agent.reply(result.observation, completion.token_ids)
        episode.truncate()


class EpisodePlayer:
    """Plays episodes through the engines.

    Args:
        make_env: a fresh environment for a task and an episode's name.
        rollouts: by domain, what plays its episodes instead of the agent alone.
        max_episodes: that are played at once, others wait for their end; None: no limit.
        keep: says of an episode that ended well why it isn't trained on, which makes it `filtered`; None: keeps all.
        traced_share: share of the episodes that a recording has, by a hash of their names.
    """

    def __init__(
        self,
        engines: EngineDriver,
        agent: Agent,
        make_env: Callable[[Task, str], EpisodeEnv],
        *,
        max_sequence_length: int,
        max_turns: int = 1,
        rollouts: Mapping[str, Rollout] | None = None,
        max_episodes: int | None = None,
        keep: Callable[[Task, Trajectory], str | None] | None = None,
        traced_share: float = 1.0,
    ) -> None:
        self._engines = engines
        self._slots = None if max_episodes is None else EpisodeSlots(engines, max_episodes)
        self._agent = agent
        self._make_env = make_env
        self._max_sequence_length = max_sequence_length
        self._usual = AgentRollout(agent, max_turns)
        self._rollouts = dict(rollouts or {})
        self._keep = keep
        self._traced_share = traced_share

    async def play(self, task: Task, key: EpisodeKey, params: SamplingParams) -> Trajectory:
        """Play one episode. Never raises for what goes wrong inside it: that is the trajectory's status.

        The engines are told what it waits for, so that a stall can be explained. An exception of a user's rollout ends
        the run with its name: it is a bug, not an outcome.
        """
        name = key.name(task)
        with self._traced(name, task, key):
            async with contextlib.nullcontext() if self._slots is None else self._slots.acquire(name):
                return await self._play(name, task, key, params)

    async def _play(self, name: str, task: Task, key: EpisodeKey, params: SamplingParams) -> Trajectory:
        rollout, env = self._rollouts.get(task.domain, self._usual), self._make_env(task, name)
        episode = Episode(self._engines, self._agent, env, task, key, params, self._max_sequence_length)
        if spans.is_kept() and (context := spans.current_context()) is not None:
            episode.trace = context.traceparent
        try:
            await rollout.play(episode)
            kind = type(rollout).__name__
            assert episode.env_stepped, f"{kind}.play() ended without episode.step_env(): no reward is not 0"
        except EpisodeError as error:
            episode.fail(error.status, str(error))
        except PromptTooLong as error:
            episode.fail("truncated", str(error))
        finally:
            await env.close()
        played = episode.finished()
        why = self._keep(task, played) if self._keep is not None and played.trainable else None
        if why is not None:
            played = replace(played, status="filtered", error=why)
        spans.annotate(status=played.status, reward=float(played.reward), turns=len(played.turns))
        return played

    def _traced(self, name: str, task: Task, key: EpisodeKey) -> contextlib.AbstractContextManager[Any]:
        """Record an episode as a trace of its own."""
        if not spans.is_recording():
            return contextlib.nullcontext()
        kept = self._traced_share >= 1 or stable_hash("traced", key.seed, name, bits=32) < self._traced_share * 2**32
        about: dict[str, Any] = {"purpose": key.purpose, "step": key.step, "task": task.id, "member": key.member}
        return spans.trace("episode", kept=kept, episode=name, domain=task.domain, **about)
