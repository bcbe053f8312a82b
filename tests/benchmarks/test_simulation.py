"""The real scheduler, driver and player in virtual time: properties over random runs, and the simulator by hand."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from benchmarks.simulation.engine_model import EngineModel, EngineUse, LognormalLengths, ParetoLengths
from benchmarks.simulation.modes import main, with_mode
from benchmarks.simulation.scenario import Scenario, Simulation, simulate
from benchmarks.simulation.simulated_engines import SimulatedRanks
from benchmarks.simulation.simulated_episodes import EpisodeModel
from benchmarks.simulation.virtual_clock import NothingScheduled, VirtualClockLoop
from roll.rollout.episode_groups import AllEpisodesFailed
from roll.strategies.base import EngineDied, Request, SamplingParams

SLOW = EngineModel(max_running_requests=2, step_seconds=1.0, step_seconds_per_request=0.0, prefill_tokens_per_second=10)
"""A token per second and request; ten prompt tokens hold it up for one second."""


def request(name="a", length=10, prompt=10, **options):
    params = SamplingParams(max_new_tokens=length)
    return Request(id=name, prompt_ids=(1,) * prompt, params=params, seed=0, **options)


def play(script, engines=1, model=SLOW, **options):
    """Run `script(ranks, loop)` in virtual time; every response is as long as its limit allows."""
    loop = VirtualClockLoop()
    ranks = SimulatedRanks(engines, model, lambda _request: 10**6, loop=loop, **options)
    try:
        return loop.run_until_complete(script(ranks, loop))
    finally:
        loop.close()


# --- the clock ----------------------------------------------------------------------------------------------------


def test_sleeping_takes_no_real_time_and_wakes_in_order_of_time():
    loop, woken = VirtualClockLoop(), []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        woken.append((loop.time(), seconds))

    async def all_of_them():
        await asyncio.gather(*(sleeper(s) for s in (3600.0, 0.5, 86400.0 * 30)))

    loop.run_until_complete(all_of_them())
    loop.close()
    assert woken == [(0.5, 0.5), (3600.0, 3600.0), (86400.0 * 30, 86400.0 * 30)]


def test_a_deadlock_is_an_error_rather_than_a_wait_without_end():
    loop = VirtualClockLoop()
    with pytest.raises(NothingScheduled, match="every coroutine waits"):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_a_thread_s_work_happens_at_once_and_its_error_arrives():
    loop = VirtualClockLoop()

    async def work():
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 1.0) == 7
        await asyncio.to_thread(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        loop.run_until_complete(work())
    assert loop.time() == 0.0
    loop.close()


# --- the engines, by hand -----------------------------------------------------------------------------------------


def test_a_response_takes_its_prefill_and_a_step_per_token():
    async def script(ranks, loop):
        await ranks.submit(0, [request(length=10)])
        assert await ranks.poll(0, 5.0) == []
        assert loop.time() == 5.0
        (completion,) = await ranks.poll(0, 100.0)
        assert loop.time() == pytest.approx(11.0)  # 10 prompt tokens at 10/s, then 10 steps of 1 s
        assert (len(completion.token_ids), completion.finish_reason) == (10, "length")

    play(script)


def test_a_third_request_waits_for_one_of_two_places_and_delays_the_other_by_its_prefill():
    async def script(ranks, loop):
        await ranks.submit(0, [request("a", 4), request("b", 9), request("c", 3)])
        ends = {}
        while len(ends) < 3:
            for completion in await ranks.poll(0, 100.0):
                ends[completion.id] = loop.time()
        # a and b are read in 2 s; a ends at 6. c is read until 7, so b's fifth step ends at 8, its ninth at 12.
        assert ends == pytest.approx({"a": 6.0, "c": 10.0, "b": 12.0})
        assert ranks.use().most_running == 2
        assert ranks.use().most_submitted == 3

    play(script)


def test_the_more_requests_run_the_longer_a_step():
    model = EngineModel(
        max_running_requests=4, step_seconds=1.0, step_seconds_per_request=0.5, prefill_tokens_per_second=1e12
    )

    async def script(ranks, loop):
        await ranks.submit(0, [request("a", 2), request("b", 6)])
        await ranks.poll(0, 100.0)
        assert loop.time() == pytest.approx(4.0)  # 2 steps of 2 s
        await ranks.poll(0, 100.0)
        assert loop.time() == pytest.approx(10.0)  # and 4 of 1.5 s

    play(script, model=model)


def test_a_sibling_s_prompt_is_read_once_until_the_weights_change():
    async def script(ranks, loop):
        await ranks.submit(0, [request(name, affinity="g", order=(0, i, 0)) for i, name in enumerate("ab")])
        assert (ranks.use().prefill_tokens, ranks.use().cached_tokens) == (10, 10)
        await ranks.poll(0, 100.0)
        assert loop.time() == pytest.approx(11.0)
        await ranks.update_weights(1)
        await ranks.submit(0, [request("c", affinity="g", order=(0, 2, 0))])
        assert ranks.use().prefill_tokens == 20

    play(script)


def test_tokens_before_and_after_new_weights_carry_their_version():
    async def script(ranks, loop):
        await ranks.submit(0, [request(length=10)])
        await asyncio.sleep(5.5)  # 1 s of prefill, 4 tokens and a half
        await ranks.update_weights(1, seconds=20.0)
        assert loop.time() == 25.5
        (completion,) = await ranks.poll(0, 100.0)
        assert completion.versions == (0,) * 4 + (1,) * 6
        # after the pause 14 tokens are read again in 1.4 s; 5.5 steps are left
        assert loop.time() == pytest.approx(25.5 + 1.4 + 5.5)
        assert ranks.use().tokens == 10

    play(script)


def test_restart_throws_the_tokens_away_and_counts_them():
    async def script(ranks, loop):
        await ranks.submit(0, [request(length=10)])
        await asyncio.sleep(5.5)
        await ranks.update_weights(1)
        (completion,) = await ranks.poll(0, 100.0)
        assert completion.versions == (1,) * 10
        assert loop.time() == pytest.approx(5.5 + 1.0 + 10.0)
        assert ranks.use().thrown_away == 4

    play(script, resume=False)


def test_an_abort_keeps_what_was_sampled_and_makes_room():
    async def script(ranks, loop):
        await ranks.submit(0, [request("a"), request("b"), request("c", prompt=20)])
        await asyncio.sleep(6.0)  # 2 s of prefill, 4 tokens
        stopped = await ranks.abort(0, ["a", "c", "unknown"])
        assert [(c.id, len(c.token_ids), c.finish_reason) for c in stopped] == [("a", 4, "abort"), ("c", 0, "abort")]
        await ranks.submit(0, [request("d", length=1, prompt=1)])
        assert [c.id for c in await ranks.poll(0, 100.0)] == ["d"]
        assert loop.time() == pytest.approx(7.1)

    play(script)


def test_a_dead_engine_says_so_in_every_call_and_comes_back_empty():
    async def script(ranks, loop):
        await ranks.submit(0, [request()])
        await ranks.update_weights(3)
        with pytest.raises(EngineDied, match="simulated engine 0"):
            await ranks.poll(0, 100.0)
        assert loop.time() == 5.0
        for call in (ranks.submit(0, [request("b")]), ranks.abort(0, ["a"])):
            with pytest.raises(EngineDied):
                await call
        await ranks.restart(0, 7.0)
        assert loop.time() == 12.0
        await ranks.submit(0, [request("c", length=2)])
        (completion,) = await ranks.poll(0, 100.0)
        assert completion.versions == (3, 3)

    play(script, deaths={0: 5.0})


def test_lengths_have_the_median_and_the_tail_that_was_asked_for():
    # A seed is a hash: spread evenly, instead of drawing.
    seeds = [(i * 2**128) // 999 for i in range(999)]
    draws = [Request(id="", prompt_ids=(), params=SamplingParams(max_new_tokens=1), seed=seed) for seed in seeds]
    lognormal = sorted(map(LognormalLengths(median=600, sigma=1.0), draws))
    assert lognormal[499] == pytest.approx(600, rel=0.01)
    assert lognormal[839] == pytest.approx(600 * math.e, rel=0.02)  # one sigma: 84.1 %
    pareto = sorted(map(ParetoLengths(shortest=100, alpha=2.0), draws))
    assert pareto[0] == 100
    assert pareto[749] == pytest.approx(200, rel=0.01)  # P(length > 2 x shortest) = 1/4


# --- properties of the scheduler ----------------------------------------------------------------------------------


class WatchedRanks(SimulatedRanks):
    """Counts who was given what, and what came back."""

    def watch(self):
        self.given: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.places: dict[str, set[int]] = {}

    async def submit(self, rank, requests):
        await super().submit(rank, requests)
        for entry in requests:
            self.given[entry.id] += 1
            self.places.setdefault(entry.affinity, set()).add(rank)

    async def poll(self, rank, budget):
        completions = await super().poll(rank, budget)
        self.answered.update(completion.id for completion in completions)
        return completions

    async def abort(self, rank, request_ids):
        completions = await super().abort(rank, request_ids)
        self.answered.update(completion.id for completion in completions)
        return completions


def watched(scenario):
    """The outcome, and the engines that watched it."""
    simulation = Simulation(scenario)
    simulation.ranks.__class__ = WatchedRanks
    simulation.ranks.watch()
    return simulation.run(), simulation.ranks


@st.composite
def scenarios(draw, asynchronous=None):
    engines = draw(st.integers(1, 3))
    if asynchronous is None:
        asynchronous = draw(st.booleans())
    group_size = draw(st.integers(1, 3))
    # A failure is a group of one's end, and several in a row with nothing else end a run.
    failure_shares = [0.0, 0.3] if group_size > 1 else [0.0]
    return Scenario(
        engines=engines,
        engine=EngineModel(max_running_requests=draw(st.integers(1, 5)), step_seconds=0.01),
        lengths=LognormalLengths(median=draw(st.sampled_from([1, 50, 400])), sigma=draw(st.sampled_from([0.0, 1.5]))),
        episode=EpisodeModel(
            prompt_tokens=8,
            turns=draw(st.integers(1, 2)),
            env_seconds=draw(st.sampled_from([0.0, 1.0])),
            failure_share=draw(st.sampled_from(failure_shares)),
        ),
        steps=draw(st.integers(1, 4)),
        groups=draw(st.integers(1, 5)),
        group_size=group_size,
        max_new_tokens=2000,
        extra_prompts=0 if asynchronous else draw(st.integers(0, 3)),
        async_ratio=draw(st.sampled_from([0.3, 1.0, 1.5, 2.0])) if asynchronous else 0.0,
        filtered_share=draw(st.sampled_from([0.0, 0.3])),
        train_seconds=draw(st.sampled_from([0.0, 3.0])),
        sync_seconds=draw(st.sampled_from([0.0, 1.0])),
        resume=draw(st.booleans()),
        deaths=draw(st.dictionaries(st.integers(0, engines - 1), st.floats(0.1, 20.0), max_size=2)),
        restart_seconds=draw(st.sampled_from([0.0, 2.0])),
        seed=draw(st.integers(0, 3)),
    )


@settings(max_examples=40, deadline=None)
@given(scenario=scenarios())
def test_every_step_gets_whole_groups_and_no_prompt_is_used_twice(scenario):
    outcome = simulate(scenario)
    assert [len(groups) for groups in outcome.groups] == [scenario.groups] * scenario.steps
    for groups in outcome.groups:
        for group in groups:
            assert [t.member for t in group.trajectories] == list(range(scenario.group_size))
            assert all(t.status in ("ok", "truncated", "env_error") for t in group.trajectories)
    names = [group.task.id for groups in outcome.groups for group in groups]
    assert len(names) == len(set(names))


@settings(max_examples=40, deadline=None)
@given(scenario=scenarios())
def test_every_prompt_that_was_taken_is_trained_on_or_dropped_or_returned_or_waits(scenario):
    try:
        outcome = simulate(scenario)
    except AllEpisodesFailed:  # by chance, and rightly: eight groups of one that all failed
        reject()
    trained = scenario.groups * scenario.steps
    assert outcome.tasks.taken == trained + outcome.dropped_groups + outcome.tasks.put + outcome.left_over


@settings(max_examples=40, deadline=None)
@given(scenario=scenarios(asynchronous=True))
def test_no_trained_token_is_staler_than_the_bound(scenario):
    outcome = simulate(scenario)
    assert min(outcome.staleness, default=0) >= 0
    assert max(outcome.staleness, default=0) <= math.ceil(scenario.async_ratio)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5, 2.0])
def test_a_step_waits_for_a_straggler_rather_than_use_it_too_late(ratio):
    scenario = Scenario(
        engines=2, groups=8, group_size=2, steps=12, async_ratio=ratio, train_seconds=0.5, sync_seconds=0.1,
        lengths=lambda request: 4000 if request.seed % 40 == 0 else 10,
        engine=EngineModel(max_running_requests=16, step_seconds=0.01),
    )  # fmt: skip
    outcome = simulate(scenario)
    assert max(outcome.staleness) == math.ceil(ratio)
    assert any(len(turn.response_ids) == 4000 for step in outcome.groups for turn in responses(step))


def responses(groups):
    return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


@settings(max_examples=40, deadline=None)
@given(scenario=scenarios(asynchronous=False))
def test_without_generation_ahead_every_token_is_of_the_weights_it_trains(scenario):
    assert set(simulate(scenario).staleness) <= {0}


@settings(max_examples=40, deadline=None)
@given(scenario=scenarios())
def test_engines_get_no_more_than_they_run_and_each_request_is_answered_once(scenario):
    outcome, ranks = watched(scenario)
    assert outcome.use.most_submitted <= scenario.engine.max_running_requests
    assert max(ranks.answered.values(), default=0) <= 1
    if not scenario.deaths:
        assert max(ranks.given.values()) == 1
        assert ranks.given.keys() == ranks.answered.keys()


@settings(max_examples=20, deadline=None)
@given(scenario=scenarios())
def test_the_same_scenario_gives_the_same_run(scenario):
    first, second = simulate(scenario), simulate(scenario)
    assert first.step_ends == second.step_ends
    assert first.use == second.use
    assert [[g.task.id for g in groups] for groups in first.groups] == [
        [g.task.id for g in groups] for groups in second.groups
    ]


@settings(max_examples=20, deadline=None)
@given(engines=st.integers(1, 4), slots=st.integers(1, 6), size=st.integers(1, 6), seed=st.integers(0, 9))
def test_siblings_share_an_engine_that_has_room_for_them(engines, slots, size, seed):
    size = min(size, slots)
    scenario = Scenario(
        engines=engines,
        engine=EngineModel(max_running_requests=slots),
        groups=engines * (slots // size),
        group_size=size,
        steps=1,
        seed=seed,
    )
    outcome, ranks = watched(scenario)
    if slots % size == 0:
        assert all(len(ranks_of) == 1 for ranks_of in ranks.places.values())
        assert outcome.use.prefill_tokens == scenario.groups * scenario.episode.prompt_tokens


def test_siblings_share_an_engine_also_when_all_engines_are_full():
    scenario = Scenario(engines=4, engine=EngineModel(max_running_requests=16), groups=64, group_size=8, steps=1)
    outcome, _ = watched(scenario)
    prompts = outcome.use.prefill_tokens / scenario.episode.prompt_tokens
    # Stragglers of the last groups may go to an engine that would stand idle otherwise.
    assert scenario.groups <= prompts <= 1.1 * scenario.groups


@settings(max_examples=20, deadline=None)
@given(deaths=st.dictionaries(st.integers(0, 2), st.floats(0.1, 60.0), min_size=1), extra=st.integers(1, 8))
def test_a_death_while_the_rest_of_a_step_is_aborted_costs_nothing_but_time(deaths, extra):
    scenario = Scenario(
        engines=3, groups=4, group_size=2, steps=3, extra_prompts=extra, train_seconds=0.0, sync_seconds=0.0,
        deaths=deaths, engine=EngineModel(max_running_requests=4), restart_seconds=1.0,
    )  # fmt: skip
    assert [len(groups) for groups in simulate(scenario).groups] == [4, 4, 4]


def test_requests_given_up_make_room_for_those_that_wait():
    from roll.rollout.continuous_driver import ContinuousDriver

    async def script(ranks, loop):
        engines = ContinuousDriver(ranks, max_running_requests=1, timeout=1e6, loop=loop)
        first = asyncio.ensure_future(engines.generate("a", request("a", 1000)))
        second = asyncio.ensure_future(engines.generate("b", request("b", 5)))
        await asyncio.sleep(20.0)
        first.cancel()
        completion = await second
        assert (completion.id, len(completion.token_ids)) == ("b", 5)
        assert loop.time() == pytest.approx(26.0)
        await engines._stop()

    play(script)


def test_waiting_without_progress_ends_after_the_limit_and_not_before():
    from roll.rollout.continuous_driver import ContinuousDriver
    from roll.rollout.engine_driver import RolloutStalled

    async def script(ranks, loop):
        engines = ContinuousDriver(ranks, max_running_requests=1, timeout=10.0, loop=loop)
        engines.mark_ended("first")
        await engines.advance()  # had happened before
        loop.call_later(9.0, engines.mark_ended, "second")
        await engines.advance()
        assert loop.time() == 9.0
        with pytest.raises(RolloutStalled, match="no progress for 10 s"):
            await engines.advance()
        assert loop.time() == 19.0

    play(script)


def test_async_generation_keeps_engines_busier_under_a_long_tail():
    base = Scenario(groups=16, steps=5, engines=1, train_seconds=60, engine=EngineModel(max_running_requests=64))
    sync, ahead = simulate(base), simulate(with_mode(base, "async:1"))
    assert ahead.engine_utilisation > 1.5 * sync.engine_utilisation
    assert ahead.step_seconds < sync.step_seconds


def test_engines_that_die_twice_end_the_run():
    from roll.rollout.continuous_driver import EngineLost

    simulation = Simulation(Scenario(groups=4, deaths={0: 5.0}, engines=1, restart_seconds=0.0))
    simulation.loop.call_at(9.0, simulation.ranks._die, 0)
    with pytest.raises(EngineLost, match="engine 0"):
        simulation.run()


# --- the command line ---------------------------------------------------------------------------------------------


def test_the_command_prints_a_row_per_mode_and_number_of_engines(capsys):
    main(["--engines", "1", "2", "--groups", "4", "--steps", "2", "--modes", "sync", "async:1", "--median", "50"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[2].startswith("| sync | 1 |")
    assert lines[5].startswith("| async:1 | 2 |")


@pytest.mark.parametrize("mode", ["async", "async:0", "over-sampled:x", "sync:1", "fast"])
def test_an_unknown_mode_is_named(mode):
    with pytest.raises(ValueError, match=f"unknown mode '{mode}'"):
        with_mode(Scenario(), mode)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"groups": 0}, "groups must be >= 1"),
        ({"sync_seconds": -1.0}, "sync_seconds must be >= 0"),
        ({"filtered_share": 1.0}, "filtered_share"),
        ({"extra_prompts": 1, "async_ratio": 1.0}, "extra_prompts"),
        ({"deaths": {8: 1.0}}, r"engines \[8\]"),
    ],
)
def test_an_impossible_scenario_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Scenario(**wrong)


def test_use_adds_up_and_is_measured_between_two_looks():
    total = EngineUse(tokens=3, most_running=2)
    total.add(EngineUse(tokens=4, most_running=1))
    assert (total.tokens, total.most_running) == (7, 2)
    assert total.since(EngineUse(tokens=5)).tokens == 2


def test_no_kind_of_task_starves_when_its_responses_are_long():
    def odd(task_id):
        return int(task_id.removeprefix("t")) % 2

    def length(request):
        return 2000 if odd(request.id.split("/")[2].split("#")[0]) else 100

    engine = EngineModel(max_running_requests=16)
    outcome = simulate(
        Scenario(engines=2, engine=engine, lengths=length, steps=5, groups=8, group_size=4, async_ratio=1.0)
    )
    long = [sum(odd(group.task.id) for group in groups) for groups in outcome.groups]
    assert sum(long[:2]) == 8, "the first steps may take the short ones first, within the bound on staleness"
    assert long[2:] == [4] * 3
