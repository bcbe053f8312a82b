"""Several responses in one process: side by side with an async function, in one call with one that takes lists."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

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
