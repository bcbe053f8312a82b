"""A pool of processes, whatever is run in it: limits, ends, and what may come back."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.processes.child import child_environment
from roll.processes.frames import Frames, frame
from roll.processes.process_pool import ProcessPool
from roll.processes.worker_process import Call, Ended, WorkerProcess


class Words(ProcessPool[tuple[int, str, Future[Any]]]):
    """Sends words to processes."""

    def __init__(self, folder: Path, *, timeout_s: float = 0.5) -> None:
        super().__init__(
            "word", "handlers:Obedient", str(folder), what="nothing", num_processes=1, timeout_s=timeout_s,
            start_timeout_s=60.0, max_assigned=1,
        )  # fmt: skip
        self.start()

    def ask(self, word: str) -> Future[Any]:
        answer: Future[Any] = Future()
        self.post(lambda: self.enqueue((id(answer), word, answer)))
        return answer

    def answered(self, process: WorkerProcess[Any], call: Call, answer: tuple[Any, ...]) -> None:
        process.assigned.pop(call.key)[2].set_result(answer)
        self.place()

    def _begin(self, process: WorkerProcess[Any], item: tuple[int, str, Future[Any]]) -> None:
        process.assigned[item[0]] = item
        process.send(Call(item[0], (item[1],), item[1], f"during {item[1]}"))

    def _lost(self, items: Sequence[Any], ended: Ended, successor: WorkerProcess[Any] | None) -> None:
        for item in items:
            item[2].set_exception(RuntimeError(ended.reason))

    def _abandon(self, item: tuple[int, str, Future[Any]], reason: str) -> None:
        item[2].set_exception(RuntimeError(reason))

    def _load_error(self, reason: str) -> Exception:
        return RuntimeError(reason)


def gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_call_that_takes_too_long_ends_with_all_that_was_started(tmp_path: Path) -> None:
    pool = Words(tmp_path)
    try:
        assert pool.ask("grandchild").result(30.0) == ("ok", "grandchild")
        with pytest.raises(RuntimeError, match=r"hang took over 0\.5 s"):
            pool.ask("hang").result(30.0)
        assert gone(int((tmp_path / "grandchild").read_text()))
        assert pool.ask("again").result(30.0) == ("ok", "again")
        assert (pool.counters["timeouts"], pool.counters["restarts"]) == (1, 1)
    finally:
        pool.shutdown("the test is over")


def test_a_call_may_restart_its_clock(tmp_path: Path) -> None:
    pool = Words(tmp_path)
    try:
        assert pool.ask("slowly").result(30.0) == ("ok", "slowly")
    finally:
        pool.shutdown("the test is over")


def test_an_answer_cannot_make_the_parent_run_code(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system, expected plain values"):
        Frames().feed(frame(os.system))
    pool = Words(tmp_path)
    try:
        with pytest.raises(RuntimeError, match=r"a message holds a pathlib\.PosixPath, expected plain values"):
            pool.ask("object").result(30.0)
        assert pool.ask("again").result(30.0) == ("ok", "again")
    finally:
        pool.shutdown("the test is over")


def test_shutdown_fails_what_is_under_way_and_what_waits(tmp_path: Path) -> None:
    pool = Words(tmp_path, timeout_s=60.0)
    asked = [pool.ask("hang"), pool.ask("waits")]
    pool.wait_ready()
    pool.shutdown("the test is over")
    for answer in asked:
        with pytest.raises(RuntimeError, match="the test is over"):
            answer.result(0.0)
    with pytest.raises(RuntimeError, match="the test is over"):
        pool.ask("late")


def test_a_parent_that_is_killed_during_a_call_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from pathlib import Path\n"
        "from test_processes_pool import Words\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "pool = Words(folder, timeout_s=60.0)\n"
        "pool.ask('grandchild').result(30.0)\n"
        "pool.ask('hang')\n"
        "time.sleep(0.3)\n"
        "print(pool._processes[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=child_environment(), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()), int((tmp_path / "grandchild").read_text())]
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    try:
        assert [gone(pid) for pid in pids] == [True, True]
    finally:
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
