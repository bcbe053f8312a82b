"""The driver of engines that compute on their own: threads, deaths, aborts, and what a stall says."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from fakes import NumberTokenizer, ScriptedRanks, Source, first_prompt, instant, make_plan, make_tasks

from roll.rollout.agent import Agent
from roll.rollout.async_scheduler import ReadyGroup
from roll.rollout.buffer import load_groups, save_groups
from roll.rollout.continuous_driver import ContinuousDriver, EngineLost
from roll.rollout.engine_driver import RolloutStalled
from roll.rollout.episode_envs import RewardEnv
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.lockstep_driver import LockstepDriver
from roll.rollout.routing import Router
from roll.rollout.scheduler import RolloutScheduler
from roll.strategies.base import EngineCounters, Request, RequestRefused, SamplingParams
from roll.types.trajectory import Group, Trajectory, Turn


class Death(Exception):
    pass


class Ranks(ScriptedRanks):
    """Engines that work a little in every poll; `fail[rank]` errors come out of the next polls."""

    def __init__(self, world_size=2, **options):
        super().__init__(world_size, **options)
        self.fail = {}
        self.aborted = []
        self.frozen = False

    async def poll(self, rank, budget):
        await asyncio.sleep(0.001)
        if self.fail.get(rank):
            raise self.fail[rank].pop()
        return [] if self.frozen else await super().poll(rank, 1)

    async def abort(self, rank, request_ids):
        self.aborted += request_ids
        return await super().abort(rank, [i for i in request_ids if i in self.running[rank]])


@pytest.fixture
def make_driver():
    drivers = []

    def build(ranks, **options):
        options.setdefault("max_running_requests", 4)
        options.setdefault("timeout", 5.0)
        driver = ContinuousDriver(ranks, is_death=lambda error: isinstance(error, Death), **options)
        drivers.append(driver)
        return driver

    yield build
    for driver in drivers:
        driver.close()
        driver.close()  # a second call does nothing
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout"]


def test_metrics_hold_what_happened_to_engines_since_the_last_call(make_driver):
    driver = make_driver(Ranks(), take_counters=lambda: [EngineCounters(1, 0, 0), EngineCounters(2, 3, 40)])
    assert driver.take_metrics().result() == {
        "rollout/engine_restarts": 0,
        "rollout/reissued_requests": 0,
        "rollout/resumed_responses": 3,
        "rollout/restarted_responses": 3,
        "rollout/discarded_tokens": 40,
    }


def test_a_driver_that_replaces_no_engines_counts_nothing_and_raises_a_death_as_it_is():
    driver = LockstepDriver(Ranks())
    driver.run(driver.wait_all_up())
    assert driver.take_metrics().result() == {}
    with pytest.raises(Death, match="gone"):
        driver.run(driver.mark_dead(0, Death("gone")))
    driver.close()


def scheduler(driver, submit=None, **options):
    submit = submit or instant(lambda request: float(request.id[-1:]))
    agent = Agent(NumberTokenizer(), first_prompt, chat=False)
    player = EpisodePlayer(driver, agent, lambda task, name: RewardEnv(submit, task, name), max_sequence_length=100)
    return RolloutScheduler(driver, player, seed=1, **options)


def test_groups_come_back_whole_and_no_engine_gets_more_than_it_may(make_driver):
    ranks = Ranks(length=lambda request: 1 + int(request.seed % 5))
    collected = scheduler(make_driver(ranks)).collect(Source(make_tasks(10)), make_plan(groups=10, group_size=4))
    assert [group.task.id for group in collected.groups] == [f"t{i}" for i in range(10)]
    assert all(len(group.survivors) == 4 for group in collected.groups)
    assert ranks.most_running <= 8


def test_the_loop_goes_on_while_nobody_waits_for_it(make_driver):
    driver = make_driver(Ranks())
    ticks = []

    async def tick():
        for _ in range(5):
            await asyncio.sleep(0.01)
            ticks.append(threading.current_thread().name)

    async def start():
        return asyncio.get_running_loop().create_task(tick())

    driver.run(start())
    time.sleep(0.3)
    assert ticks == ["rollout"] * 5


def test_a_dead_engine_is_replaced_and_its_requests_are_given_out_again(make_driver):
    ranks = Ranks(length=lambda request: 3)
    ranks.fail[0] = [Death("gone")]
    restarted = []

    async def restart(rank):
        ranks.running[rank].clear()
        restarted.append(rank)

    driver = make_driver(ranks, restart=restart, max_restarts=1)
    collected = scheduler(driver).collect(Source(make_tasks(6)), make_plan(groups=6, group_size=2))
    assert len(collected.groups) == 6
    assert all(len(group.survivors) == 2 for group in collected.groups)
    assert restarted == [0]
    counts = driver.take_metrics().result()
    assert counts["rollout/engine_restarts"] == 1
    assert counts["rollout/reissued_requests"] > 0
    assert driver.take_metrics().result()["rollout/engine_restarts"] == 0
    driver.run(driver.wait_all_up())


def test_another_death_than_the_budget_allows_ends_the_run_and_says_so(make_driver):
    ranks = Ranks(length=lambda request: 50)
    ranks.fail[1] = [Death("second"), Death("first")]

    async def restart(rank):
        ranks.running[rank].clear()

    plan = make_plan(groups=4, group_size=4)
    with pytest.raises(EngineLost, match=r"engine 1 died and was replaced 1 times already.*engine_restarts \(1\)"):
        scheduler(make_driver(ranks, restart=restart, max_restarts=1)).collect(Source(make_tasks(4)), plan)


def test_an_engine_that_cannot_be_replaced_ends_the_run_with_the_cause(make_driver):
    ranks = Ranks()
    ranks.fail[0] = [Death("gone")]

    async def restart(rank):
        raise OSError("no memory")

    driver = make_driver(ranks, restart=restart, max_restarts=3)
    with pytest.raises(EngineLost, match="could not be started again: no memory"):
        scheduler(driver).collect(Source(make_tasks(2)), make_plan(groups=2))
    with pytest.raises(EngineLost):
        driver.run(driver.wait_all_up())


def test_an_error_that_is_no_death_ends_the_run_as_it_is(make_driver):
    ranks = Ranks()
    ranks.fail[0] = [ValueError("bad request")]
    with pytest.raises(ValueError, match="bad request"):
        scheduler(make_driver(ranks)).collect(Source(make_tasks(2)), make_plan(groups=2))


def test_over_sampling_aborts_the_tail_and_puts_its_prompts_back(make_driver):
    ranks = Ranks(length=lambda request: 2 if int(request.id.split("t")[-1].split("#")[0]) < 2 else 10_000)
    source = Source(make_tasks(4))
    plan = make_plan(groups=2, group_size=2, extra_prompts=2)
    collected = scheduler(make_driver(ranks)).collect(source, plan)
    assert [group.task.id for group in collected.groups] == ["t0", "t1"]
    assert source.returned == ["t2", "t3"]
    assert len(ranks.aborted) == 4
    assert not any(ranks.running)


def test_a_stall_says_who_is_waited_for(make_driver):
    ranks = Ranks()
    ranks.frozen = True
    plan = make_plan(groups=3, group_size=4)
    with pytest.raises(RolloutStalled, match=r"no progress for 0 s; requests wait for .*engine 0 \(4\)"):
        scheduler(make_driver(ranks, timeout=0.3)).collect(Source(make_tasks(3)), plan)


def test_the_router_keeps_siblings_together_while_there_is_room():
    router = Router(engines=3, capacity=2)
    for number, group in enumerate("aabbacd"):
        router.add(f"{group}{number}", (number,), group)
    assert [router.place() for _ in range(4)] == [("a0", 0), ("a1", 0), ("b2", 1), ("b3", 1)]
    assert router.place() == ("a4", 2)  # home is full
    router.release(0)
    router.down(2)
    assert router.place() == ("c5", 0)
    assert router.place() is None
    router.up(2)
    assert router.place() == ("d6", 2)


def test_a_slot_that_becomes_free_goes_to_a_request_whose_prefix_the_engine_has():
    router = Router(engines=2, capacity=1)
    for number, group in enumerate("abcbad"):
        router.add(f"{group}{number}", (number,), group)
    assert [router.place() for _ in range(3)] == [("a0", 0), ("b1", 1), None]
    router.release(1)
    assert router.place(freed=1) == ("b3", 1)
    router.release(1)
    assert router.place(freed=1) == ("c2", 1)  # no engine has it
    router.release(1)
    assert router.place(freed=1) == ("d5", 1)
    router.release(1)
    assert router.place(freed=1) == ("a4", 1)  # its home has no room
    router.add("a6", (6,), "a")
    router.release(0)
    assert router.place(freed=0) == ("a6", 0)  # the home that it kept


def test_requests_need_ids_of_their_own(make_driver):
    driver = make_driver(Ranks(length=lambda request: 10_000))
    request = Request(id="same", prompt_ids=(1,), params=SamplingParams(max_new_tokens=3), seed=1)

    async def twice():
        first = asyncio.get_running_loop().create_task(driver.generate("a", request))
        await asyncio.sleep(0.01)
        try:
            await driver.generate("b", request)
        finally:
            first.cancel()

    with pytest.raises(ValueError, match="'same' is already running"):
        driver.run(twice())


def test_ready_groups_survive_the_disk_bit_by_bit(tmp_path):
    (task,) = make_tasks(1)
    turn = Turn(
        prompt_ids=(1, 2),
        response_ids=(3, 4),
        logprobs=(-0.1, -1.0 / 3.0),
        versions=(4, 5),
        finish_reason="stop",
        observation="next",
        reward=0.1,
        metrics={"turns": 1.0},
        resets_context=True,
        state="8c16510882e1ba6b",
    )
    branches = (turn, replace(turn, resets_context=False), replace(turn, resets_context=False, after=0, role="guard"))
    whole = Trajectory(
        task_id="t0",
        member=0,
        turns=branches,
        reward=0.1,
        reward_parts={"a": 0.1},
        role_rewards={"guard": 1 / 3, "": 0.0},
        spans={"x": 1.5},
        counts={"agent/mismatch_edited": 2.0},
    )
    failed = Trajectory(task_id="t0", member=1, turns=(), reward=0.0, status="timeout", error="slow")
    groups = [ReadyGroup(7, Group(task=task, trajectories=(whole, failed)), 4)]
    save_groups(tmp_path / "groups.parquet", groups)
    assert load_groups(tmp_path / "groups.parquet", {"t0": task}.__getitem__) == groups
    save_groups(tmp_path / "none.parquet", [])
    assert load_groups(tmp_path / "none.parquet", {}.__getitem__) == []


class Refusing(Ranks):
    """Says of the request "bad" that it can't be run."""

    @staticmethod
    def _completion(request, length, reason):
        completion = ScriptedRanks._completion(request, length, reason)
        return completion.replace(refused="no such token") if request.id == "bad" else completion


@pytest.mark.parametrize("lockstep", [False, True], ids=["continuous", "lockstep"])
def test_a_request_that_an_engine_refuses_fails_for_who_waits_for_it_and_for_nobody_else(make_driver, lockstep):
    ranks = Refusing(world_size=1)
    driver = LockstepDriver(ranks) if lockstep else make_driver(ranks)

    async def ask(name):
        driver.mark_busy(name, "starting")
        request = Request(id=name, prompt_ids=(7,), params=SamplingParams(max_new_tokens=1), seed=0)
        try:
            return await driver.generate(name, request)
        finally:
            driver.mark_ended(name)

    async def rounds():
        while lockstep:
            await asyncio.sleep(0)
            await driver.wait_idle()
            await driver.advance()

    async def main():
        playing = asyncio.create_task(rounds())
        try:
            return await asyncio.gather(ask("good"), ask("bad"), return_exceptions=True)
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    good, bad = driver.run(main())
    assert good.token_ids == (7,)
    assert isinstance(bad, RequestRefused) and str(bad) == "no such token"
