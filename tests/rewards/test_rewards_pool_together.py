"""Several responses in one process: side by side with an async function, in one call with one that takes lists, and
one after the other from one message with a plain one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from roll.isolation.processes.frames import packets
from roll.isolation.processes.worker_process import Call, WorkerProcess
from roll.rewards.base import RewardRequest, RewardResult, RewardSpec
from roll.rewards.reward_pool import RewardPool
from roll.types.trajectory import Task

CUSTOM = str(Path(__file__).with_name("rewards_custom.py"))


def scored(pool: RewardPool, responses: Sequence[str]) -> list[RewardResult]:
    task = Task(id="t", source="t", payload={}, seed=0, tag="t", domain="d")
    return pool.score([RewardRequest(id=str(i), domain="d", response=r, task=task) for i, r in enumerate(responses)])


def pool_of(function: str, *, timeout_s: float, concurrency: int = 8, environment: tuple[str, ...] = ()) -> RewardPool:
    spec = RewardSpec(name=f"{CUSTOM}:{function}", concurrency=concurrency, environment=environment)
    return RewardPool({"d": spec}, num_processes=1, timeout_s=timeout_s, retries=1)


def test_an_async_function_waits_for_several_at_once() -> None:
    with pool_of("obey_async", timeout_s=60.0) as pool:
        pool.wait_ready()
        started = time.monotonic()
        results = scored(pool, [f"sleep {1.0 + i / 100}" for i in range(8)])
        assert time.monotonic() - started < 6.0  # one after the other: 8 s
        assert [r.reward.value for r in results if r.reward] == [1.0 + i / 100 for i in range(8)]


def test_what_one_async_call_does_is_its_own_affair() -> None:
    with pool_of("obey_async", timeout_s=1.0) as pool:
        pool.wait_ready()
        results = scored(pool, ["x 1", "sleep 100", "x 2", "raise", "x 3", "fork 4", "exit", "x 5", "block", "x 6"])
        assert [r.status for r in results] == [
            "ok", "timeout", "ok", "error", "ok", "ok", "error", "ok", "timeout", "ok",
        ]  # fmt: skip
        assert [r.reward.value for r in results if r.reward] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert results[3].error.startswith("LookupError: no such service (")
        assert results[1].attempts == 1


def test_an_async_call_that_does_not_let_itself_be_cancelled_ends_its_process() -> None:
    with pool_of("obey_async", timeout_s=0.5) as pool:
        pool.wait_ready()
        results = scored(pool, ["stubborn", "x 1"])
        assert [r.status for r in results] == ["timeout", "ok"]
        assert pool.counters["restarts"] == 1


def test_lists_are_as_long_as_what_waits() -> None:
    with pool_of("lists", timeout_s=60.0, concurrency=4) as pool:
        pool.wait_ready()
        results = scored(pool, ["x" * i for i in range(20)])
        assert [r.reward.value for r in results if r.reward] == [float(i) for i in range(20)]
        assert max(r.reward.parts["together"] for r in results if r.reward) == 4.0


@pytest.mark.parametrize(("bad", "status"), [("raise", "error"), ("die", "error"), ("hang", "timeout")])
def test_one_of_a_list_costs_only_itself(bad: str, status: str) -> None:
    with pool_of("lists", timeout_s=1.0, concurrency=4) as pool:
        pool.wait_ready()
        results = scored(pool, ["x", "yy", bad, "zzz"])
        assert [r.status for r in results] == ["ok", "ok", status, "ok"]
        assert [r.reward.value for r in results if r.reward] == [1.0, 2.0, 3.0]


def test_the_environment_of_a_reward_has_no_secrets_but_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE_KEY", "secret")
    monkeypatch.setenv("MY_OTHER_KEY", "secret")
    with pool_of("obey_async", timeout_s=60.0, environment=("MY_JUDGE_KEY",)) as pool:
        results = scored(pool, ["env MY_JUDGE_KEY", "env MY_OTHER_KEY", "env PATH"])
    assert [r.reward.value for r in results if r.reward] == [1.0, 0.0, 1.0]


class Noted(RewardPool):
    """Notes the kinds of answers in the order in which they come."""

    kinds: list[str]

    def answered(self, process: WorkerProcess[Any], call: Call, answer: tuple[Any, ...]) -> None:
        self.kinds.append(answer[0])
        super().answered(process, call, answer)


def plain_pool(*, timeout_s: float = 60.0, recycle_after: int = 0) -> Noted:
    """One process of a plain function, which has had short calls."""
    spec = RewardSpec(name=f"{CUSTOM}:obey")
    pool = Noted({"d": spec}, num_processes=1, timeout_s=timeout_s, retries=0, recycle_after=recycle_after)
    pool.kinds, pool._together = [], 64
    pool.wait_ready()
    return pool


def sizes_of_messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []

    def counted(message: Any, secret: bytes) -> Iterator[bytes]:
        if isinstance(message, list):  # else it is what a process begins with
            sizes.append(len(message))
        return packets(message, secret)

    monkeypatch.setattr("roll.isolation.processes.worker_process.packets", counted)
    return sizes


def test_responses_that_are_submitted_in_one_tick_travel_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def episodes(pool: RewardPool) -> list[RewardResult]:
        task = Task(id="t", source="t", payload={}, seed=0, tag="t", domain="d")

        async def one(i: int) -> RewardResult:
            request = RewardRequest(id=str(i), domain="d", response=f"value {i}", task=task)
            return await asyncio.wrap_future(pool.submit(request))

        return list(await asyncio.gather(*(one(i) for i in range(64))))

    sizes = sizes_of_messages(monkeypatch)
    with plain_pool() as pool:
        results = asyncio.run(episodes(pool))
    assert [r.reward.value for r in results if r.reward] == [float(i) for i in range(64)]
    assert sum(sizes[:2]) >= 64  # two if the pool looked after its processes in between


def test_what_a_loop_asks_for_before_it_is_stopped_is_scored() -> None:
    task = Task(id="t", source="t", payload={}, seed=0, tag="t", domain="d")
    submitted: list[Future[RewardResult]] = []

    def ask(pool: RewardPool, loop: asyncio.AbstractEventLoop) -> None:
        submitted.append(pool.submit(RewardRequest(id="a", domain="d", response="value 1", task=task)))
        loop.stop()

    loop = asyncio.new_event_loop()
    with plain_pool() as pool:
        loop.call_soon(ask, pool, loop)
        loop.run_forever()
        assert submitted[0].result(30.0).status == "ok"
    loop.close()


def test_what_waits_for_a_slow_call_of_its_process_is_given_back() -> None:
    with plain_pool() as pool:
        results = scored(pool, ["sleep 0.05", "value 1", "value 2"])
        assert [(r.status, r.attempts) for r in results] == [("ok", 1)] * 3
        assert [r.reward.value for r in results if r.reward] == [0.05, 1.0, 2.0]
        assert pool.kinds == ["ok", "later", "later", "ok", "ok"]


@pytest.mark.parametrize(("bad", "status"), [("os_exit 3", "error"), ("kill", "error"), ("sleep 100", "timeout")])
def test_one_of_a_message_costs_only_itself(bad: str, status: str) -> None:
    with plain_pool(timeout_s=1.0) as pool:
        results = scored(pool, ["value 1", "value 2", bad, "value 3", "raise", "value 4"])
        assert [r.status for r in results] == ["ok", "ok", status, "ok", "error", "ok"]
        assert [r.attempts for r in results] == [1] * 6
        assert [r.reward.value for r in results if r.reward] == [1.0, 2.0, 3.0, 4.0]
        assert pool.counters["restarts"] == 1


def test_a_message_has_no_more_responses_than_its_process_takes_before_it_is_replaced() -> None:
    with plain_pool(recycle_after=3) as pool:
        pids = [r.reward.value for r in scored(pool, ["pid"] * 7) if r.reward]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]
