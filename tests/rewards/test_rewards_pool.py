"""The pool: whatever a reward function does, every request gets a result and the next one is scored."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.rewards.base import RewardLoadError, RewardRequest, RewardResult, RewardSpec
from roll.rewards.reward_pool import RewardPool
from roll.types.trajectory import Task

CUSTOM = str(Path(__file__).with_name("rewards_custom.py"))
ROOT = Path(__file__).parents[2]


def request(response: str, i: int = 0, domain: str = "obey") -> RewardRequest:
    task = Task(id=f"t:{i}", source="t", payload={"ground_truth": "72"}, seed=0, tag="t", domain=domain)
    return RewardRequest(id=f"t:{i}#0", domain=domain, response=response, task=task)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rewards")


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[RewardPool]:
    specs = {
        "obey": RewardSpec(name=f"{CUSTOM}:obey", kwargs={"folder": str(folder)}),
        "finish": RewardSpec(name=f"{CUSTOM}:by_finish"),
        "gsm8k": RewardSpec(name="gsm8k"),
    }
    with RewardPool(specs, num_processes=2, timeout_s=1.5, retries=1) as pool:
        pool.wait_ready()
        yield pool


def one(pool: RewardPool, response: str) -> RewardResult:
    return pool.score([request(response)])[0]


def test_results_come_in_the_order_of_the_requests(pool: RewardPool) -> None:
    responses = [f"sleep {(7 - i) * 0.02:.2f}" for i in range(8)]
    results = pool.score([request(response, i) for i, response in enumerate(responses)])
    assert [r.id for r in results] == [f"t:{i}#0" for i in range(8)]
    assert [r.reward.value for r in results if r.reward] == [pytest.approx((7 - i) * 0.02) for i in range(8)]


def test_domains_have_their_own_functions(pool: RewardPool) -> None:
    results = pool.score([request("#### 72", 0, "gsm8k"), request("value 3", 1), request("", 2, "finish")])
    assert [r.reward.value for r in results if r.reward] == [1.0, 3.0, 1.0]
    assert results[0].reward is not None
    assert results[0].reward.parts["answered"] == 1.0


def test_an_unknown_domain_is_refused(pool: RewardPool) -> None:
    with pytest.raises(ValueError, match=r"no reward for domain 'code'.*gsm8k"):
        pool.submit(request("", domain="code"))


ERRORS = [
    ("raise", "IndexError"),
    ("value nan", "'obey' returned a value = nan"),
    ("value inf", "'obey' returned a value = inf"),
    ("nan_part", "'obey' returned part 'p' = nan"),
    ("none", "'obey' returned a value of type NoneType"),
    ("text", "'obey' returned a value of type str"),
    ("list_parts", "'obey' returned parts of type list"),
    ("os_exit 0", "ended with exit code 0 while scoring"),
    ("sys_exit 0", "ended with exit code 0 while scoring"),
    ("os_exit 3", "ended with exit code 3"),
    ("kill", r"signal 9 \(SIGKILL\)"),
    ("fork_and_exit", "ended with exit code 0 while scoring"),
    ("print please", r"KeyError: 'after printing'[^$]*printed: [^$]*please"),
]


@pytest.mark.parametrize(("response", "message"), ERRORS)
def test_a_failing_function_is_an_error_after_a_retry_and_never_a_zero(
    pool: RewardPool, response: str, message: str
) -> None:
    result = one(pool, response)
    assert (result.status, result.reward, result.attempts) == ("error", None, 2)
    assert re.search(message, result.error), result.error
    assert len(result.error) < 4000
    assert one(pool, "value 1").status == "ok"


def test_an_error_names_the_line_of_the_function(pool: RewardPool) -> None:
    assert "rewards_custom.py" in one(pool, "raise").error
    assert "worker.py" not in one(pool, "raise").error


def test_a_failure_that_goes_away_is_retried_and_counted(pool: RewardPool, folder: Path) -> None:
    (folder / "attempts").unlink(missing_ok=True)
    before = pool.counters["retries"]
    result = one(pool, "count 2")
    assert (result.status, result.attempts, pool.counters["retries"] - before) == ("ok", 2, 1)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_hanging_function_is_killed_with_its_children_while_others_go_on(pool: RewardPool, folder: Path) -> None:
    started = time.monotonic()
    results = pool.score([request("hang_with_child", 0), *(request(f"value {i}", i) for i in range(1, 6))])
    assert time.monotonic() - started < 6.0
    assert [r.status for r in results] == ["timeout"] + ["ok"] * 5
    assert results[0].reward is None
    assert results[0].attempts == 1
    assert "1.5 s" in results[0].error
    child = int((folder / "child").read_text())
    deadline = time.monotonic() + 5.0
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def test_the_processes_load_neither_torch_nor_the_main_script(pool: RewardPool) -> None:
    results = pool.score([request("torch"), request("main", 1)])
    assert [r.reward.value for r in results if r.reward] == [0.0, 0.0]


def test_many_threads_may_score_at_once(pool: RewardPool) -> None:
    found: dict[int, list[float]] = {}

    def work(k: int) -> None:
        results = pool.score([request(f"value {k * 100 + i}", k * 100 + i) for i in range(20)])
        found[k] = [r.reward.value for r in results if r.reward]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30.0)
    assert found == {k: [float(k * 100 + i) for i in range(20)] for k in range(4)}


def test_a_large_response_goes_through(pool: RewardPool) -> None:
    assert one(pool, "value 1" + " " * 10_000_000).status == "ok"


def test_processes_are_recycled_after_their_calls(folder: Path) -> None:
    specs = {"obey": RewardSpec(name=f"{CUSTOM}:obey")}
    with RewardPool(specs, num_processes=1, recycle_after=2) as pool:
        pids = [r.reward.value for r in pool.score([request("pid", i) for i in range(5)]) if r.reward]
        assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
        assert pool.counters["recycled"] == 2


def test_a_function_that_cannot_be_loaded_stops_the_run() -> None:
    with RewardPool({"obey": RewardSpec(name=f"{CUSTOM}:lenght")}, num_processes=1) as pool:
        for _ in range(2):
            with pytest.raises(RewardLoadError, match="no function 'lenght'"):
                pool.wait_ready()
        for _ in range(3):
            with pytest.raises(RewardLoadError, match="no function 'lenght'"):
                pool.submit(request("value 1")).result(30.0)


def test_a_request_that_was_cancelled_while_nothing_could_be_loaded_is_left_out() -> None:
    with RewardPool({"obey": RewardSpec(name=f"{CUSTOM}:lenght")}, num_processes=1) as pool:
        first, cancelled, last = (pool.submit(request("value 1", i)) for i in range(3))
        assert cancelled.cancel()
        for asked in (first, last):
            with pytest.raises(RewardLoadError, match="no function 'lenght'"):
                asked.result(30.0)


NO_REWARDS = [
    ("ok", 1.0, {}, 0), ("ok", "x", {}), ("ok", 1.0, 5), ("ok", 10**400, {}), ("ok", 1.0, {1: 1.0}), ("error", 5),
    ("what", 1.0),
]  # fmt: skip


def test_an_answer_that_is_no_reward_is_an_error_after_a_retry() -> None:
    with RewardPool({"obey": RewardSpec(name=f"{CUSTOM}:obey")}, num_processes=1) as pool:
        for answer in NO_REWARDS:
            assert one(pool, f"answer {answer}").status == "ok"
            result = pool.submit(request("value 1")).result(30.0)
            assert (result.status, result.reward, result.attempts) == ("error", None, 2)
            assert "its process gave no reward" in result.error
        assert one(pool, "value 1").status == "ok"
        assert pool.counters["restarts"] == 0


def test_a_closed_pool_leaves_no_process_and_takes_no_request() -> None:
    pool = RewardPool({"obey": RewardSpec(name=f"{CUSTOM}:obey")}, num_processes=1)
    result = one(pool, "pid")
    pool.shutdown()
    assert result.reward is not None
    assert not alive(int(result.reward.value))
    with pytest.raises(RuntimeError, match="was shut down"):
        one(pool, "value 1")
    pool.shutdown()


def test_a_script_without_a_main_guard_can_use_a_pool_and_end_without_closing_it(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from roll.rewards.base import RewardRequest, RewardSpec\n"
        "from roll.rewards.reward_pool import RewardPool\n"
        "from roll.types.trajectory import Task\n"
        "task = Task(id='t', source='t', payload={'ground_truth': '72'}, seed=0, tag='t', domain='d')\n"
        "pool = RewardPool({'d': RewardSpec(name='gsm8k')}, num_processes=1)\n"
        "print(pool.score([RewardRequest(id='a', domain='d', response='#### 72', task=task)])[0].reward.value)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.stdout, done.returncode) == ("1.0\n", 0), done.stderr


def test_a_pool_can_be_used_from_a_daemonic_process() -> None:
    code = (
        "import multiprocessing as m\n"
        "from roll.rewards.base import RewardSpec\n"
        "from roll.rewards.reward_pool import RewardPool\n"
        "def work():\n"
        "    with RewardPool({'d': RewardSpec(name='gsm8k')}, num_processes=1) as pool:\n"
        "        pool.wait_ready()\n"
        "    print('fine', flush=True)\n"
        "p = m.get_context('fork').Process(target=work, daemon=True)\n"
        "p.start(); p.join(30)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.stdout == "fine\n", done.stderr
