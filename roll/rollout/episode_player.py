"""One episode player for every pipeline: RLVR is its one-turn case, and a rollout of the user's another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from roll.rollout.agent import Agent, PromptTooLong
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode import Episode, Rollout
from roll.rollout.episode_key import EpisodeEnv, EpisodeKey
from roll.rollout.episode_slots import EpisodeSlots
from roll.strategies.base import SamplingParams
from roll.tracking import spans
from roll.types.trajectory import EpisodeError, Task, Trajectory
from roll.utils.seeding import stable_hash


class AgentRollout:
    """The usual rollout: the agent answers the environment turn by turn."""

    def __init__(self, agent: Agent, max_turns: int = 1) -> None:
        self._agent = agent
        self._max_turns = max_turns

    async def play(self, episode: Episode) -> None:
        prompt = await episode.first_prompt()
        for _ in range(self._max_turns):
            completion = await episode.generate(prompt, patient=self._max_turns == 1)
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
            assert episode.scored, f"{kind}.play() ended without episode.step_env() or finish(): no reward is not 0"
        except EpisodeError as error:
            episode.fail(error.status, str(error))
        except PromptTooLong as error:
            episode.fail("truncated", str(error))
        finally:
            episode.end()
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
        is_sampled = (
            self._traced_share >= 1 or stable_hash("traced", key.seed, name, bits=32) < self._traced_share * 2**32
        )
        about: dict[str, Any] = {"purpose": key.purpose, "step": key.step, "task": task.id, "member": key.member}
        return spans.trace("episode", kept=is_sampled, episode=name, domain=task.domain, **about)
