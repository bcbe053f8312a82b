"""Whole runs as processes: side by side, killed, interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")
REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ray_run.py")


def start(seconds: float, *how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(REPOSITORY), str(seconds), *how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tempfile.gettempdir(),
    )


def line_of(run: subprocess.Popen[str]) -> dict[str, Any]:
    assert run.stdout is not None
    line = run.stdout.readline()
    if not line:
        assert run.stderr is not None
        pytest.fail(f"the run ended: {run.stderr.read()}")
    return json.loads(line)


def family(pid: int) -> set[int]:
    """All living descendants of a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while fresh := {child for child, parent in parents.items() if parent in found} - found:
        found |= fresh
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    """Those that run and aren't zombies."""
    living = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            living.add(pid)
    return living


def gone_within(pids: set[int], seconds: float) -> set[int]:
    """Those that still live after so many seconds."""
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    return alive(pids)


def test_two_runs_at_once_do_not_disturb_each_other_even_when_one_is_killed() -> None:
    first, second = start(60, "forked"), start(8)
    try:
        one, two = line_of(first), line_of(second)
        assert one["reduced"] == two["reduced"] == [3.0, 3.0]
        assert not set(one["pids"]) & set(two["pids"])
        assert one["temp"] != two["temp"]

        orphans = family(first.pid)
        assert set(one["pids"]) <= orphans
        parents = [psutil.Process(pid).parent() for pids in (one["pids"], two["pids"]) for pid in pids]
        assert ["rank_parent" in " ".join(parent.cmdline()) for parent in parents] == [True, True, False, False]
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert gone_within(orphans, 10) == set(), "processes outlived the killed run"
        assert not Path(one["temp"]).exists(), "its folder did"

        assert line_of(second) == {"greetings": [f"hello still from actor {rank}" for rank in (0, 1)]}
        rest = family(second.pid)
        assert second.wait(30) == 0
        assert gone_within(rest, 10) == set()
        assert not Path(two["temp"]).exists(), "a run that ends leaves no folder"
    finally:
        for run in (first, second):
            run.kill()
            run.wait()


INTERRUPTED = [(signal.SIGINT, "interrupted\n", ""), (signal.SIGTERM, "terminated\n", "forked")]


@pytest.mark.parametrize(("number", "said", "how"), INTERRUPTED)
def test_an_interrupted_run_ends_its_workers_and_removes_its_folder(number: int, said: str, how: str) -> None:
    run = start(60, how)
    try:
        ready = line_of(run)
        workers = family(run.pid)
        run.send_signal(number)
        assert run.communicate(timeout=60) == ("", said), "neither a traceback nor a C++ stack of Ray"
        assert run.returncode == 128 + number
        assert gone_within(workers, 10) == set()
        assert not Path(ready["temp"]).exists()
    finally:
        run.kill()
        run.wait()
