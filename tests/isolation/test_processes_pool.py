"""A pool of processes, whatever is run in it: limits, ends, and what may come back."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.isolation.processes.child import ChildProcess, child_environment
from roll.isolation.processes.frames import Frames, packets
from roll.isolation.processes.limits import passed_environment
from roll.isolation.processes.process_pool import ProcessPool
from roll.isolation.processes.worker_process import Call, WorkerExit, WorkerProcess


class Words(ProcessPool[tuple[int, str, Future[Any]]]):
    """Sends words to processes."""

    name, handler, what = "word", "handlers:Obedient", "nothing"

    def __init__(self, folder: Path, *, timeout_s: float = 0.5, memory_mb: float = 0.0) -> None:
        limits = {"timeout_s": timeout_s, "start_timeout_s": 60.0, "memory_mb": memory_mb}
        super().__init__(str(folder), num_processes=1, max_assigned=1, **limits)

    def ask(self, word: str) -> Future[Any]:
        answer: Future[Any] = Future()
        self.post(lambda: self.enqueue((id(answer), word, answer)))
        return answer

    def answered(self, process: WorkerProcess[Any], call: Call, answer: tuple[Any, ...]) -> None:
        process.assigned.pop(call.key)[2].set_result(answer)
        self.assign_queued()

    def _begin(self, process: WorkerProcess[Any], item: tuple[int, str, Future[Any]]) -> None:
        process.assigned[item[0]] = item
        process.send(Call(item[0], (item[1],), item[1], f"during {item[1]}"))

    def _lost(self, items: Sequence[Any], ended: WorkerExit, successor: WorkerProcess[Any] | None) -> None:
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
        pool.shutdown()


def test_a_call_may_restart_its_clock(tmp_path: Path) -> None:
    pool = Words(tmp_path)
    try:
        assert pool.ask("slowly").result(30.0) == ("ok", "slowly")
    finally:
        pool.shutdown()


def test_an_answer_cannot_make_the_parent_run_code(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system, expected plain values"):
        Frames().feed(*packets(os.system, bytes(16)))
    pool = Words(tmp_path)
    try:
        with pytest.raises(RuntimeError, match=r"it holds a pathlib\.PosixPath, expected plain values"):
            pool.ask("object").result(30.0)
        assert pool.ask("again").result(30.0) == ("ok", "again")
    finally:
        pool.shutdown()


def sent(message: Any, secret: bytes = bytes(16)) -> bytes:
    return b"".join(packets(message, secret))


NO_MESSAGES = [
    b"x",
    bytes(8),
    bytes(32),
    struct.pack("!16sQQ", bytes(16), 1 << 62, 0) + b"x",
    sent([(1, "ok")]),
    sent([(1, "ok")], b"x" * 16),
    b"x" * 100_000,
]


@pytest.mark.parametrize("content", NO_MESSAGES, ids=range(len(NO_MESSAGES)))
def test_whatever_is_written_beside_an_answer_is_dropped_and_counted(tmp_path: Path, content: bytes) -> None:
    pool = Words(tmp_path, timeout_s=30.0)
    try:
        word = f"write {content.hex()}"
        assert pool.ask(word).result(30.0) == ("ok", word)
        assert pool.ask("again").result(30.0) == ("ok", "again")
        assert (pool.counters["restarts"], pool.counters["timeouts"], pool.counters["discarded"]) == (0, 0, 1)
    finally:
        pool.shutdown()


OTHER_ANSWERS: list[Any] = [5, [5], [(1, "ok")], [("x", "ok", "word")], [(999, "ok", "word")], {}, [], [[1, "ok"]]]


@pytest.mark.parametrize("message", OTHER_ANSWERS, ids=repr)
def test_an_answer_to_nothing_that_was_asked_is_dropped_and_counted(tmp_path: Path, message: Any) -> None:
    (tmp_path / "say").write_bytes(pickle.dumps(message))
    pool = Words(tmp_path, timeout_s=30.0)
    try:
        assert pool.ask("say").result(30.0) == ("ok", "say")
        assert pool.ask("again").result(30.0) == ("ok", "again")
        assert (pool.counters["restarts"], pool.counters["discarded"]) == (0, int(message != []))
    finally:
        pool.shutdown()


def test_a_message_in_pieces_survives_what_is_written_between_them() -> None:
    secret = b"s" * 16
    frames = Frames(secret)
    pieces = list(packets(b"y" * 200_000, secret))
    assert len(pieces) == 4
    found = []
    for piece in pieces:
        for packet in (b"garbage", b"x" * 40, sent([(1, "ok")]), piece):
            found += frames.feed(packet)
    assert found == [b"y" * 200_000]
    assert frames.discarded == 12


@pytest.mark.parametrize("word", ["fork", "fork and die", "fork in C", "fork and hang"])
def test_a_forked_child_never_answers(tmp_path: Path, word: str) -> None:
    pool = Words(tmp_path, timeout_s=30.0)
    try:
        for _ in range(3):
            assert pool.ask(word).result(30.0) == ("ok", word)
            for other in ("one", "two"):
                assert pool.ask(other).result(30.0) == ("ok", other)
        assert (pool.counters["restarts"], pool.counters["discarded"]) == (0, 0)
    finally:
        pool.shutdown()


def test_garbage_on_every_low_descriptor_changes_nothing(tmp_path: Path) -> None:
    """The memory that tells what runs was one of them: a time in the future held a hang for minutes."""
    pool = Words(tmp_path, timeout_s=0.5)
    started = time.monotonic()
    try:
        assert pool.ask("garbage").result(30.0) == ("ok", "garbage")
        with pytest.raises(RuntimeError, match=r"garbage and hang took over 0\.5 s"):
            pool.ask("garbage and hang").result(30.0)
        assert pool.ask("again").result(30.0) == ("ok", "again")
        assert time.monotonic() - started < 25.0
    finally:
        pool.shutdown()


def test_the_channel_has_a_high_number(tmp_path: Path) -> None:
    pool = Words(tmp_path)
    try:
        assert pool.ask("channel").result(30.0)[1] >= 100
    finally:
        pool.shutdown()


def test_memory_is_limited(tmp_path: Path) -> None:
    pool = Words(tmp_path, timeout_s=30.0, memory_mb=500.0)
    try:
        assert pool.ask("allocate").result(30.0) == ("ok", "MemoryError")
    finally:
        pool.shutdown()


def test_only_what_is_needed_is_passed_on() -> None:
    environment = {
        "PATH": "p", "HOME": "h", "LC_ALL": "C", "HF_HOME": "hub", "HF_TOKEN": "t", "OPENAI_API_KEY": "k", "MINE": "m",
        "AWS_SECRET_ACCESS_KEY": "s", "WANDB_API_KEY": "w", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    usual = {"PATH", "HOME", "LC_ALL", "HF_HOME", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM"}
    assert passed_environment(environment).keys() == usual
    assert passed_environment(environment, ["MINE", "OPENAI_API_KEY"]).keys() == usual | {"MINE", "OPENAI_API_KEY"}


@pytest.mark.parametrize("message", [5, ("ready",), ("ready", "much"), ("failed", 5), ("what", "word")])
def test_a_process_that_starts_with_an_unknown_message_is_replaced(tmp_path: Path, message: Any) -> None:
    (tmp_path / "write").write_bytes(pickle.dumps(message))
    pool = Words(tmp_path)
    try:
        pool.wait_ready()
        assert pool.ask("word").result(30.0) == ("ok", "word")
        assert pool.counters["restarts"] == 1
    finally:
        pool.shutdown()


@pytest.mark.parametrize("loads", [True, False])
def test_nobody_waits_for_ever_when_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    if not loads:
        (tmp_path / "exit").touch()
    started: list[ChildProcess] = []
    late: list[Future[Any]] = []

    def start(*arguments: Any) -> ChildProcess:
        if not started:
            started.append(ChildProcess(*arguments))
            return started[0]
        if not late:
            late.extend([pool.ask("late"), pool.ask("later")])
        raise OSError("no more processes")

    monkeypatch.setattr("roll.isolation.processes.worker_process.ChildProcess", start)
    pool = Words(tmp_path)
    try:
        asked = pool.ask("hang")
        with pytest.raises(RuntimeError, match="no more processes"):
            asked.result(10.0)
        assert len(late) == 2
        for answer in late:
            with pytest.raises(RuntimeError, match="no more processes"):
                answer.result(10.0)
    finally:
        pool.shutdown()


def test_shutdown_fails_what_is_under_way_and_what_waits(tmp_path: Path) -> None:
    pool = Words(tmp_path, timeout_s=60.0)
    asked = [pool.ask("hang"), pool.ask("waits")]
    pool.wait_ready()
    pool.shutdown()
    for answer in asked:
        with pytest.raises(RuntimeError, match="the word pool was shut down"):
            answer.result(0.0)
    with pytest.raises(RuntimeError, match="the word pool was shut down"):
        pool.ask("late")


@pytest.mark.parametrize("word", ["hang", "hold"])
def test_a_parent_that_is_killed_during_a_call_leaves_nothing_behind(tmp_path: Path, word: str) -> None:
    code = (
        "import time\n"
        "from pathlib import Path\n"
        "from test_processes_pool import Words\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "pool = Words(folder, timeout_s=60.0)\n"
        "pool.ask('grandchild').result(30.0)\n"
        f"pool.ask({word!r})\n"
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
