"""The scheduler: whole groups, in plan order, whatever finishes when; nothing lost, nothing waited for in silence."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
from fakes import EchoEnv, ScriptedRanks, Source, ThreadedEnv, instant, make_plan, make_scheduler, make_tasks

from roll.rewards.base import Reward, RewardResult
from roll.rollout.engine_driver import RolloutStalled
from roll.rollout.episode_groups import AllEpisodesFailed, FilterBudgetExhausted, histogram
from roll.strategies.base import SamplingParams
from roll.types.trajectory import EpisodeError


def ids(collected):
    return [group.task.id for group in collected.groups]


def test_groups_are_whole_and_in_plan_order_though_the_first_is_slowest():
    ranks = ScriptedRanks(length=lambda request: 40 if request.prompt_ids[-1] == 10 else 3)
    collected = make_scheduler(ranks).collect(Source(make_tasks(9)), make_plan(groups=4, group_size=3))
    assert ids(collected) == ["t0", "t1", "t2", "t3"]
    for group in collected.groups:
        assert [t.member for t in group.trajectories] == [0, 1, 2]
        assert {t.status for t in group.trajectories} == {"ok"}
        assert all(t.reward_parts == {"part": 1.0} for t in group.trajectories)


def test_members_of_a_group_go_to_one_engine_and_engines_are_evenly_loaded():
    ranks = ScriptedRanks(world_size=3)
    make_scheduler(ranks).collect(Source(make_tasks(6)), make_plan(groups=6, group_size=4))
    assert [len(batch) for batch in ranks.batches] == [8, 8, 8]
    for batch in ranks.batches:
        assert len({request_id.split("#")[0] for request_id in batch}) == 2


def test_over_sampling_takes_the_groups_that_are_ready_first_and_returns_the_others_prompts():
    slow = {11, 13}
    ranks = ScriptedRanks(length=lambda request: 400 if request.prompt_ids[-1] in slow else 3)
    source = Source(make_tasks(9))
    collected = make_scheduler(ranks).collect(source, make_plan(groups=3, extra_prompts=2))
    assert ids(collected) == ["t0", "t2", "t4"]
    assert source.returned == ["t1", "t3"]
    assert [task.id for task in source.take(3)] == ["t1", "t3", "t5"]
    metrics = collected.metrics.result()
    assert metrics["rollout/aborted_requests"] == 4
    assert not any(ranks.running)


def delayed(delays):
    """A reward that takes its time in a thread, so that results arrive in another order than asked for."""

    def submit(request):
        future: Future = Future()
        delay = delays[int(request.task.payload["number"]) % len(delays)]
        result = RewardResult(id=request.id, status="ok", reward=Reward(1.0))
        threading.Timer(delay, future.set_result, [result]).start()
        return future

    return submit


@pytest.mark.parametrize("delays", [(0.0, 0.05, 0.1), (0.1, 0.05, 0.0)])
def test_which_groups_are_taken_does_not_depend_on_how_long_rewards_take(delays):
    ranks = ScriptedRanks(length=lambda request: 3 + 2 * (request.prompt_ids[-1] % 3))
    source = Source(make_tasks(20))
    collected = make_scheduler(ranks, delayed(delays)).collect(source, make_plan(groups=4, extra_prompts=3))
    # Lengths are 5, 7, 3, 5, 7, 3, 5 steps, a round is 4: t2 and t5 end in the first, the rest in the second.
    assert ids(collected) == ["t0", "t1", "t2", "t5"]
    assert source.returned == ["t3", "t4", "t6"]


def test_no_round_starts_while_an_episode_is_still_at_its_reward():
    asked, answered = [], []

    def submit(request):
        future = delayed((0.05,))(request)
        asked.append(request.id)
        future.add_done_callback(lambda _: answered.append(request.id))
        return future

    class Watching(ScriptedRanks):
        finished = 0

        async def poll(self, rank, budget):
            # Every response handed out so far has been to its reward and back.
            assert len(asked) == len(answered) == self.finished
            done = await super().poll(rank, budget)
            self.finished += len(done)
            return done

    ranks = Watching(length=lambda request: 3 + 8 * (request.prompt_ids[-1] % 3))
    collected = make_scheduler(ranks, submit).collect(Source(make_tasks(6)), make_plan(groups=6))
    assert ranks.finished == 12
    assert len(collected.groups) == 6


def test_filtered_groups_are_replaced_counted_and_shown():
    dropped = []
    scheduler = make_scheduler(
        ScriptedRanks(),
        instant(lambda request: request.task.payload["number"] % 2),
        keep=lambda group: None if group.trajectories[0].reward else "filtered: score 0",
        on_drop=lambda group, reason: dropped.append((group.task.id, reason)),
    )
    collected = scheduler.collect(Source(make_tasks(20)), make_plan(groups=4))
    assert ids(collected) == ["t1", "t3", "t5", "t7"]
    assert dropped == [(f"t{i}", "filtered: score 0") for i in (0, 2, 4, 6)]
    assert collected.metrics.result()["rollout/filtered_groups"] == 4


def test_a_filter_that_rejects_everything_ends_with_the_scores_and_the_way_out():
    scheduler = make_scheduler(ScriptedRanks(), instant(lambda request: 0.5), keep=lambda group: "filtered: too easy")
    with pytest.raises(FilterBudgetExhausted) as error:
        scheduler.collect(Source(make_tasks(99)), make_plan(groups=4, max_prompts=12))
    message = str(error.value)
    assert "started 12 prompts" in message
    assert "12 x filtered: too easy" in message
    assert "all 12 at 0.5" in message
    assert "max_num_gen_batches" in message


def test_a_failed_reward_is_a_status_and_a_group_goes_on_with_its_survivors():
    def score(request):
        return "checker is down" if request.id.startswith("train/1/t0#0") else 1.0

    collected = make_scheduler(ScriptedRanks(), instant(score)).collect(
        Source(make_tasks(9)), make_plan(groups=2, group_size=3, min_survivors=2)
    )
    first = collected.groups[0]
    assert [t.status for t in first.trajectories] == ["reward_error", "ok", "ok"]
    assert "checker is down" in first.trajectories[0].error
    assert [t.member for t in first.survivors] == [1, 2]
    assert collected.metrics.result()["rollout/failed_reward_error"] == 1


def test_a_group_with_fewer_than_two_survivors_is_dropped_and_replaced():
    def score(request):
        return "down" if request.task.id == "t0" and "#2" not in request.id else 1.0

    collected = make_scheduler(ScriptedRanks(), instant(score)).collect(
        Source(make_tasks(9)), make_plan(groups=2, group_size=3, min_survivors=2)
    )
    assert ids(collected) == ["t1", "t2"]
    assert collected.metrics.result()["rollout/failed_groups"] == 1


def test_a_source_that_ends_is_reported_not_waited_for():
    collected = make_scheduler(ScriptedRanks()).collect(Source(make_tasks(3)), make_plan(groups=5))
    assert collected.exhausted
    assert ids(collected) == ["t0", "t1", "t2"]


def test_a_reward_that_never_answers_stalls_with_a_name():
    scheduler = make_scheduler(ScriptedRanks(), lambda request: Future(), timeout=0.2)
    started = time.monotonic()
    with pytest.raises(RolloutStalled, match=r"train/1/t0#0 \(reward\)"):
        scheduler.collect(Source(make_tasks(2)), make_plan(groups=2))
    assert time.monotonic() - started < 5


class Broken:
    def __init__(self, error):
        self.error = error

    def reset(self, seed, options):
        raise self.error

    def close(self):
        pass


def test_a_broken_environment_is_a_status_of_its_episode():
    collected = make_scheduler(
        ScriptedRanks(), make_env=lambda task, name: ThreadedEnv(Broken(KeyError("board")))
    ).collect(Source(make_tasks(1)), make_plan(groups=1, group_size=1, min_survivors=0))
    (trajectory,) = collected.groups[0].trajectories
    assert trajectory.status == "env_error"
    assert "KeyError" in trajectory.error
    assert not trajectory.trainable


def test_a_step_in_which_all_fail_ends_with_what_was_raised_and_where():
    frames = 'Traceback (most recent call last):\n  File "/home/me/rooms.py", line 6, in reset\nKeyError: 7'
    text = f"reset: KeyError: 7\n{frames}"

    class NoRoom(ThreadedEnv):
        async def reset(self, task):
            raise EpisodeError("env_error", text)

    scheduler = make_scheduler(ScriptedRanks(), make_env=lambda task, name: NoRoom(Broken(None)))
    with pytest.raises(AllEpisodesFailed, match=r"#0: reset: KeyError: 7 \(/home/me/rooms.py, line 6\)\. Mend"):
        scheduler.collect(Source(make_tasks(40)), make_plan(groups=2, group_size=2, min_survivors=2))


class Hanging(Broken):
    def reset(self, seed, options):
        time.sleep(1.0)


def test_a_hanging_environment_times_out():
    collected = make_scheduler(
        ScriptedRanks(), make_env=lambda task, name: ThreadedEnv(Hanging(None), timeout=0.1)
    ).collect(Source(make_tasks(1)), make_plan(groups=1, group_size=1, min_survivors=0))
    assert collected.groups[0].trajectories[0].status == "timeout"


def test_a_two_turn_episode_carries_its_tokens():
    ranks = ScriptedRanks(length=lambda request: 2)
    scheduler = make_scheduler(ranks, make_env=lambda task, name: ThreadedEnv(EchoEnv()), max_turns=5)
    collected = scheduler.collect(Source(make_tasks(1)), make_plan(groups=1, group_size=1))
    (trajectory,) = collected.groups[0].trajectories
    first, second = trajectory.turns
    assert (first.prompt_ids, first.response_ids) == ((1, 10), (10, 10))
    # The second request saw the whole history; the turn holds only what was new.
    assert (second.prompt_ids, second.response_ids) == ((7, 8), (8, 8))
    assert trajectory.reward == 1.25
    assert trajectory.status == "ok"


@pytest.mark.parametrize(
    ("options", "turns", "status"),
    [
        ({"max_turns": 1}, 1, "truncated"),  # the environment wanted another turn
        ({"max_turns": 5, "limit": 6}, 1, "truncated"),  # 2 + 2 + 2 tokens leave no room to respond
        ({"max_turns": 5, "limit": 7}, 2, "ok"),  # one token of room
        ({"max_turns": 5, "limit": 2}, 0, "truncated"),  # the first prompt fills it
    ],
)
def test_limits_end_an_episode_as_truncated(options, turns, status):
    ranks = ScriptedRanks(length=lambda request: min(2, request.params.max_new_tokens))
    scheduler = make_scheduler(ranks, make_env=lambda task, name: ThreadedEnv(EchoEnv()), **options)
    collected = scheduler.collect(Source(make_tasks(1)), make_plan(groups=1, group_size=1, min_survivors=0))
    (trajectory,) = collected.groups[0].trajectories
    assert (len(trajectory.turns), trajectory.status) == (turns, status)
    assert trajectory.trainable == (turns > 0)


def test_requests_differ_by_step_task_member_and_turn_but_not_by_order_of_play():
    seeds = {}

    class Recording(ScriptedRanks):
        async def submit(self, rank, requests):
            seeds.update({request.id: request.seed for request in requests})
            await super().submit(rank, requests)

    make_env = lambda task, name: ThreadedEnv(EchoEnv())  # noqa: E731
    scheduler = make_scheduler(Recording(), make_env=make_env, max_turns=2)
    scheduler.collect(Source(make_tasks(3)), make_plan(groups=3))
    assert len(seeds) == len(set(seeds.values())) == 3 * 2 * 2
    first = dict(seeds)
    scheduler = make_scheduler(Recording(world_size=2), make_env=make_env, max_turns=2)
    scheduler.collect(Source(make_tasks(3)[::-1]), make_plan(groups=3))
    assert seeds == first


def test_a_player_that_fails_is_raised_and_not_waited_for():
    class Failing(ScriptedRanks):
        async def poll(self, rank, budget):
            raise RuntimeError("engine rank 0 died")

    with pytest.raises(RuntimeError, match="died"):
        make_scheduler(Failing()).collect(Source(make_tasks(2)), make_plan(groups=2))


def test_two_hundred_requests_of_mixed_lengths_all_come_back():
    ranks = ScriptedRanks(world_size=2, length=lambda request: 1 + request.prompt_ids[-1] * 7 % 40)
    params = SamplingParams(max_new_tokens=50)
    collected = make_scheduler(ranks).collect(Source(make_tasks(50)), make_plan(groups=50, group_size=4, params=params))
    assert sum(len(group.survivors) for group in collected.groups) == 200
    assert not any(ranks.running)


def test_histogram_counts_every_value_once():
    assert histogram([]) == "none"
    assert histogram([1.0, 1.0]) == "all 2 at 1"
    assert histogram([0.0, 0.1, 0.9, 1.0]) == "[0, 0.2): 2, [0.8, 1]: 2"
