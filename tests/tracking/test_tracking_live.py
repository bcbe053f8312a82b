"""What is said of a run under way: changes within a phase, and what each role's processes use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.tracking import live as live_module
from roll.tracking.live import LiveFiles
from roll.tracking.process_usage import CONTROLLER, OTHERS, RoleUsage

HERE = (socket.gethostname(), os.getpid())


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing came within {seconds} s")


def said(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "live.json").read_text())


def test_what_changes_within_a_phase_is_said_every_second_and_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(live_module, "_GAUGE_SECONDS", 0.05)
    files = LiveFiles(tmp_path, {}, resume_step=None)
    done = [0]
    files.watch(lambda: {"rollout": {"train": {"groups_done": done[0]}}})
    time.sleep(0.25)
    files.phase(["step", "generate"])
    done[0] = 3
    wait_for(lambda: said(tmp_path).get("rollout") == {"train": {"groups_done": 3}})
    now = said(tmp_path)
    assert now["doing"] == ["step", "generate"] and now["since"] <= now["time"]
    files.end("finished")
    last = said(tmp_path)
    assert (last["doing"], last["outcome"]) == (["ended"], "finished") and "rollout" not in last
    assert not [thread for thread in threading.enumerate() if thread.name == "live"]


def test_gauges_that_fail_or_hang_hold_nothing_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(live_module, "_GAUGE_SECONDS", 0.01)
    monkeypatch.setattr(live_module, "_STOP_SECONDS", 0.1)
    (tmp_path / "fails").mkdir()
    failing = LiveFiles(tmp_path / "fails", {}, resume_step=None)
    failing.watch(lambda: 1 // 0)
    wait_for(lambda: "live.json has no gauges from now on; the run goes on" in caplog.text)
    failing.end("finished")
    assert said(tmp_path / "fails")["outcome"] == "finished"
    forever, asked = threading.Event(), threading.Event()

    def hang() -> dict[str, Any]:
        asked.set()
        forever.wait(30)
        return {"late": True}

    hanging = LiveFiles(tmp_path / "hangs", {}, resume_step=None)
    hanging.watch(hang)
    assert asked.wait(10)
    begun = time.monotonic()
    hanging.phase(["step"])
    hanging.end("failed")
    assert time.monotonic() - begun < 5
    forever.set()
    time.sleep(0.1)
    assert said(tmp_path / "hangs")["outcome"] == "failed", "a late answer is not written over the end"


def test_a_role_is_its_ranks_and_what_they_have_started(monkeypatch):
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); input()"
    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        roles = {"actor_train": [(HERE[0], rank.pid), ("elsewhere", 1)], "reference": [("elsewhere", 2)]}
        found = wait_for(
            lambda: two if (two := RoleUsage(lambda: roles).read())["actor_train"]["processes"] == 2 else 0
        )
        assert found["actor_train"]["elsewhere"] == 1 and found["actor_train"]["memory_gib"] > 0.005
        assert found["reference"] == {"processes": 0, "memory_gib": 0.0, "elsewhere": 1}
        assert found[CONTROLLER]["processes"] == 1
        assert found[OTHERS]["processes"] >= 1, "the other child is no role's"
    finally:
        for process in (rank, other):
            process.communicate(b"\n", timeout=30)


def test_roles_that_share_a_process_are_one_row_with_the_cores_that_were_busy():
    seconds = [0.0]
    usage = RoleUsage(lambda: {"actor_train": [HERE], "actor_infer": [HERE]}, clock=lambda: seconds[0])
    first = usage.read()
    row = first["actor_train, actor_infer"]
    assert CONTROLLER not in first and row["processes"] == 1 and "cores" not in row
    spent = time.process_time()
    while time.process_time() - spent < 0.3:
        pass
    seconds[0] = 100.0
    busy = usage.read()["actor_train, actor_infer"]["cores"]
    assert 0.0 <= busy <= 0.05, "0.3 processor seconds and a little more, of 100 seconds"


def test_reading_costs_no_more_than_its_share():
    seconds, cost = [0.0], [0.0]
    usage = RoleUsage(lambda: {"actor_train": [HERE]}, clock=lambda: seconds[0])
    begun = time.thread_time()
    for _ in range(60):  # a minute of looks
        seconds[0] += 1.0
        usage.read()
    cost[0] = time.thread_time() - begun
    assert cost[0] < 0.02 * 60, f"{cost[0]:.3f} processor seconds of 60"


def test_devices_are_shown_where_there_are_some(monkeypatch):
    class Nvml:
        NVMLError = RuntimeError

        @staticmethod
        def nvmlDeviceGetMemoryInfo(handle):
            return type("Memory", (), {"total": 80 * 2**30})

        @staticmethod
        def nvmlDeviceGetUtilizationRates(handle):
            return type("Rates", (), {"gpu": 75})

        @staticmethod
        def nvmlDeviceGetComputeRunningProcesses(handle):
            if handle == "broken":
                raise RuntimeError("lost")
            return [type("Process", (), {"pid": os.getpid(), "usedGpuMemory": 12 * 2**30})]

    usage = RoleUsage(lambda: {"actor_infer": [HERE]})
    usage._devices._nvml, usage._devices._handles = Nvml, ["a", "broken"]
    devices = usage.read()["actor_infer"]["devices"]
    assert devices == [{"index": 0, "memory_gib": 12.0, "total_gib": 80.0, "utilisation": 0.75}]


@pytest.mark.parametrize("roles", [{}, {"actor_train": [(HERE[0], 2**22 + 7)]}])
def test_processes_that_are_gone_are_passed_over(roles):
    found = RoleUsage(lambda: roles).read()
    assert found[CONTROLLER]["processes"] == 1
    assert found.get("actor_train", {"processes": 0})["processes"] == 0
