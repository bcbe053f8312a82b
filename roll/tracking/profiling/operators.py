"""What torch computed in the calls of one rank: torch's profiler around each, one file for all of a step.

A process can be watched by one profiler at a time. Where calls overlap (an engine that answers several at once, or
roles that share a process), the second is a span without operators, and counted.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.tracking.profiling.chrome import Event, label, micros, named, write_trace
from roll.tracking.profiling.profile_plan import RankPlan

_PROCESS = threading.Lock()
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_HOST = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "overhead")
_SHOWN_ARGS = ("Input Dims", "Input type", "Call stack", "stream", "correlation", "bytes", "grid", "block", "Bytes")


@dataclass(slots=True)
class OperatorTime:
    """One operator, or kernel, of a rank in a step."""

    name: str
    calls: int = 0
    own: float = 0.0
    """Time in it without the operators that it calls itself, in the unit of the events."""
    total: float = 0.0


class OperatorTrace:
    """The operators of one rank in one step. Times of its events are nanoseconds since 1970."""

    def __init__(self, plan: RankPlan, track: str) -> None:
        self._plan = plan
        self._track = track
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self.unwatched = 0
        """Calls whose operators weren't recorded: another one was being watched, or the file was full."""

    def start(self) -> Any:
        """Begin to record what this thread and the accelerator do; None where that can't be. `finish` takes it."""
        if len(self._events) >= self._plan.max_events or not _PROCESS.acquire(blocking=False):
            self.unwatched += 1
            return None
        try:
            profiler = self._profiler()
            profiler.__enter__()
        except BaseException:
            _PROCESS.release()
            raise
        return profiler

    def finish(self, profiler: Any) -> None:
        """Keep what was recorded since `start`, on the same thread."""
        try:
            profiler.__exit__(None, None, None)
            events = _exported(profiler)
        finally:
            _PROCESS.release()
        with self._lock:
            self._events += events

    def _profiler(self) -> Any:
        # Kineto would write lines to the standard error at each start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        import torch
        from torch.autograd.profiler import profile

        wanted = self._plan.activities or ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
        # torch.profiler.profile is made of this, imports torch._inductor (seconds) before, and makes Python objects of
        # all events after, which takes minutes for a hundred thousand.
        return profile(
            use_cpu="cpu" in wanted,
            use_device="cuda" if "cuda" in wanted else None,
            record_shapes=self._plan.record_shapes,
            with_stack=self._plan.with_stack,
            use_kineto=True,
        )

    def write(self, path: Path, start_ns: int) -> dict[str, Any]:
        """Write the trace, the longest events if there are too many; return the totals by operator."""
        hosts = [event for event in self._events if event["cat"] in _HOST]
        devices = [event for event in self._events if event["cat"] in _DEVICE]
        retained = longest(self._events, self._plan.max_events)
        about = {
            "track": self._track,
            "step": self._plan.step,
            "cut_events": len(self._events) - len(retained),
            "unwatched_calls": self.unwatched,
        }
        write_trace(path, [*_relabelled(retained, self._track, start_ns)], about)
        totals = {"operators": _rows(operator_times(hosts)), "kernels": _rows(operator_times(devices))}
        return {**about, **totals, "file": path.name, "events": len(retained)}


def longest(events: Sequence[Event], limit: int) -> Sequence[Event]:
    """Return the events that last longest: what is left still nests."""
    return events if len(events) <= limit else sorted(events, key=lambda event: -event["dur"])[:limit]


def operator_times(events: Iterable[Event]) -> list[OperatorTime]:
    """Return the totals by name, the greatest own time first. Events of one thread nest; Python frames are left out."""
    totals: dict[str, OperatorTime] = {}
    threads: dict[Any, list[Event]] = {}
    for event in events:
        if event["cat"] != "python_function":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for own in threads.values():
        open_: list[tuple[float, OperatorTime]] = []
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_ and open_[-1][0] <= event["ts"]:
                open_.pop()
            total = totals.setdefault(event["name"], OperatorTime(event["name"]))
            total.calls += 1
            total.own += event["dur"]
            if all(outer is not total for _, outer in open_):
                total.total += event["dur"]
            if open_:
                open_[-1][1].own -= event["dur"]
            open_.append((end, total))
    return sorted(totals.values(), key=lambda total: -total.own)


def _rows(times: Sequence[OperatorTime], limit: int = 100) -> list[dict[str, Any]]:
    return [
        {"name": t.name, "calls": t.calls, "own_seconds": round(t.own / 1e9, 9), "seconds": round(t.total / 1e9, 9)}
        for t in times[:limit]
    ]


def _exported(profiler: Any) -> list[Event]:
    """Return the events of a stopped profiler that are slices of time."""
    with tempfile.TemporaryDirectory(prefix="roll-profile-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        with open(file, encoding="utf-8", errors="replace") as stream:
            trace = json.load(stream)
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    return [
        {
            "name": event["name"],
            "cat": event["cat"],
            "pid": event["pid"],
            "tid": event["tid"],
            # Whole numbers: as a float, microseconds since 1970 are exact to a quarter only.
            "ts": base_ns + round(float(event["ts"]) * 1000),
            "dur": round(float(event["dur"]) * 1000),
            "args": {key: value for key, value in event.get("args", {}).items() if key in _SHOWN_ARGS},
        }
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in (*_HOST, *_DEVICE)
    ]


def _relabelled(events: Sequence[Event], track: str, start_ns: int) -> Iterator[Event]:
    """Give the rank's host threads one process with its name, and each accelerator another."""
    homes: dict[Any, int] = {}
    threads: dict[Any, dict[Any, int]] = {}
    for event in events:
        key = ("device", event["pid"]) if event["cat"] in _DEVICE else ("host", 0)
        homes.setdefault(key, len(homes) + 1)
        threads.setdefault(key, {}).setdefault(event["tid"], len(threads[key]) + 1)
    for key, pid in homes.items():
        device = key[0] == "device"
        name = f"{label(track)}, accelerator {key[1]}" if device else label(track)
        word = "stream" if device else "thread"
        yield from named(pid, name, {tid: f"{word} {real}" for real, tid in threads[key].items()})
    for event in events:
        key = ("device", event["pid"]) if event["cat"] in _DEVICE else ("host", 0)
        ids = {"pid": homes[key], "tid": threads[key][event["tid"]], "ts": micros(event["ts"], start_ns)}
        args = {"args": event["args"]} if event["args"] else {}
        yield {"ph": "X", "name": event["name"], "cat": event["cat"], **ids, "dur": event["dur"] / 1000, **args}
