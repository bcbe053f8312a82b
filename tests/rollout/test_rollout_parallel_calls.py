"""Episodes with several calls under way: turns that branch, calls that are given up, under both drivers."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from fakes import NumberTokenizer, ScriptedRanks, Source, first_prompt, instant, make_plan, make_tasks

from roll.rollout.agent import Agent
from roll.rollout.continuous_driver import ContinuousDriver
from roll.rollout.episode_envs import RewardEnv
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.lockstep_driver import LockstepDriver
from roll.rollout.scheduler import RolloutScheduler
from roll.strategies.base import Completion
from roll.types.trajectory import EpisodeError


class Counting(ScriptedRanks):
    """Says its context's length and a number of its own; a prompt that ends with n takes 10 n decode steps, one that
    ends with 9 for ever."""

    def __init__(self, **options):
        steps = [10.0 * n + 1 for n in range(9)] + [math.inf]
        super().__init__(length=lambda request: steps[request.prompt_ids[-1] % 10], **options)
        self.aborted: list[str] = []

    async def poll(self, rank, budget):
        await asyncio.sleep(0)
        return await super().poll(rank, min(budget, 4))

    async def abort(self, rank, request_ids):
        self.aborted += request_ids
        return await super().abort(rank, [i for i in request_ids if i in self.running[rank]])

    @staticmethod
    def _completion(request, length, reason):
        number = int(request.id.rsplit("/", 1)[1])
        tokens = (len(request.prompt_ids), 100 + number)
        return Completion(
            id=request.id, token_ids=tokens, logprobs=(-1.0, -2.0), versions=(0, 0), finish_reason=reason, steps=length
        )


@pytest.fixture(params=["lockstep", "continuous"])
def engines(request):
    ranks = Counting()
    if request.param == "lockstep":
        driver = LockstepDriver(ranks, round_steps=4, timeout=5.0)
    else:
        driver = ContinuousDriver(ranks, max_running_requests=8, timeout=5.0, poll_budget=4)
    yield driver, ranks
    driver.close()


def played(engines, rollout, *, groups=1, group_size=1):
    driver, _ = engines
    player = EpisodePlayer(
        driver,
        Agent(NumberTokenizer(), first_prompt, chat=False),
        lambda task, name: RewardEnv(instant(lambda request: 2.0), task, name),
        max_sequence_length=100,
        rollouts={"numbers": rollout},
    )
    plan = make_plan(groups=groups, group_size=group_size, min_survivors=0)
    collected = RolloutScheduler(driver, player, seed=1).collect(Source(make_tasks(groups)), plan)
    return [trajectory for group in collected.groups for trajectory in group.trajectories]


class Fork:
    """One turn, continued three times at once, the first of them once more; then another agent with its own prompt."""

    async def play(self, episode):
        root = await episode.generate((1, 10))
        at = episode.number_of(root)
        slow, quick, _ = await asyncio.gather(*(episode.generate((n,), after=at, role=f"r{n}") for n in (3, 1, 2)))
        assert episode.tokens_of(episode.number_of(quick)) == (1, 10, 2, 100, 1, *quick.token_ids)
        await episode.generate((5,), after=episode.number_of(slow))
        await episode.generate((6,), reset_context=True)
        episode.count("agent/calls", 6)
        episode.finish(1.5, parts={"won": 1.0}, answer="42")
        episode.finish(2.5, parts={"won": 2.0})


def test_turns_are_stored_depth_first_whoever_answered_first(engines):
    (trajectory,) = played(engines, Fork())
    assert [turn.prompt_ids for turn in trajectory.turns] == [(1, 10), (3,), (5,), (1,), (2,), (6,)]
    assert [turn.response_ids[-1] for turn in trajectory.turns] == [100, 101, 104, 102, 103, 105]
    assert [turn.after for turn in trajectory.turns] == [None, None, None, 0, 0, None]
    assert [turn.resets_context for turn in trajectory.turns] == [False] * 5 + [True]
    assert [turn.role for turn in trajectory.turns] == ["", "r3", "", "r1", "r2", ""]
    # What the engine was shown: the branch alone.
    assert [turn.response_ids[0] for turn in trajectory.turns] == [2, 5, 8, 5, 5, 1]
    assert trajectory.branches == ((0, 1, 2), (0, 3), (0, 4), (5,))
    assert (trajectory.reward, dict(trajectory.reward_parts), trajectory.answer) == (2.5, {"won": 2.0}, "42")
    assert trajectory.counts == {"agent/calls": 6.0}


class Keeping:
    """One turn, which is read, answered and paid."""

    def __init__(self):
        self.completions = []

    async def play(self, episode):
        self.completions.append(await episode.generate((1, 10)))
        await episode.step_env(episode.text(self.completions[0]))
        episode.answered(0, "well done")
        episode.finish(1.0, success=1.0)


def test_a_turn_has_the_columns_of_its_response_and_no_copies(engines):
    keeping = Keeping()
    (trajectory,) = played(engines, keeping)
    (turn,), (completion,) = trajectory.turns, keeping.completions
    assert (turn.reward, turn.observation, dict(turn.metrics)) == (2.0, "well done", {"success": 1.0})
    assert turn.response_ids == completion.token_ids == (2, 100) and turn.logprobs == (-1.0, -2.0)
    for mine, theirs in (("response_ids", "token_ids"), ("logprobs", "logprobs"), ("versions", "versions")):
        assert np.shares_memory(turn.array(mine), completion.array(theirs))


class Disconnects:
    """A client goes away in the middle of a long response, then asks again, and again for something else."""

    async def play(self, episode):
        await episode.generate((1, 10))
        call = asyncio.ensure_future(episode.generate((9,)))
        await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        kept, lost = (
            asyncio.ensure_future(episode.generate((2,))),
            asyncio.ensure_future(episode.generate((9,), after=0)),
        )
        await asyncio.sleep(0)
        lost.cancel()
        await kept
        await episode.step_env()


def test_a_call_that_is_cancelled_leaves_no_turn_and_stops_its_request(engines):
    trajectories = played(engines, Disconnects(), groups=2, group_size=2)
    for trajectory in trajectories:
        assert trajectory.status == "ok"
        assert [turn.prompt_ids for turn in trajectory.turns] == [(1, 10), (2,)]
    _, ranks = engines
    assert not any(ranks.running), "an engine goes on with what nobody waits for"


class Ends:
    """Ends while calls are under way; a late one comes."""

    def __init__(self):
        self.outcomes = []

    async def play(self, episode):
        async def call(prompt):
            try:
                await episode.generate(prompt, reset_context=True)
            except EpisodeError as error:
                self.outcomes.append((error.status, str(error)))

        async def late():
            for _ in range(10):
                await asyncio.sleep(0)
            await call((1,))

        await episode.generate((1, 10))
        self.calls = [asyncio.ensure_future(call(prompt)) for prompt in ((9,), (9, 9))] + [
            asyncio.ensure_future(late())
        ]
        await asyncio.sleep(0)
        episode.finish(1.0)


def test_an_episode_that_ends_gives_up_its_calls_and_takes_no_others(engines):
    rollout = Ends()

    class Waits:
        """Another episode, so that engines go on."""

        async def play(self, episode):
            if episode.task.id == "t0":
                return await rollout.play(episode)
            await asyncio.sleep(0.1)
            await episode.generate((1, 8))
            await episode.step_env()
            return None

    first, second = played(engines, Waits(), groups=2)
    assert [turn.response_ids[-1] for turn in first.turns] == [100] and first.status == second.status == "ok"
    assert [status for status, _ in rollout.outcomes] == ["aborted"] * 3
    assert all("is over" in message for _, message in rollout.outcomes)
    assert not any(engines[1].running)


class Works:
    """One agent asks a tool, then the environment, while the other waits for tokens."""

    async def play(self, episode):
        async def scout():
            await episode.generate((4,), after=0)

        async def actor():
            answer = await episode.generate((1,), after=0)
            with episode.busy("tool"):
                await asyncio.sleep(0.001)
            await episode.step_env(turn=episode.number_of(answer))

        await episode.generate((1, 10))
        await asyncio.gather(scout(), actor())


def test_an_environment_may_be_asked_while_calls_are_under_way(engines):
    (trajectory,) = played(engines, Works())
    assert trajectory.status == "ok" and trajectory.reward == 2.0
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([((1,), {"after": 3})], "after=3: there is no turn of that number"),
        ([((1,), {"after": 0, "reset_context": True})], "begins a context, and after=0 continues one"),
    ],
)
def test_a_turn_that_is_not_there_cannot_be_continued(engines, calls, message):
    class Wrong:
        async def play(self, episode):
            await episode.generate((1, 10))
            for prompt, keys in calls:
                with pytest.raises(ValueError, match=message):
                    await episode.generate(prompt, **keys)
            pending = asyncio.ensure_future(episode.generate((3,), reset_context=True))
            await pending
            await episode.step_env()

    assert played(engines, Wrong())[0].status == "ok"


def test_two_first_calls_at_once_have_to_say_where_they_begin(engines):
    class Both:
        async def play(self, episode):
            first = asyncio.ensure_future(episode.generate((1, 13)))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match=r"none yet.*reset_context=True or after="):
                await episode.generate((2,))
            await first
            await episode.step_env()

    assert played(engines, Both())[0].status == "ok"


def test_a_score_has_to_be_finite_and_to_pay_every_role(engines):
    class Scored:
        async def play(self, episode):
            await episode.generate((1, 10), role="guard")
            with pytest.raises(ValueError, match="isn't finite: won=nan"):
                episode.finish(1.0, parts={"won": math.nan})
            with pytest.raises(ValueError, match=r"no reward for the roles \['guard'\]"):
                episode.finish(1.0, role_rewards={"thief": 1.0})
            episode.finish(0.0, role_rewards={"guard": 1.0, "thief": -1.0})

    (trajectory,) = played(engines, Scored())
    assert trajectory.role_rewards == {"guard": 1.0, "thief": -1.0}


def test_agents_that_ask_one_after_the_other_play_the_same_in_every_run():
    def run():
        engines = LockstepDriver(Counting(), round_steps=4, timeout=5.0), None
        return played(engines, Fork(), groups=3, group_size=2)

    assert [t.turns for t in run()] == [t.turns for t in run()]
