"""Whatever an environment does to its process, its episode has a status and the others are whole."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.envs.env_pool import EnvPool
from roll.envs.wrappers import EnvSpec
from roll.isolation.processes.frames import packets
from roll.types.trajectory import EpisodeError

FAULTY = f"{Path(__file__).with_name('envs_faulty.py')}:Counter"
OTHERS = 12
STEPS = 6


def pool_of(folder: Path, processes: int = 1, timeout_s: float = 1.0, **settings: Any) -> EnvPool:
    specs = {
        "count": EnvSpec(
            tag="count", env_type=FAULTY, env_config={"folder": str(folder)}, max_steps=50, action_pattern=None
        ),
        "broken": EnvSpec(
            tag="broken",
            env_type=FAULTY,
            env_config={"folder": str(folder), "on_init": "raise init"},
            action_pattern=None,
        ),
        "drift": EnvSpec(tag="drift", env_type=FAULTY, env_config={"drift": True}, action_pattern=None),
    }
    pool = EnvPool(specs, num_processes=processes, timeout_s=timeout_s, **settings)
    pool.wait_ready()
    return pool


def process_of(pool: EnvPool) -> int:
    return pool._processes[0].pid


async def innocent(pool: EnvPool, i: int, pause: asyncio.Event) -> list[float]:
    """An episode that is half-way when the fault happens."""
    name = f"innocent {i}"
    await pool.reset(name, "count", i, {})
    rewards = []
    for step in range(STEPS):
        if step == STEPS // 2:
            await pause.wait()
        rewards.append((await pool.step(name, f"add {step}")).reward)
    assert (await pool.step(name, "done")).terminated
    await pool.close(name)
    return rewards


async def with_innocents(pool: EnvPool, fault: Any) -> Any:
    """What the fault gives, while others play; theirs must be whole."""
    pause = asyncio.Event()
    others = [asyncio.ensure_future(innocent(pool, i, pause)) for i in range(OTHERS)]

    async def unpause() -> None:
        await asyncio.sleep(0.05)
        pause.set()

    outcome, *_ = await asyncio.wait_for(asyncio.gather(fault, unpause(), return_exceptions=True), 30.0)
    rewards = await asyncio.wait_for(asyncio.gather(*others), 30.0)
    totals = [sum(range(step + 1)) for step in range(STEPS)]
    assert rewards == [[float(i + total) for total in totals] for i in range(OTHERS)]
    return outcome


async def guilty(pool: EnvPool, response: str, tag: str = "count", **options: Any) -> Any:
    try:
        await pool.reset("guilty", tag, 5, options)
        await pool.step("guilty", "add 1")
        return await pool.step("guilty", response)
    finally:
        await pool.close("guilty")


HERE = r"envs_faulty.py:Counter \(tag 'count', episode 'guilty', seed 5\): "
DIED = HERE + "its process ended with "


NO_RESULTS = [
    ("ok", 5), ("ok", ((), "")), ("ok", ((("user", "x"),), "")), ("ok", ("much", False, False, None, {}, {})),
    ("ok", (1.0, False, False, None, {}, {})), ("ok", (1.0, False, False, ((("user", 5),), ""), {}, {})),
    ("ok", (1.0, True, False, None, {5: 1.0}, {})), ("ok", (1.0, True, False, None, {}, {}), 0),
    ("error", 5), ("closed", "much", ""), ("closed", 1.0), ("closed", 1.0, ""), ("what", 5),
]  # fmt: skip


@pytest.mark.parametrize("answer", NO_RESULTS, ids=range(len(NO_RESULTS)))
def test_an_answer_that_is_no_result_costs_its_episode_alone(tmp_path: Path, answer: tuple[Any, ...]) -> None:
    with pool_of(tmp_path) as pool:
        failure = asyncio.run(with_innocents(pool, guilty(pool, f"answer {answer}")))
        assert isinstance(failure, EpisodeError), failure
        assert re.search(HERE + "its process was killed: it gave no result of step 2", str(failure))


@pytest.mark.parametrize(
    ("response", "options", "tag", "status", "message"),
    [
        ("", {}, "broken", "env_error", r"'guilty', seed 5\): IndexError: deliberate: init \(.*py:\d+, in __init__"),
        ("", {"on_reset": "raise reset"}, "count", "env_error", HERE + r"IndexError: deliberate: reset \(.*, in reset"),
        ("raise step", {}, "count", "env_error", HERE + r"IndexError: deliberate: step \(.*:\d+, in step"),
        ("sys_exit", {}, "count", "env_error", HERE + "SystemExit: 4"),
        ("", {"reset_type": "text"}, "count", "env_error", HERE + "TypeError: .*reset returned 'an observation'"),
        ("wrong_type", {}, "count", "env_error", HERE + "TypeError: .*Counter.step returned .* expected a StepResult"),
        ("wrong_reward", {}, "count", "env_error", HERE + "TypeError: .*Counter.step .* reward = 'much'"),
        ("hang", {}, "count", "timeout", HERE + "step 2 took over 1 s"),
        ("spin", {}, "count", "timeout", HERE + "step 2 took over 1 s"),
        ("", {"on_reset": "hang"}, "count", "timeout", HERE + "reset took over 1 s"),
        ("os_exit 3", {}, "count", "env_error", DIED + "exit code 3 during step 2; it wrote: about to go"),
        ("segfault", {}, "count", "env_error", DIED + r"signal 11 \(SIGSEGV\) during step 2"),
        ("kill", {}, "count", "env_error", DIED + r"signal 9 \(SIGKILL\) during step 2"),
        ("fork", {}, "count", "env_error", DIED + "exit code 0 during step 2"),
        ("", {"on_reset": "os_exit 0"}, "count", "env_error", DIED + "exit code 0 during reset"),
    ],
)  # fmt: skip
def test_a_fault_costs_its_episode_alone(
    tmp_path: Path, response: str, options: dict[str, str], tag: str, status: str, message: str
) -> None:
    with pool_of(tmp_path) as pool:
        failure = asyncio.run(with_innocents(pool, guilty(pool, response, tag, **options)))
        counters = pool.counters
    assert isinstance(failure, EpisodeError), failure
    assert re.search(message, str(failure)), failure
    assert failure.status == status
    process_ended = status == "timeout" or "its process ended" in message
    assert counters["episodes"] == OTHERS + 1
    assert counters["steps"] == OTHERS * (STEPS + 1) + int(response != "")
    assert (counters["restarts"], counters["timeouts"]) == (int(process_ended), int(status == "timeout"))
    if response:  # before, the others' resets may have been unanswered
        assert (counters["replayed"] > 0) == process_ended


def test_a_crash_costs_its_episode_alone_among_many_that_were_asked_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(message: Any, secret: bytes) -> Iterator[bytes]:
        sizes.append(len(message))
        return packets(message, secret)

    async def play(pool: EnvPool) -> list[Any]:
        await asyncio.gather(*(pool.reset(f"e{i}", "count", i, {}) for i in range(64)))
        await asyncio.gather(*(pool.step(f"e{i}", "add 1") for i in range(64)))
        monkeypatch.setattr("roll.isolation.processes.worker_process.packets", counted)
        steps = (pool.step(f"e{i}", "os_exit 3" if i == 30 else "add 2") for i in range(64))
        return await asyncio.gather(*steps, return_exceptions=True)

    with pool_of(tmp_path, timeout_s=30.0) as pool:
        results = asyncio.run(asyncio.wait_for(play(pool), 60.0))
        assert (pool.counters["restarts"], pool.counters["replayed"], pool.counters["steps"]) == (1, 63, 127)
    failure = results.pop(30)
    assert isinstance(failure, EpisodeError), failure
    assert "exit code 3 during step 2" in str(failure)
    # 30 were answered or about to be, 33 weren't begun: all are whole.
    assert [step.reward for step in results] == [i + 3.0 for i in range(64) if i != 30]
    assert max(sizes[:2]) >= 32  # two messages if the pool looked after its processes in between


def test_several_culprits_in_several_processes_cost_one_episode_each(tmp_path: Path) -> None:
    faults = ["os_exit 1", "raise x", "segfault", "hang", "kill"]

    async def play(pool: EnvPool) -> None:
        async def one(i: int, fault: str) -> None:
            await pool.reset(f"bad {i}", "count", i, {})
            await pool.step(f"bad {i}", fault)

        bad = (one(i, fault) for i, fault in enumerate(faults))
        found = await with_innocents(pool, asyncio.gather(*bad, return_exceptions=True))
        assert [error.status for error in found] == ["env_error", "env_error", "env_error", "timeout", "env_error"]

    with pool_of(tmp_path, processes=2, timeout_s=0.5) as pool:
        asyncio.run(play(pool))
        assert pool.counters["restarts"] == 4


def test_a_queue_of_slow_calls_makes_nobody_time_out(tmp_path: Path) -> None:
    async def play(pool: EnvPool) -> None:
        await asyncio.gather(*(pool.reset(f"s{i}", "count", i, {}) for i in range(6)))
        began = time.monotonic()
        await asyncio.gather(*(pool.step(f"s{i}", "sleep 0.2") for i in range(6)))
        assert time.monotonic() - began > 1.1, "they took turns"

    with pool_of(tmp_path, timeout_s=0.5) as pool:
        asyncio.run(play(pool))
        assert pool.counters["timeouts"] == 0


def test_an_environment_that_hangs_or_fails_in_close_costs_nothing(tmp_path: Path) -> None:
    async def play(pool: EnvPool, on_close: str) -> None:
        async def close() -> None:
            await pool.reset("closes", "count", 0, {"on_close": on_close})
            await pool.close("closes")

        assert await with_innocents(pool, close()) is None

    for on_close, restarts in (("raise", 0), ("hang", 1), ("os_exit 1", 1)):
        with pool_of(tmp_path, timeout_s=0.5) as pool:
            asyncio.run(play(pool, on_close))
            assert pool.counters["restarts"] == restarts


def test_what_is_printed_is_dropped_and_stops_nobody(tmp_path: Path) -> None:
    with pool_of(tmp_path) as pool:
        assert asyncio.run(with_innocents(pool, guilty(pool, "print"))).reward == 6.0


def test_a_process_is_killed_with_what_it_started(tmp_path: Path) -> None:
    async def play(pool: EnvPool) -> psutil.Process:
        await pool.reset("parent", "count", 0, {})
        await pool.step("parent", "grandchild")
        grandchild = psutil.Process(int((tmp_path / "grandchild").read_text()))
        with pytest.raises(EpisodeError, match="exit code 1"):
            await pool.step("parent", "os_exit 1")
        return grandchild

    with pool_of(tmp_path) as pool:
        grandchild = asyncio.run(play(pool))
        deadline = time.monotonic() + 5.0
        while grandchild.is_running() and grandchild.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_an_episode_in_flight_may_be_closed_and_its_name_used_again(tmp_path: Path) -> None:
    async def play(pool: EnvPool) -> None:
        await pool.reset("abort", "count", 1, {})
        step = asyncio.ensure_future(pool.step("abort", "sleep 0.2"))
        await asyncio.sleep(0.05)
        await pool.close("abort")
        with pytest.raises(EpisodeError, match="was closed during step 1"):
            await step
        cancelled = asyncio.ensure_future(pool.reset("abort", "count", 2, {}))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await pool.close("abort")
        assert (await pool.reset("abort", "count", 3, {})).text == "total 3"
        assert (await pool.step("abort", "add 1")).reward == 4.0

    with pool_of(tmp_path) as pool:
        asyncio.run(asyncio.wait_for(play(pool), 30.0))
        assert pool.counters["steps"] == 1


def test_a_leaking_process_gets_a_successor_at_once_and_ends_when_it_is_empty(tmp_path: Path) -> None:
    async def play(pool: EnvPool) -> None:
        await pool.reset("leaks", "count", 0, {})
        await pool.reset("stays", "count", 0, {})
        pid = (await pool.step("stays", "pid")).reward
        await pool.step("leaks", "leak 150")
        await pool.close("leaks")
        assert (await pool.step("stays", "pid")).reward == pid, "it isn't killed under an episode"
        # An engine may wait for both: neither may wait for the other.
        assert (await pool.reset("comes", "count", 7, {})).text == "total 7"
        assert (await pool.step("comes", "pid")).reward != pid
        assert pool.counters["recycled"] == 0
        assert (await pool.step("stays", "pid")).reward == pid
        await pool.close("stays")
        while not pool.counters["recycled"]:
            await asyncio.sleep(0.01)
        assert pool.counters["recycled"] == 1
        assert pool.counters["replayed"] == 0

    with pool_of(tmp_path, memory_limit_mb=140) as pool:
        asyncio.run(asyncio.wait_for(play(pool), 30.0))
    assert sorted((tmp_path / "closed").read_text().split()) == ["0", "0"], "every instance was closed"


async def _leaked(pool: EnvPool) -> None:
    await pool.reset("leaks", "count", 0, {})
    await pool.reset("stays", "count", 0, {})
    await pool.reset("dies", "count", 0, {})
    await pool.step("leaks", "leak 150")
    await pool.close("leaks")
    await pool.step("stays", "add 1")  # answered after the close: what it takes is known by now
    assert (await pool.reset("comes", "count", 7, {})).text == "total 7"


def test_a_leaking_process_that_dies_leaves_its_episodes_to_a_process_of_their_own(tmp_path: Path) -> None:
    async def play(pool: EnvPool) -> None:
        await _leaked(pool)
        pid = (await pool.step("comes", "pid")).reward
        with pytest.raises(EpisodeError, match="exit code 1"):
            await pool.step("dies", "os_exit 1")
        assert (await pool.step("stays", "add 2")).reward == 3.0
        assert (await pool.step("stays", "pid")).reward != pid
        assert (await pool.step("comes", "pid")).reward == pid, "its successor isn't touched"
        await pool.close("stays")
        while not pool.counters["recycled"]:
            await asyncio.sleep(0.01)
        assert (await pool.step("comes", "add 1")).reward == 8.0

    with pool_of(tmp_path, memory_limit_mb=140) as pool:
        asyncio.run(asyncio.wait_for(play(pool), 30.0))


def test_a_replay_that_differs_is_an_error_and_not_another_episode(tmp_path: Path) -> None:
    async def play(pool: EnvPool) -> None:
        await pool.reset("drifts", "drift", 0, {})
        await pool.step("drifts", "add 1")
        await pool.reset("dies", "count", 0, {})
        with pytest.raises(EpisodeError, match="exit code 1"):
            await pool.step("dies", "os_exit 1")
        message = r"'drifts', seed 0\): it is not deterministic: .* observation .* then "
        for _ in range(2):
            with pytest.raises(EpisodeError, match=message):
                await pool.step("drifts", "add 1")

    with pool_of(tmp_path) as pool:
        asyncio.run(asyncio.wait_for(play(pool), 30.0))


def test_a_replay_that_fails_where_nothing_failed_is_named(tmp_path: Path) -> None:
    async def play(pool: EnvPool) -> None:
        await pool.reset("changes", "count", 0, {})
        (tmp_path / "once").touch()
        await pool.step("changes", "once raise later")  # nothing, since the flag is there
        (tmp_path / "once").unlink()
        await pool.reset("dies", "count", 0, {})
        with pytest.raises(EpisodeError, match="exit code 1"):
            await pool.step("dies", "os_exit 1")
        message = "not deterministic: no call failed the first time.*IndexError: deliberate: later"
        with pytest.raises(EpisodeError, match=message):
            await pool.step("changes", "add 1")

    with pool_of(tmp_path) as pool:
        asyncio.run(asyncio.wait_for(play(pool), 30.0))


def test_an_episode_that_kills_its_process_in_a_replay_is_given_up(tmp_path: Path) -> None:
    async def play(pool: EnvPool) -> None:
        (tmp_path / "once").touch()
        await pool.reset("bomb", "count", 0, {})
        await pool.step("bomb", "once os_exit 9")
        (tmp_path / "once").unlink()
        fault = guilty(pool, "os_exit 1")
        assert isinstance(await with_innocents(pool, fault), EpisodeError)
        with pytest.raises(EpisodeError, match="ended with exit code 9 during the replay of 1 responses"):
            await pool.step("bomb", "add 1")

    with pool_of(tmp_path) as pool:
        asyncio.run(play(pool))
        assert pool.counters["restarts"] == 2


def test_a_process_that_is_killed_between_calls_costs_no_episode_until_it_happens_too_often(tmp_path: Path) -> None:
    async def wait_for_restart(pool: EnvPool) -> None:
        restarts = pool.counters["restarts"]
        while pool.counters["restarts"] == restarts:
            await asyncio.sleep(0.01)

    async def killed_between_calls(pool: EnvPool, times: int) -> float:
        await pool.reset("a", "count", 1, {})
        for _ in range(times):
            await pool.step("a", "add 1")
            psutil.Process(process_of(pool)).kill()
            await wait_for_restart(pool)
        return (await pool.step("a", "add 2")).reward

    with pool_of(tmp_path) as pool:
        assert asyncio.run(asyncio.wait_for(killed_between_calls(pool, 3), 30.0)) == 6.0
        assert pool.counters["replayed"] == 3
    with pool_of(tmp_path) as pool, pytest.raises(EpisodeError, match="SIGKILL.* between calls; that was the 4th time"):
        asyncio.run(asyncio.wait_for(killed_between_calls(pool, 4), 30.0))


def test_a_stopped_process_is_noticed(tmp_path: Path) -> None:
    async def play(pool: EnvPool) -> float:
        await pool.reset("a", "count", 1, {})
        psutil.Process(process_of(pool)).suspend()
        return (await pool.step("a", "add 1")).reward

    with pool_of(tmp_path, timeout_s=0.3) as pool:
        assert asyncio.run(asyncio.wait_for(play(pool), 30.0)) == 2.0
        assert (pool.counters["timeouts"], pool.counters["restarts"]) == (1, 1)
