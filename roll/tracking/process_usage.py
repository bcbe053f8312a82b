"""Memory and processor time of a run's processes by role, as far as they are on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

Processes = Mapping[str, Sequence[tuple[str, int]]]
"""Role -> host and process id of each rank."""

CONTROLLER = "controller"
OTHERS = "other processes"
"""Descendants of the controller that are no role's: environments, rewards, Ray itself."""
_SCAN_SECONDS = 10.0
"""Between two scans for processes."""
_MAX_CPU_SHARE = 0.005
"""Of one core: what reading may cost. Where there are many processes they are read less often."""


@dataclass
class _Row:
    """What is known of the processes of one row."""

    processes: dict[int, psutil.Process] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)
    """Processor seconds of each when it was last looked at."""
    elsewhere: int = 0


class RoleUsage:
    """Reads what each role's processes use; the processes that a rank has started itself count as its own.

    Args:
        roles: says which processes there are; asked again every few seconds.
        clock: seconds, for tests.
    """

    def __init__(self, roles: Callable[[], Processes], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._roles = roles
        self._clock = clock
        self._devices = _Devices()
        self._rows: dict[str, _Row] = {}
        self._scanned: float | None = None
        self._read_at: float | None = None
        self._wait = 0.0
        self._last: dict[str, dict[str, Any]] = {}

    def read(self) -> dict[str, dict[str, Any]]:
        """Return by row (a role, several that share a process, `controller`, `other processes`):

        `processes`; `memory_gib`, resident, where shared pages count for each; `cores`, the processors that were busy
        on average since the last reading, absent the first time; `elsewhere`, ranks on other machines, of which nothing
        is known; `devices`: NVIDIA devices in use, each `index`, `memory_gib` of these processes, `total_gib`,
        `utilisation` (fraction, of all processes).
        """
        now = self._clock()
        if self._read_at is not None and now - self._read_at < self._wait:
            return self._last
        cost = time.thread_time()
        if self._scanned is None or now - self._scanned >= _SCAN_SECONDS:
            self._scan()
            self._scanned = now
        seconds = None if self._read_at is None else now - self._read_at
        used = self._devices.read()
        self._last = {name: _read(row, seconds, used) for name, row in self._rows.items()}
        self._read_at, self._wait = now, (time.thread_time() - cost) / _MAX_CPU_SHARE
        return self._last

    def _scan(self) -> None:
        here, own = socket.gethostname(), os.getpid()
        children: dict[int, list[int]] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                children.setdefault(process.ppid(), []).append(process.pid)
        owners: dict[int, list[str]] = {}
        elsewhere: dict[str, int] = {}
        for role, ranks in self._roles().items():
            for host, pid in ranks:
                if host == here:
                    owners.setdefault(pid, []).append(role)
                else:
                    elsewhere[role] = elsewhere.get(role, 0) + 1
        by_role: dict[str, set[int]] = {}
        for pid, roles in owners.items():
            inside = {pid} if pid == own else _below(pid, children, set(owners) - {pid})
            by_role.setdefault(", ".join(dict.fromkeys(roles)), set()).update(inside)
        if own not in owners:
            by_role.setdefault(CONTROLLER, set()).add(own)
        taken = {pid for pids in by_role.values() for pid in pids}
        by_role[OTHERS] = _below(own, children, set()) - taken
        old, self._rows = self._rows, {}
        for name, pids in by_role.items():
            if pids:
                self._rows[name] = _row(pids, old.get(name, _Row()))
        for role, count in elsewhere.items():
            self._rows.setdefault(role, _Row()).elsewhere = count


def _below(pid: int, children: Mapping[int, Sequence[int]], without: set[int]) -> set[int]:
    """Return a process and its descendants, but not those below the processes in `without`."""
    below, left = set(), [pid]
    while left:
        one = left.pop()
        if one not in below and one not in without:
            below.add(one)
            left += children.get(one, ())
    return below


def _row(pids: set[int], old: _Row) -> _Row:
    row = _Row()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            row.processes[pid] = old.processes.get(pid) or psutil.Process(pid)
            if pid in old.busy:
                row.busy[pid] = old.busy[pid]
    return row


def _read(row: _Row, seconds: float | None, used: Mapping[int, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    memory, busy, known = 0, 0.0, False
    devices: dict[int, dict[str, Any]] = {}
    for pid, process in list(row.processes.items()):
        try:
            with process.oneshot():
                memory += process.memory_info().rss
                times = process.cpu_times()
        except psutil.Error:  # it has ended
            del row.processes[pid]
            continue
        spent = times.user + times.system
        if pid in row.busy:
            busy, known = busy + max(spent - row.busy[pid], 0.0), True
        row.busy[pid] = spent
        for device in used.get(pid, ()):
            same = devices.setdefault(device["index"], {**device, "memory_gib": 0.0})
            same["memory_gib"] = round(same["memory_gib"] + device["memory_gib"], 3)
    result: dict[str, Any] = {"processes": len(row.processes), "memory_gib": round(memory / 2**30, 3)}
    if known and seconds:
        result["cores"] = round(busy / seconds, 2)
    if row.elsewhere:
        result["elsewhere"] = row.elsewhere
    if devices:
        result["devices"] = [devices[index] for index in sorted(devices)]
    return result


class _Devices:
    """NVIDIA devices by the processes that use them; nothing without nvidia-ml-py, or without a device."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml
        except Exception:  # noqa: BLE001 - no package, no library, no device: there is nothing to show
            self._handles = []

    def read(self) -> dict[int, list[dict[str, Any]]]:
        """Return by process id what it has on each device."""
        by_pid: dict[int, list[dict[str, Any]]] = {}
        for index, handle in enumerate(self._handles):
            try:
                total = self._nvml.nvmlDeviceGetMemoryInfo(handle).total
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except self._nvml.NVMLError:
                continue
            for process in processes:
                device = {
                    "index": index,
                    "memory_gib": round((process.usedGpuMemory or 0) / 2**30, 3),
                    "total_gib": round(total / 2**30, 1),
                    "utilisation": busy / 100,
                }
                by_pid.setdefault(process.pid, []).append(device)
        return by_pid
