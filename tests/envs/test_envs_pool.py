"""The pool: thousands of calls in flight, each episode as if it were alone, whatever the number of processes."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.envs.env_messages import difference
from roll.envs.env_pool import EnvPool
from roll.envs.env_registry import EnvLoadError
from roll.envs.wrappers import EnvSpec
from roll.isolation.processes.child import child_environment
from roll.types.trajectory import EpisodeError

FAULTY = f"{Path(__file__).with_name('envs_faulty.py')}:Counter"


def spec(tag: str = "count", env_type: str = FAULTY, max_steps: int = 50, **env_config: Any) -> EnvSpec:
    return EnvSpec(tag=tag, env_type=env_type, env_config=env_config, max_steps=max_steps, action_pattern=None)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with EnvPool({"count": spec(), "short": spec("short", max_steps=2)}, num_processes=2) as pool:
        pool.wait_ready()
        yield pool


async def played(pool: EnvPool, name: str, responses: list[str], seed: int = 0, tag: str = "count") -> list[Any]:
    """Everything an episode says to these responses, or until its end."""
    try:
        seen: list[Any] = [await pool.reset(name, tag, seed, {})]
        for response in responses:
            seen.append(await pool.step(name, response))
            if seen[-1].observation is None:
                break
    finally:
        await pool.close(name)
    return seen


def test_an_episode_passes_through_whole(pool: EnvPool) -> None:
    first, added, done = asyncio.run(played(pool, "whole", ["add 2", "done"], seed=40))
    assert first.text == "total 40"
    assert (added.reward, added.terminated, added.truncated, added.observation.text) == (42.0, False, False, "total 42")
    assert (added.reward_parts["env"], added.metrics["actions"]) == (42.0, 1.0)
    assert (done.terminated, done.observation, done.metrics["success"]) == (True, None, 1.0)


HARMFUL = [
    ("double", "Counter called os.fork in step"),
    ("show surrogate", "Counter .*the observation isn't valid Unicode"),
    ("show much", "Counter .*the observation has 5,000,004 characters, expected at most 1,000,000"),
]


@pytest.mark.parametrize(("response", "message"), HARMFUL, ids=[response for response, _ in HARMFUL])
def test_what_an_environment_does_costs_one_episode_and_not_its_process(
    pool: EnvPool, response: str, message: str
) -> None:
    async def play() -> list[Any]:
        good = [played(pool, f"good{i}", ["add 1"] * 20, seed=i) for i in range(6)]
        return await asyncio.gather(*good, played(pool, "bad", ["add 1", response]), return_exceptions=True)

    restarts = pool.counters["restarts"]
    *good, failure = asyncio.run(safely(play()))
    assert isinstance(failure, EpisodeError)
    assert re.search(message, str(failure)), failure
    assert failure.status == "env_error"
    assert [seen[-1].reward for seen in good] == [i + 20.0 for i in range(6)]
    assert pool.counters["restarts"] == restarts


def test_a_long_observation_passes_through(pool: EnvPool) -> None:
    assert len(asyncio.run(played(pool, "long", ["show fine"]))[-1].observation.text) == 900_000


def test_tags_have_their_own_environments(pool: EnvPool) -> None:
    assert asyncio.run(played(pool, "cut", ["add 1", "add 1"], tag="short"))[-1].truncated
    assert not asyncio.run(played(pool, "uncut", ["add 1", "add 1"]))[-1].truncated


@pytest.mark.parametrize(("processes", "order"), [(1, 1), (4, 2), (3, 3)])
def test_episodes_are_the_same_with_any_number_of_processes_in_any_order(processes: int, order: int) -> None:
    async def play(pool: EnvPool) -> dict[str, list[Any]]:
        rng = random.Random(order)
        seen: dict[str, list[Any]] = {}

        async def one(seed: int) -> None:
            draw = random.Random(seed)
            words = ["Left", "Down", "Right", "Up", "nonsense"]
            responses = [f"<answer>{draw.choice(words)}</answer>" for _ in range(30)]
            seen[f"f{seed}"] = await played(pool, f"f{seed}", responses, seed, "lake")

        seeds = list(range(40))
        rng.shuffle(seeds)
        await asyncio.gather(*(one(seed) for seed in seeds))
        return seen

    lake = EnvSpec(tag="lake", env_type="frozen_lake-v1", max_steps=20)
    with EnvPool({"lake": lake}, num_processes=processes) as pool:
        outcome = asyncio.run(safely(play(pool)))
    with EnvPool({"lake": lake}) as pool:
        assert asyncio.run(safely(play(pool))) == outcome


async def safely(coroutine: Any) -> Any:
    return await asyncio.wait_for(coroutine, 60.0)


def test_several_threads_and_loops_share_a_pool(pool: EnvPool) -> None:
    outcomes: dict[int, float] = {}

    def work(k: int) -> None:
        for i in range(5):  # one loop per call
            outcomes[k * 10 + i] = asyncio.run(played(pool, f"t{k}/{i}", ["add 1"], seed=k * 10 + i))[1].reward

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30.0)
    assert outcomes == {k * 10 + i: k * 10 + i + 1.0 for k in range(4) for i in range(5)}


def test_an_episode_may_be_played_in_a_loop_per_call(pool: EnvPool) -> None:
    assert asyncio.run(pool.reset("loops", "count", 1, {})).text == "total 1"
    assert asyncio.run(pool.step("loops", "add 2")).reward == 3.0
    assert asyncio.run(pool.step("loops", "add 3")).reward == 6.0
    asyncio.run(pool.close("loops"))


def test_misuse_is_explained(pool: EnvPool) -> None:
    async def misuse() -> None:
        with pytest.raises(ValueError, match=r"no environment with tag 'sokobann' \(episode 'm'\); known: \['count'"):
            await pool.reset("m", "sokobann", 0, {})
        with pytest.raises(ValueError, match="episode 'm' isn't open"):
            await pool.step("m", "add 1")
        await pool.reset("m", "count", 0, {})
        with pytest.raises(ValueError, match="episode 'm' is open"):
            await pool.reset("m", "count", 0, {})
        slow = asyncio.ensure_future(pool.step("m", "sleep 0.1"))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"episode 'm', seed 0\): a step was asked for during step 1"):
            await pool.step("m", "add 1")
        assert (await slow).reward == 0.0
        await pool.close("m")
        await pool.close("m")
        await pool.close("never opened")

    asyncio.run(safely(misuse()))


# --- places -------------------------------------------------------------------------------


def test_resets_wait_for_a_free_place_and_take_the_least_loaded_process() -> None:
    async def play(pool: EnvPool) -> None:
        await asyncio.gather(*(pool.reset(f"p{i}", "count", i, {}) for i in range(4)))
        pids = [(await pool.step(f"p{i}", "pid")).reward for i in range(4)]
        assert [pids.count(pid) for pid in pids] == [2, 2, 2, 2]
        fifth = asyncio.ensure_future(pool.reset("p4", "count", 4, {}))
        sixth = asyncio.ensure_future(pool.reset("p5", "count", 5, {}))
        await asyncio.sleep(0.1)
        assert not fifth.done()
        await pool.close("p1")
        assert (await fifth).text == "total 4"
        assert (await pool.step("p4", "pid")).reward == pids[1]
        assert not sixth.done()
        await pool.close("p5")  # gives up waiting
        with pytest.raises(EpisodeError, match="was closed while it waited for a place"):
            await sixth
        await pool.close("p0")
        assert (await pool.reset("p6", "count", 6, {})).text == "total 6"

    with EnvPool({"count": spec()}, num_processes=2, max_envs_per_process=2) as pool:
        asyncio.run(safely(play(pool)))


def test_a_long_wait_for_a_place_names_who_holds_them(caplog: pytest.LogCaptureFixture) -> None:
    async def play(pool: EnvPool) -> None:
        await pool.reset("holder", "count", 0, {})
        waiting = asyncio.ensure_future(pool.reset("waits", "count", 1, {}))
        await asyncio.sleep(0.05)
        pool._queue[0].queued_at -= 121.0
        while not caplog.messages:
            await asyncio.sleep(0.02)
        await pool.close("holder")
        await waiting

    with EnvPool({"count": spec()}, max_envs_per_process=1, timeout_s=60.0, start_timeout_s=60.0) as pool:
        asyncio.run(safely(play(pool)))
    assert "episode 'waits', seed 1) has waited" in caplog.messages[0]
    assert caplog.messages[0].endswith("they are held by 1 episodes: holder")


# --- ends ---------------------------------------------------------------------------------


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_shutdown_leaves_no_process_and_calls_under_way_fail() -> None:
    before = set(children())

    async def play(pool: EnvPool) -> None:
        await pool.reset("under way", "count", 0, {})
        step = asyncio.ensure_future(pool.step("under way", "hang"))
        await asyncio.sleep(0.2)
        pool.shutdown()
        with pytest.raises(EpisodeError, match="episode 'under way', seed 0.: the environment pool was shut down"):
            await step
        with pytest.raises(RuntimeError, match="was shut down"):
            await pool.reset("late", "count", 0, {})
        with pytest.raises(RuntimeError, match="was shut down"):
            await pool.step("under way", "add 1")
        await pool.close("under way")

    pool = EnvPool({"count": spec()}, num_processes=2)
    pool.wait_ready()
    assert len(set(children()) - before) == 2
    asyncio.run(safely(play(pool)))
    pool.shutdown()
    assert until(lambda: set(children()) <= before), "zombies count: they are children still"


@pytest.mark.parametrize("last", ["add 1", "spin"])
def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path, last: str) -> None:
    code = (
        "import asyncio, os, signal, threading\n"
        "from roll.envs.env_pool import EnvPool\n"
        "from roll.envs.wrappers import EnvSpec\n"
        f"spec = EnvSpec(tag='c', env_type={FAULTY!r}, action_pattern=None,\n"
        f"               env_config={{'folder': {str(tmp_path)!r}}})\n"
        "pool = EnvPool({'c': spec}, timeout_s=0.4)\n"
        "async def play():\n"
        "    await pool.reset('a', 'c', 0, {})\n"
        "    print(int((await pool.step('a', 'pid')).reward), flush=True)\n"
        "    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        f"    await pool.step('a', {last!r})\n"
        "asyncio.run(play())\n"
        "threading.Event().wait(10)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -9, done.stderr
    pid = int(done.stdout)
    assert until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_environments_that_cannot_be_loaded_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")

    async def play(pool: EnvPool) -> None:
        with pytest.raises(EpisodeError, match="can't load the environments:[^$]*no_such_module"):
            await pool.reset("a", "bad", 0, {})

    with EnvPool({"good": spec(), "bad": spec("bad", f"{tmp_path / 'broken.py'}:Env")}, num_processes=2) as pool:
        for _ in range(2):
            with pytest.raises(EnvLoadError, match=r"custom_envs.bad.env_type[^$]*broken.py[^$]*no_such_module"):
                pool.wait_ready()
        asyncio.run(safely(play(pool)))
        assert pool.counters["restarts"] == 0


@pytest.mark.parametrize(
    ("source", "message", "start_timeout_s"),
    [
        ("import os; os._exit(7)", "ended with exit code 7 while it started", 60.0),
        ("import time; time.sleep(100)", "took over 0.5 s to load the environments", 0.5),
    ],
)
def test_a_process_that_cannot_start_is_tried_three_times(
    tmp_path: Path, source: str, message: str, start_timeout_s: float
) -> None:
    (tmp_path / "broken.py").write_text(source)

    async def play(pool: EnvPool) -> None:
        with pytest.raises(EpisodeError, match=message):
            await pool.reset("a", "bad", 0, {})
        await pool.close("a")

    with EnvPool({"bad": spec("bad", f"{tmp_path / 'broken.py'}:Env")}, start_timeout_s=start_timeout_s) as pool:
        with pytest.raises(EnvLoadError, match=message):
            pool.wait_ready()
        assert pool.counters["restarts"] == 2
        asyncio.run(safely(play(pool)))


def test_a_limit_below_what_a_process_takes_is_refused() -> None:
    with EnvPool({"count": spec()}, memory_limit_mb=5) as pool, pytest.raises(EnvLoadError, match="memory_limit_mb"):
        pool.wait_ready()


# --- messages -----------------------------------------------------------------------------


def test_what_differs_in_a_replay_is_said() -> None:
    step = (1.0, False, False, ((("user", "at 1"),), "", ""), {"env": 1.0}, {"seconds": 0.1}, {})
    assert difference(step, (*step[:5], {"seconds": 0.2}, {})) == ""
    assert difference(step, (2.0, *step[1:])) == "reward 1.0, then 2.0"
    assert "observation" in difference(step, (*step[:3], ((("user", "at 2"),), "", ""), *step[4:]))
    assert "role_rewards" in difference(step, (*step[:6], {"first": 1.0}))
    assert "end" in difference(step, (1.0, True, *step[2:]))
    assert difference(((("user", "a"),), "", ""), ((("user", "b"),), "", "")).startswith("observation")
    assert difference(((("user", "a"),), "", "first"), ((("user", "a"),), "", "second")).startswith("role")
