"""Groups with members to spare, and a bound on the groups that are played at once."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from fakes import NumberTokenizer, ScriptedRanks, Source, first_prompt, make_plan, make_scheduler, make_tasks
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.envs.base import Message, Observation, StepResult
from roll.rollout import episode_groups as groups
from roll.rollout.agent import Agent
from roll.rollout.async_scheduler import AsyncPlan, AsyncRolloutScheduler, AsyncState, ReadyGroup
from roll.rollout.continuous_driver import ContinuousDriver
from roll.rollout.episode_groups import REPLACED, AllEpisodesFailed, FilterBudgetExhausted
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.scheduler import RolloutScheduler
from roll.strategies.base import SamplingParams
from roll.types.trajectory import EpisodeError, Group, Trajectory, Turn
from roll.utils.seeding import stable_hash


def member(request):
    """Of its episode; request ids are train/1/t0#2/0."""
    return int(request.id.split("#")[1].split("/")[0])


def number(request):
    return int(request.id.split("/t")[1].split("#")[0])


class World:
    """What all environments of a test share: how they behave, and which are open."""

    def __init__(self, *, turns=1, fails=(), hangs=(), jitter=None, close_seconds=0.0):
        self.turns = turns
        self.fails = set(fails)
        self.hangs = set(hangs)
        self.jitter = jitter
        self.close_seconds = close_seconds
        self.open: set[str] = set()
        self.ended: set[str] = set()
        self.most_groups = 0

    def __call__(self, task, name):
        return WorldEnv(self, f"{task.id}{name[name.index('#') :]}")

    async def wait(self, *key):
        """A few turns of the event loop, other ones for every call and every `jitter`."""
        if self.jitter is not None:
            for _ in range(stable_hash(self.jitter, *key) % 7):
                await asyncio.sleep(0)


class WorldEnv:
    waits_for = "environment"

    def __init__(self, world, name):
        self.world, self.name, self.turn = world, name, 0
        world.open.add(name)
        world.most_groups = max(world.most_groups, len({name.split("#")[0] for name in world.open}))

    async def reset(self, task):
        await self.world.wait(self.name, "reset")
        return Observation((Message("user", "5"),))

    async def step(self, action):
        self.turn += 1
        await self.world.wait(self.name, "step", self.turn)
        if self.name in self.world.hangs:
            await asyncio.Event().wait()
        if self.name in self.world.fails:
            raise EpisodeError("env_error", f"{self.name} is broken")
        over = self.turn == self.world.turns
        return StepResult(reward=1.0, terminated=over, observation=None if over else Observation.of("6"))

    async def close(self):
        await self.world.wait(self.name, "close")
        if self.world.close_seconds:
            await asyncio.sleep(self.world.close_seconds)
        self.world.open.remove(self.name)  # once
        self.world.ended.add(self.name)


def members(collected):
    return [[t.member for t in group.trajectories] for group in collected.groups]


def ids(collected):
    return [group.task.id for group in collected.groups]


# --- lockstep engines ---------------------------------------------------------------------------------------------


def test_the_first_members_that_end_make_the_group_and_the_others_are_stopped():
    # Rounds are of 4 steps: members 0..4 end in rounds 3, 1, 2, never, 2. Two are needed besides member 1: both of
    # round 2, so member 0 isn't waited for.
    ranks = ScriptedRanks(length=lambda request: (12, 3, 8, 10**6, 7)[member(request)])
    world = World()
    collected = make_scheduler(ranks, make_env=world).collect(
        Source(make_tasks(3)), make_plan(groups=2, group_size=3, redundancy=2)
    )
    assert members(collected) == [[1, 2, 4], [1, 2, 4]]
    assert all(t.status == "ok" for group in collected.groups for t in group.trajectories)
    metrics = collected.metrics.result()
    assert metrics["rollout/surplus_episodes"] == 4
    assert not {name for name in metrics if "failed" in name or "aborted" in name}
    assert not any(ranks.running)
    assert not world.open
    assert len(world.ended) == 10


def test_who_ends_in_the_deciding_round_without_being_needed_is_surplus_too():
    collected = make_scheduler(ScriptedRanks()).collect(
        Source(make_tasks(2)), make_plan(groups=2, group_size=2, redundancy=3)
    )
    assert members(collected) == [[0, 1], [0, 1]]
    assert collected.metrics.result()["rollout/surplus_episodes"] == 6


def test_an_earlier_round_counts_more_than_an_earlier_member():
    ranks = ScriptedRanks(length=lambda request: (8, 8, 3)[member(request)])
    collected = make_scheduler(ranks).collect(Source(make_tasks(1)), make_plan(groups=1, group_size=2, redundancy=1))
    assert members(collected) == [[0, 2]]


def test_a_failed_member_is_replaced_and_counted():
    world = World(fails={"t0#0", "t1#1", "t1#2"})
    told = []
    collected = make_scheduler(
        ScriptedRanks(), make_env=world, on_drop=lambda group, reason: told.append((group, reason))
    ).collect(Source(make_tasks(2)), make_plan(groups=2, group_size=2, redundancy=2, min_survivors=2))
    assert members(collected) == [[1, 2], [0, 3]]
    assert {(group.task.id, tuple(t.member for t in group.trajectories), reason) for group, reason in told} == {
        ("t0", (0,), REPLACED),
        ("t1", (1, 2), REPLACED),
    }
    metrics = collected.metrics.result()
    assert metrics["rollout/failed_env_error"] == 3
    assert metrics["rollout/surplus_episodes"] == 1


def test_if_too_few_end_well_all_are_in_the_group_and_min_survivors_decides():
    world = World(fails={"t0#0", "t0#1", "t0#3", "t1#0", "t1#3"})
    dropped = []
    collected = make_scheduler(
        ScriptedRanks(), make_env=world, on_drop=lambda group, reason: dropped.append((group.task.id, reason))
    ).collect(Source(make_tasks(9)), make_plan(groups=2, group_size=3, redundancy=1, min_survivors=2))
    assert dropped == [("t0", "fewer than 2 usable responses")]
    assert ids(collected) == ["t1", "t2"]
    assert members(collected) == [[0, 1, 2, 3], [0, 1, 2]]
    assert [t.member for t in collected.groups[0].survivors] == [1, 2]
    assert collected.metrics.result()["rollout/failed_env_error"] == 5


def test_what_ends_a_run_is_told_without_the_traceback_of_what_failed():
    failure = "t0: KeyError: 'x' (my.py:3, in f)\nTraceback (most recent call last):\n  File ...\nKeyError: 'x'"
    assert groups._without_traceback(failure) == "t0: KeyError: 'x' (my.py:3, in f)"


def test_when_whole_groups_fail_and_nothing_else_the_run_ends_before_its_budget():
    everything = {f"t{task}#{member}" for task in range(99) for member in range(2)}
    plan = make_plan(groups=2, group_size=2, min_survivors=2, max_prompts=99)
    with pytest.raises(AllEpisodesFailed, match=r"step 1: each of the 1[6-9] episodes .* failed, the first, t0#0: .*"):
        make_scheduler(ScriptedRanks(), make_env=World(fails=everything)).collect(Source(make_tasks(99)), plan)
    # One that ends well, and the others may be bad luck.
    most = World(fails=everything - {"t1#1"})
    with pytest.raises(FilterBudgetExhausted, match="started 99 prompts"):
        make_scheduler(ScriptedRanks(), make_env=most).collect(Source(make_tasks(99)), plan)


def test_filter_and_budget_see_groups_of_the_right_size():
    seen = []

    def keep(group):
        seen.append(len(group.trajectories))
        return "filtered: no"

    with pytest.raises(FilterBudgetExhausted, match="started 6 prompts"):
        make_scheduler(ScriptedRanks(), keep=keep).collect(
            Source(make_tasks(99)), make_plan(groups=2, group_size=2, redundancy=2, max_prompts=6)
        )
    assert seen == [2] * 6


def test_without_redundancy_the_whole_group_is_waited_for():
    ranks = ScriptedRanks(length=lambda request: 40 if member(request) == 1 else 3)
    collected = make_scheduler(ranks).collect(Source(make_tasks(2)), make_plan(groups=2, group_size=2))
    assert members(collected) == [[0, 1], [0, 1]]
    assert "rollout/surplus_episodes" not in collected.metrics.result()


@st.composite
def setups(draw):
    """A plan with everything at once: redundancy, over-sampling, a bound, a filter, failures, several turns."""
    key = draw(st.integers(0, 10**6))
    groups = draw(st.integers(1, 5))
    return {
        "key": key,
        "turns": draw(st.integers(1, 3)),
        "plan": make_plan(
            groups=groups,
            group_size=draw(st.integers(1, 3)),
            redundancy=draw(st.integers(0, 3)),
            extra_prompts=draw(st.integers(0, 3)),
            max_open_groups=draw(st.sampled_from([None, 1, 2, 4])),
            max_prompts=200,
        ),
        "fails": {f"t{i}#{m}" for i in range(60) for m in range(6) if stable_hash(key, "fail", i, m) % 5 == 0},
    }


def play(setup, jitter):
    ranks = ScriptedRanks(2, length=lambda request: 1 + stable_hash(setup["key"], request.id) % 15)
    world = World(turns=setup["turns"], fails=setup["fails"], jitter=jitter)
    source = Source(make_tasks(60))
    scheduler = make_scheduler(
        ranks, make_env=world, max_turns=5, keep=lambda g: "no" if stable_hash(g.task.id) % 4 == 0 else None
    )
    collected = scheduler.collect(source, setup["plan"])
    assert not world.open
    assert not any(ranks.running)
    return collected, ranks.batches, source, world


@settings(max_examples=60, deadline=None)
@given(setup=setups(), jitters=st.tuples(st.integers(0, 99), st.integers(100, 199)))
def test_on_lockstep_engines_nothing_depends_on_who_is_faster_within_a_round(setup, jitters):
    (one, batches, source, world), (two, batches_of_two, source_of_two, _) = (play(setup, j) for j in jitters)
    plan = setup["plan"]
    assert one.metrics.result() == two.metrics.result()
    assert batches == batches_of_two
    assert (source.taken, source.returned) == (source_of_two.taken, source_of_two.returned)
    assert [(g.task.id, members(one)[i]) for i, g in enumerate(one.groups)] == [
        (g.task.id, members(two)[i]) for i, g in enumerate(two.groups)
    ]
    assert len(one.groups) == plan.groups
    for group in one.groups:
        assert len(group.survivors) <= plan.group_size
        assert len(group.trajectories) == plan.group_size or (
            len(group.trajectories) == plan.group_size + plan.redundancy and len(group.survivors) < plan.group_size
        )
    assert world.most_groups <= (plan.max_open_groups or math.inf)


@pytest.mark.parametrize(("bound", "most"), [(1, 1), (3, 3), (8, 6), (None, 6)])
def test_only_so_many_groups_are_played_at_once(bound, most):
    world = World(jitter=1)
    ranks = ScriptedRanks(length=lambda request: 1 + 5 * (number(request) % 3))
    source = Source(make_tasks(20))
    collected = make_scheduler(ranks, make_env=world).collect(source, make_plan(groups=6, max_open_groups=bound))
    assert world.most_groups == most
    assert ids(collected) == [f"t{i}" for i in range(6)]
    assert source.taken == ids(collected)


def test_the_next_group_starts_when_one_is_complete_not_when_all_are():
    # t0 takes 10 rounds, the others one each: with two at once they all pass by beside it.
    ranks = ScriptedRanks(length=lambda request: 40 if number(request) == 0 else 4)
    make_scheduler(ranks).collect(Source(make_tasks(9)), make_plan(groups=6, group_size=1, max_open_groups=2))
    assert [[request_id.split("/")[2] for request_id in batch] for batch in ranks.batches] == [
        ["t0#0", "t1#0"], ["t2#0"], ["t3#0"], ["t4#0"], ["t5#0"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "taken", "returned"),
    [
        (None, ["t0", "t1", "t2", "t3", "t4", "t5"], ["t4", "t5"]),
        (3, ["t0", "t1", "t2", "t3", "t4", "t5"], ["t4", "t5"]),  # t3 with two to spare
        (2, ["t0", "t1", "t2", "t3"], []),  # the last two are all that are needed
    ],
)
def test_extra_prompts_are_played_within_the_bound(bound, taken, returned):
    source = Source(make_tasks(20))
    ranks = ScriptedRanks(length=lambda request: 4 if number(request) < 4 else 400)
    collected = make_scheduler(ranks).collect(source, make_plan(groups=4, extra_prompts=2, max_open_groups=bound))
    assert ids(collected) == ["t0", "t1", "t2", "t3"]
    assert source.taken == taken
    assert source.returned == returned


def test_a_source_that_ends_is_noticed_within_the_bound():
    collected = make_scheduler(ScriptedRanks()).collect(Source(make_tasks(3)), make_plan(groups=5, max_open_groups=2))
    assert collected.exhausted
    assert ids(collected) == ["t0", "t1", "t2"]


# --- engines that compute on their own ----------------------------------------------------------------------------


class Ranks(ScriptedRanks):
    """A little work in every poll, with weights of `version`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.aborted = []
        self.version = 0

    async def poll(self, rank, budget):
        await asyncio.sleep(0.001)
        return [replace(c, versions=(self.version,) * len(c.token_ids)) for c in await super().poll(rank, 1)]

    async def abort(self, rank, request_ids):
        self.aborted += request_ids
        await asyncio.sleep(0.002)
        return await super().abort(rank, [i for i in request_ids if i in self.running[rank]])


@pytest.fixture
def make_driver():
    drivers = []

    def build(ranks, world):
        engines = ContinuousDriver(ranks, max_running_requests=100, timeout=5.0)
        drivers.append(engines)
        agent = Agent(NumberTokenizer(), first_prompt, chat=False)
        return engines, EpisodePlayer(engines, agent, world, max_sequence_length=1000, max_turns=5)

    yield build
    for driver in drivers:
        driver.close()


def test_engines_that_run_on_their_own_are_told_to_stop_the_surplus(make_driver):
    ranks = Ranks(length=lambda request: 10**6 if member(request) in (1, 3) else 2)
    world = World(turns=2)
    engines, player = make_driver(ranks, world)
    collected = RolloutScheduler(engines, player, seed=1).collect(
        Source(make_tasks(9)), make_plan(groups=4, group_size=2, redundancy=2, max_open_groups=2)
    )
    assert members(collected) == [[0, 2]] * 4
    assert collected.metrics.result()["rollout/surplus_episodes"] == 8
    assert {request_id.split("#")[1] for request_id in ranks.aborted} == {"1/0", "3/0"}
    assert len(ranks.aborted) == 8
    assert not any(ranks.running)
    assert not world.open


def test_environments_of_the_surplus_may_take_their_time_to_close(make_driver):
    world = World(close_seconds=0.02)
    engines, player = make_driver(
        Ranks(length=lambda request: 10**6 if member(request) == 0 else 1 + 5 * number(request)), world
    )
    collected = RolloutScheduler(engines, player, seed=1).collect(
        Source(make_tasks(2)), make_plan(groups=2, group_size=1, redundancy=1)
    )
    assert members(collected) == [[1], [1]]
    assert len(world.ended) == 4


def test_a_member_whose_environment_hangs_does_not_hold_up_its_group(make_driver):
    world = World(hangs={"t0#0", "t1#2"}, fails={"t0#1"})
    engines, player = make_driver(Ranks(), world)
    collected = RolloutScheduler(engines, player, seed=1).collect(
        Source(make_tasks(9)), make_plan(groups=2, group_size=2, redundancy=2)
    )
    assert members(collected)[0] == [2, 3]
    assert 2 not in members(collected)[1]
    assert not world.open


TURN = Turn(prompt_ids=(1,), response_ids=(2,), logprobs=(-1.0,), versions=(0,), finish_reason="stop", reward=1.0)


def trajectory(task, number_in_group, status):
    return Trajectory(task_id=task.id, member=number_in_group, turns=(TURN,), reward=1.0, status=status)


def ahead_plan(**options):
    options = {"groups": 4, "group_size": 2, "ratio": 1.0, "max_prompts": 100, "last_step": 4, **options}
    return AsyncPlan(params=SamplingParams(max_new_tokens=50), **options)


class Cursor(Source):
    def state_dict(self, unfinished=()):
        return {"unfinished": [task.id for task in unfinished]}


def ahead(make_driver, ranks, world, plan, tasks=99, **options):
    engines, player = make_driver(ranks, world)
    source = Cursor(make_tasks(tasks))
    return source, AsyncRolloutScheduler(engines, player, source, plan, seed=1, **options)


@pytest.mark.parametrize("bound", [None, 1, 3])
def test_generation_ahead_takes_the_first_members_and_keeps_to_the_bound(make_driver, bound):
    ranks = Ranks(length=lambda request: 10**6 if member(request) == 1 else 1 + number(request) % 4)
    world = World(fails={"t2#0"})
    source, rollouts = ahead(make_driver, ranks, world, ahead_plan(redundancy=2, max_open_groups=bound))
    trained, metrics = [], {}
    for step in range(1, 5):
        collected = rollouts.collect(step)
        assert len(collected.groups) == 4
        trained += collected.groups
        for name, value in collected.metrics.result().items():
            metrics[name] = metrics.get(name, 0) + value
        ranks.version = step
        rollouts.set_version(step)
    assert len({group.task.id for group in trained}) == len(source.taken) == 16
    assert all([t.member for t in g.trajectories] == [0, 2] for g in trained if g.task.id != "t2")
    assert [[t.member for t in g.trajectories] for g in trained if g.task.id == "t2"] == [[2, 3]]
    assert metrics["rollout/failed_env_error"] == 1
    assert metrics["rollout/surplus_episodes"] == 15 * 2 + 1
    rollouts.stop()
    assert not world.open
    assert not source.returned


def test_ahead_no_more_groups_are_in_flight_than_the_bound(make_driver):
    in_flight = []

    class Watching(Ranks):
        async def submit(self, rank, requests):
            await super().submit(rank, requests)
            in_flight.append(len({number(request) for request, _ in self.running[rank].values()}))

    plan = ahead_plan(groups=6, ratio=2.0, max_open_groups=3)
    ranks = Watching(length=lambda request: 1 + number(request) % 5)
    _, rollouts = ahead(make_driver, ranks, World(), plan)
    for step in range(1, 5):
        assert len(rollouts.collect(step).groups) == 6
        ranks.version = step
        rollouts.set_version(step)
    assert max(in_flight) == 3


def test_ahead_a_member_whose_environment_hangs_is_ended_with_its_group(make_driver):
    world = World(hangs={f"t{i}#0" for i in range(99)})
    engines, player = make_driver(Ranks(), world)
    plan = ahead_plan(redundancy=1, last_step=1)
    rollouts = AsyncRolloutScheduler(engines, player, Cursor(make_tasks(99)), plan, seed=1)
    assert members(rollouts.collect(1)) == [[1, 2]] * 4
    engines.run(asyncio.sleep(0.05))
    assert not world.open
    assert not engines._busy


def test_ahead_a_failed_stop_of_the_surplus_ends_the_run(make_driver):
    class Failing(Ranks):
        async def abort(self, rank, request_ids):
            raise OSError("no answer")

    ranks = Failing(length=lambda request: 10**6 if member(request) == 2 or number(request) > 2 else 1)
    _, rollouts = ahead(make_driver, ranks, World(), ahead_plan(redundancy=1))
    with pytest.raises(OSError, match="no answer"):
        rollouts.collect(1)


def test_what_was_ready_before_a_resume_fits_if_this_plan_could_have_given_it(make_driver):
    (task,) = make_tasks(1)

    def fits(ok, failed, **plan):
        statuses = ["ok"] * ok + ["env_error"] * failed
        trajectories = [trajectory(task, m, status) for m, status in enumerate(statuses)]
        return ahead_plan(**plan).fits(Group(task=task, trajectories=tuple(trajectories)))

    assert fits(2, 0)
    assert fits(1, 1)
    assert not fits(3, 0)
    assert fits(3, 0, group_size=3, redundancy=2)
    assert fits(2, 3, group_size=3, redundancy=2)
    assert not fits(4, 1, group_size=3, redundancy=2)
    assert not fits(4, 0, group_size=3, redundancy=2)
    source, rollouts = ahead(make_driver, Ranks(), World(), ahead_plan())
    too_large = Group(task=task, trajectories=tuple(trajectory(task, m, "ok") for m in range(3)))
    rollouts.restore(AsyncState(started=1, ready=[ReadyGroup(0, too_large, 0)]))
    assert source.returned == ["t0"]
