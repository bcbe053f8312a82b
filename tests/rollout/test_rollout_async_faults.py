"""What must not go wrong while generation runs on its own: endings, deaths in awkward moments, changed settings."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from dataclasses import replace

import pytest
from fakes import NumberTokenizer, ScriptedRanks, Source, first_prompt, instant, make_tasks

from benchmarks.simulation.engine_model import EngineModel
from benchmarks.simulation.scenario import Scenario, Simulation
from benchmarks.simulation.simulated_engines import SimulatedRanks
from benchmarks.simulation.simulated_episodes import EpisodeModel
from benchmarks.simulation.virtual_clock import VirtualClockLoop
from roll.rollout.agent import Agent
from roll.rollout.async_scheduler import AsyncPlan, AsyncRolloutScheduler, AsyncState, ReadyGroup
from roll.rollout.continuous_driver import ContinuousDriver
from roll.rollout.engine_driver import RolloutStalled
from roll.rollout.episode_envs import RewardEnv
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.routing import Router
from roll.strategies.base import EngineDied, Request, SamplingParams
from roll.types.trajectory import Group, Trajectory, Turn

PLAN = AsyncPlan(
    groups=4, group_size=2, params=SamplingParams(max_new_tokens=50), ratio=1.0, max_prompts=100, last_step=9
)


class Engines(ScriptedRanks):
    """A little work in every poll; an abort takes a moment."""

    aborts = 0
    version = 0

    async def poll(self, rank, budget):
        await asyncio.sleep(0.001)
        completions = await super().poll(rank, 1)
        return [replace(c, versions=(self.version,) * len(c.token_ids)) for c in completions]

    async def abort(self, rank, request_ids):
        self.aborts += len(request_ids)
        await asyncio.sleep(0.01)
        return await super().abort(rank, request_ids)


class Cursor(Source):
    def state_dict(self, unfinished=()):
        return {}


def ahead(ranks, plan=PLAN, timeout=5.0, **options):
    engines = ContinuousDriver(ranks, max_running_requests=64, timeout=timeout)
    agent = Agent(NumberTokenizer(), first_prompt, chat=False)
    score = instant(lambda request: 1.0)
    player = EpisodePlayer(
        engines, agent, lambda task, name: RewardEnv(score, task, name), max_sequence_length=1000, **options
    )
    source = Cursor(make_tasks(100))
    return engines, source, AsyncRolloutScheduler(engines, player, source, plan, seed=1)


def test_closing_leaves_nothing_behind_and_asks_nothing_of_engines_that_are_about_to_end(caplog):
    ranks = Engines(length=lambda request: 10**6)
    engines, _, rollouts = ahead(ranks)

    async def start():
        rollouts._fill()
        await asyncio.sleep(0.05)
        return len(ranks.running[0])

    assert engines.run(start()) == 8
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        engines.close()
        gc.collect()
    assert ranks.aborts == 0
    assert not caplog.records  # e.g. a task that was destroyed while it was pending


def ready(number, version, size=2):
    turn = Turn(
        prompt_ids=(1,), response_ids=(2,), logprobs=(-1.0,), versions=(version,), finish_reason="stop", reward=1.0
    )
    task = make_tasks(100)[number]
    members = [Trajectory(task_id=task.id, member=m, turns=(turn,), reward=1.0) for m in range(size)]
    return ReadyGroup(number, Group(task=task, trajectories=tuple(members)), version)


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ([ready(i, 5) for i in range(16)], 8),  # of a run with larger batches
        ([ready(0, 3), ready(1, 4), ready(2, 5)], 2),  # of one with a larger async_generation_ratio
        ([ready(i, 4) for i in range(6)], 4),
        ([ready(0, 5, size=3), ready(1, 5)], 1),  # of one with larger groups
    ],
)
def test_what_a_run_with_other_settings_had_ready_is_used_once_and_in_time_or_played_again(found, kept):
    ranks = Engines(length=lambda request: 1)
    engines, source, rollouts = ahead(ranks)
    ranks.version = 5
    source.tasks = source.tasks[20:]
    rollouts.restore(AsyncState(version=5, started=20, ready=found))
    assert len(source.returned) == len(found) - kept
    trained = []
    for step in range(6, 10):
        groups = rollouts.collect(step).groups
        assert len(groups) == 4
        assert all(len(group.trajectories) == 2 for group in groups)
        trained += [group.task.id for group in groups]
        ranks.version = step
        rollouts.set_version(step)
    assert len(set(trained)) == 16
    assert set(trained) >= {entry.group.task.id for entry in found}
    engines.close()


def test_nothing_is_played_before_a_step_asks_for_groups():
    ranks = Engines(length=lambda request: 1)
    engines, source, rollouts = ahead(ranks)
    ranks.version = 3
    rollouts.restore(AsyncState(version=3))
    rollouts.set_version(3)  # the sync of a resumed run; its validation may follow before the first step
    assert len(source.tasks) == 100
    assert len(rollouts.collect(4).groups) == 4
    assert rollouts.state().version == 3
    engines.close()


class Faulty:
    """A rollout of the user's which always ends in the same way."""

    def __init__(self, end):
        self.end = end

    async def play(self, episode):
        await episode.generate(await episode.first_prompt())
        self.end()


@pytest.mark.parametrize(
    ("error", "shown", "message"),
    [
        (KeyError("user's bug"), KeyError, "user's bug"),
        (asyncio.CancelledError(), RuntimeError, "train/1/t0#0 was cancelled from within"),
    ],
)
def test_a_rollout_s_bug_that_hits_all_episodes_at_once_ends_the_run_at_once(error, shown, message):
    def end():
        raise error

    engines, _, rollouts = ahead(Engines(), timeout=3.0, rollouts={"numbers": Faulty(end)})
    with pytest.raises(shown, match=message):
        rollouts.collect(1)
    engines.close()


def test_a_rollout_that_holds_up_the_event_loop_is_found_out():
    free = threading.Event()
    engines, _, rollouts = ahead(Engines(), timeout=0.1, rollouts={"numbers": Faulty(lambda: free.wait(20))})
    with pytest.raises(RolloutStalled, match=r"has stood still for 0 s(?s:.*)free\.wait"):
        rollouts.collect(1)
    free.set()
    engines.close()


# --- in virtual time ----------------------------------------------------------------------------------------------


class LeftOver(Simulation):
    """Looks at the engines when a step has its groups."""

    def _count(self, step, collected):
        assert [len(engine.submitted) for engine in self.ranks._engines] == [0] * self.scenario.engines
        assert not self.engines._in_flight
        assert not self.engines._router._siblings
        super()._count(step, collected)


class SlowAborts(SimulatedRanks):
    async def abort(self, rank, request_ids):
        await asyncio.sleep(0.5)
        stopped = await super().abort(rank, request_ids)
        await asyncio.sleep(0.5)
        return stopped


@pytest.mark.parametrize("slots", [4, 64])
def test_engines_have_nothing_left_to_do_when_an_over_sampled_step_has_its_groups(slots):
    scenario = Scenario(
        engines=2, engine=EngineModel(max_running_requests=slots), groups=6, group_size=2, extra_prompts=12, steps=4,
        episode=EpisodeModel(turns=3, env_seconds=2.0),
    )  # fmt: skip
    for seed in range(3):
        simulation = LeftOver(replace(scenario, seed=seed))
        simulation.ranks.__class__ = SlowAborts
        simulation.run()


def test_requests_that_were_never_placed_are_forgotten():
    router = Router(engines=1, capacity=1)
    router.add("first", (0, 0), "taken")
    assert router.place() == ("first", 0)
    for step in range(100):
        for member in range(2):
            router.add(f"{step}#{member}", (step, member), f"prompt {step}")
        for member in range(2):
            router.discard(f"{step}#{member}")
    router.release(0)
    assert router.place() is None
    assert router.place(freed=0) is None
    assert not router._siblings


class LateAborts(SimulatedRanks):
    """An abort of a dead engine fails only after the engine was replaced."""

    async def abort(self, rank, request_ids):
        if self._engines[rank].dead:
            await asyncio.sleep(5.0)
            raise EngineDied("the engine of old")
        return await super().abort(rank, request_ids)


def test_an_abort_that_fails_with_an_engine_s_death_after_its_replacement_does_not_count_as_another_death():
    loop = VirtualClockLoop()
    model = EngineModel(max_running_requests=2, step_seconds=1.0, step_seconds_per_request=0.0)
    ranks = LateAborts(1, model, lambda request: 100, loop=loop)
    engines = ContinuousDriver(
        ranks, max_running_requests=2, timeout=1e6, loop=loop, max_restarts=1,
        is_death=lambda error: isinstance(error, EngineDied), restart=lambda rank: ranks.restart(rank, 1.0),
    )  # fmt: skip

    def request(name):
        return Request(id=name, prompt_ids=(1,), params=SamplingParams(max_new_tokens=200), seed=0)

    async def script():
        given_up = asyncio.ensure_future(engines.generate("a", request("a")))
        wanted = asyncio.ensure_future(engines.generate("b", request("b")))
        await asyncio.sleep(5.3)
        ranks._die(0)
        await engines.abort({"a"})
        completion = await wanted
        given_up.cancel()
        return completion

    assert len(engines.run(script()).token_ids) == 100
    engines.close()
    loop.close()
