"""Episodes that an agent from elsewhere plays: it calls the policy as often as it likes, and is scored at its end.

    play --order--> runner --> the agent --HTTP--> gateway --> EpisodeSession --> episode.generate
         <--how it ended, and its score--

What goes wrong with an agent is a status of its episode and never a reward.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from roll.configs.schema.agents_config import AgentEnv
from roll.gateway.agents.agent_endpoint import RunEndpoint
from roll.gateway.agents.logs import AgentLog
from roll.gateway.agents.pool import AgentFailed
from roll.gateway.agents.process import AgentNotStarted
from roll.gateway.agents.remote_agents import RemoteRunner
from roll.gateway.agents.runners import AgentOutcome, Order
from roll.gateway.agents.score import EpisodeScore, ScoreError, last_json, score_of
from roll.gateway.agents.sessions import AgentSession
from roll.gateway.base import RefusedCall
from roll.gateway.registry import new_key
from roll.rewards.base import RewardRequest, RewardResult
from roll.rollout.episode import Episode
from roll.types.trajectory import EpisodeError, Task

logger = logging.getLogger(__name__)

_GRACE_S = 4.0
"""For an agent that asks on though its budget is spent to come to its end by itself."""

_WORDS = 600
"""Characters of an agent's last words in an error."""

_RAISED = "\nTraceback (most recent call last)"
"""In the end of a function that raised; nothing follows its traceback, so that its last line can be found."""

MakeSession = Callable[[Episode], AgentSession]
Slots = Callable[[str], AbstractAsyncContextManager[None]]
SubmitReward = Callable[[RewardRequest], "Future[RewardResult]"]


class EndpointRollout:
    """Plays the episodes of one tag; implements `Rollout`.

    Args:
        make_session: answers the calls of an episode.
        slots: holds back episodes while there are as many agents as may be, by the episode's name.
        log_folder: where what agents print is kept.
        submit_reward: scores final answers, with `score: reward`.
        counters: of what happens to agents, by the names of metrics.
    """

    def __init__(
        self,
        tag: str,
        env: AgentEnv,
        endpoint: RunEndpoint,
        *,
        make_session: MakeSession,
        slots: Slots,
        log_folder: Path,
        submit_reward: SubmitReward | None = None,
        counters: Counter[str],
    ) -> None:
        self._tag = tag
        self._env = env
        self._endpoint = endpoint
        self._runner = endpoint.runners[tag]
        self._make_session = make_session
        self._slots = slots
        self._log_folder = log_folder
        self._submit_reward = submit_reward
        self._counters = counters

    async def play(self, episode: Episode) -> None:
        async with self._slots(episode.name):
            one = _Play(self._env, self._tag, episode, self._make_session(episode), self._submit_reward, self._counters)
            await one.play(self._endpoint, self._log_folder)


class _Play:
    """One episode under way."""

    def __init__(
        self,
        env: AgentEnv,
        tag: str,
        episode: Episode,
        session: AgentSession,
        submit_reward: SubmitReward | None,
        counters: Counter[str],
    ) -> None:
        self._env, self._tag, self._episode, self._session = env, tag, episode, session
        self._submit_reward, self._counters = submit_reward, counters
        self._log = AgentLog()
        self._posted: EpisodeScore | None = None
        self._answer: str | None = None  # As an agent elsewhere states it
        self._failure = ""  # As it admits it
        self._ended: Callable[[], None] = lambda: None

    async def play(self, endpoint: RunEndpoint, log_folder: Path) -> None:
        """Have the agent play, and score the episode."""
        episode, gateway, key = self._episode, await endpoint.started(), new_key()
        url = gateway.open(
            self._session, key, ignore_fields=self._env.ignored_fields, handlers={"score": self._take_score}
        )
        order = Order(
            episode=episode.name,
            task=agent_task(episode.task),
            base_url=endpoint.address_of(url),
            api_key=key,
            timeout_s=self._env.timeout_s,
        )
        runner = endpoint.runners[self._tag]
        if isinstance(runner, RemoteRunner):
            self._ended = lambda: runner.end(episode.name)
        failed = "it was stopped"
        try:
            try:
                outcome = await self._run(runner.run(order, self._log))
            finally:
                gateway.close(key)
                episode.end()
                self._count()
            await self._finish(outcome)
            failed = ""
        except EpisodeError as error:
            failed = str(error)
            raise
        finally:
            self._keep_log(log_folder, failed)

    async def _run(self, running: Awaitable[AgentOutcome]) -> AgentOutcome:
        task = asyncio.ensure_future(running)
        abandoned = asyncio.ensure_future(self._session.abandoned.wait())
        insisted = asyncio.ensure_future(self._session.insists.lasts(_GRACE_S))
        ends = [task, abandoned, insisted]
        try:
            await asyncio.wait(ends, timeout=self._env.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._session.abandoned.is_set():
                raise EpisodeError("aborted", "stopped by the scheduler")
            if task.done():
                return task.result()
            if self._session.spent and (insisted.done() or self._env.truncated_reward is not None):
                waited = (
                    f"asked on for over {_GRACE_S:g} s" if insisted.done() else f"took over {self._env.timeout_s:g} s"
                )
                return AgentOutcome(how=f"no score: it {waited}, and {self._session.spent}", code=None)
            self._counters["agent/timeouts"] += 1
            waited = "for the agent's end"
            if self._env.remote and not self._session.calls:
                waited = "for an agent to ask for this episode (POST /work), or for its first call"
            output = self._last_words()
            raise EpisodeError("timeout", f"waited over {self._env.timeout_s:g} s {waited}{output}")
        except AgentNotStarted as error:
            self._counters["agent/crashes"] += 1
            raise EpisodeError("env_error", str(error)) from None
        except AgentFailed as error:
            return AgentOutcome(how=str(error), code=None)
        except ValueError as error:
            raise EpisodeError("env_error", str(error)) from None
        finally:
            for waiting in ends:
                waiting.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _finish(self, outcome: AgentOutcome) -> None:
        """Score the episode; raises `EpisodeError` where nothing says what it was worth."""
        if not self._session.calls and not self._session.spent:
            self._counters["agent/never_called"] += 1
            if _RAISED in outcome.how:
                raise EpisodeError("env_error", f"the agent raised before the model answered it: {outcome.how}")
            beside = f", but for {count} side_calls" if (count := self._session.side_calls) else ""
            raise EpisodeError(
                "env_error", f"the agent never called the model{beside} ({outcome.how}){self._last_words()}"
            )
        try:
            score = await self._score(outcome)
        except (EpisodeError, ScoreError) as error:
            reward = self._env.truncated_reward
            if self._session.spent and reward is not None and not isinstance(error, _Reward):
                self._episode.finish(reward)
                self._episode.fail("truncated", str(error))  # no failure, but for people to read
                return
            raise error if isinstance(error, EpisodeError) else EpisodeError("env_error", str(error)) from None
        try:
            self._episode.finish(
                score.reward,
                parts=score.parts,
                role_rewards=score.role_rewards,
                answer=score.answer,
                success=score.success,
            )
        except ValueError as error:  # a role without a reward
            raise EpisodeError("env_error", str(error)) from None
        if self._session.spent:
            self._episode.truncate()

    async def _score(self, outcome: AgentOutcome) -> EpisodeScore:
        source = self._env.score_source
        if self._failure:
            raise EpisodeError("env_error", f"the agent says that it failed: {self._failure}")
        if self._session.spent and self._posted is not None:  # however it ended then
            return self._posted
        rewards = self._env.rewards_by_exit_code
        accepted = rewards if source == "exit" else {0: 0.0}
        if outcome.code not in accepted:
            self._counters["agent/crashes"] += not self._session.spent  # that is counted as `agent/spent`
            if _RAISED in outcome.how:
                raise EpisodeError("env_error", f"the agent raised {outcome.how}")
            raise EpisodeError("env_error", f"the agent ended with {outcome.how}{self._last_words()}")
        if source == "exit":
            assert outcome.code is not None
            return EpisodeScore(reward=rewards[outcome.code])
        if source == "reward":
            return await self._rewarded(outcome)
        if source == "output":
            return score_of(last_json(self._log.stdout_lines), "what the agent printed")
        if source == "return":
            if outcome.value is None:
                raise ScoreError("the agent's function returned nothing, and its value is the score (score: return)")
            return score_of(outcome.value, "what the agent's function returned")
        if self._posted is None:
            raise ScoreError(f"the agent ended without posting its score to <base_url>/score{self._last_words()}")
        return self._posted

    async def _rewarded(self, outcome: AgentOutcome) -> EpisodeScore:
        """Return what the reward function gives for the final answer."""
        assert self._submit_reward is not None
        answer, last = outcome.value, self._session.last_answer
        if not isinstance(answer, str):
            answer = self._answer if self._answer is not None else last.content if last is not None else ""
        request = RewardRequest(
            id=self._episode.name, domain=self._tag, response=answer, task=self._episode.task, finish_reason="stop"
        )
        result = await asyncio.wrap_future(self._submit_reward(request))
        if result.status == "unscored":
            raise _Reward("unscored", result.error)
        if result.reward is None:
            raise _Reward("reward_error", f"{result.status} after {result.attempts} attempts: {result.error}")
        return EpisodeScore(reward=result.reward.value, parts=result.reward.parts, answer=result.reward.answer)

    async def _take_score(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer `POST <base_url>/score`. Raises `RefusedCall`."""
        source = self._env.score_source
        if source != "callback" and not (source == "reward" and self._env.remote):
            raise RefusedCall(409, f"the score of this episode comes from elsewhere (score: {source})")
        if self._posted is not None or self._answer is not None or self._failure:
            raise RefusedCall(409, "this episode was scored already; the first score counts")
        if set(body) == {"error"}:
            self._failure = str(body["error"])[:_WORDS] or "it doesn't say why"
        elif source == "reward":
            answer = body.get("answer", "" if self._session.last_answer is None else self._session.last_answer.content)
            if set(body) - {"answer"} or not isinstance(answer, str):
                raise RefusedCall(
                    400, "expected nothing but an answer, a text: a function of the run's gives the reward"
                )
            self._answer = answer
        else:
            try:
                self._posted = score_of(body, "the score")
            except ScoreError as error:
                raise RefusedCall(400, str(error), "reward") from None
        # After the answer to this request, which the end of the episode would cut off.
        asyncio.get_running_loop().call_later(0.05, self._ended)
        return {"ok": True}

    def _count(self) -> None:
        self._counters["agent/episodes"] += 1
        self._counters["agent/calls"] += self._session.calls
        self._counters["agent/spent"] += bool(self._session.spent)
        self._session.count_retokenised()

    def _last_words(self) -> str:
        output = self._log.end(_WORDS)
        return f"; it wrote: {output}" if output else ""

    def _keep_log(self, folder: Path, failed: str) -> None:
        if not self._log.text or not (failed or self._env.logs == "all"):
            return
        file = folder / f"{self._episode.name.replace('..', '_')}.log"
        try:
            self._log.save(file, f"{self._episode.name}: {failed or 'it ended well'}")
        except OSError as error:
            logger.warning("can't keep what an agent printed in %s: %s", file, error)


class _Reward(EpisodeError):
    """The reward function failed: that is nobody's lack of budget."""


def agent_task(task: Task) -> dict[str, Any]:
    """Return a task as agents are told it: the fields of its row, and `id`, `seed` and `tag` where the row has none."""
    return {"id": task.id, "seed": task.seed, "tag": task.tag, **task.payload}
