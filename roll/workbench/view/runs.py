"""The files of a run as the page needs them, read again only where they have grown."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll.tracking.drops import DROPPED_FILE
from roll.tracking.jsonl import METRICS_FILE
from roll.tracking.live import EVENTS_FILE, LIVE_FILE, RUN_FILE
from roll.tracking.recorded_responses import logs_folder, rollouts_folder, steps_of
from roll.tracking.rollouts import KINDS

_RECENT_STEPS = 10
"""The last steps, whose mean time says how long the others will take."""
_MAX_LINES = 2000
"""Events and dropped episodes that are kept of a run, the latest ones."""


class JsonLines:
    """A file of JSON lines that grows. `each` is called once with every object; lines that are none are passed over."""

    def __init__(self, path: Path, each: Callable[[dict[str, Any]], None], reset: Callable[[], None]) -> None:
        self._path, self._each, self._reset = path, each, reset
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> None:
        """Take in what is new. A file that was replaced or cut is read from its start."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                if identity != self._identity or stat.st_size < self._offset:
                    self._identity, self._offset = identity, 0
                    self._reset()
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return
        complete = content.rfind(b"\n") + 1
        self._offset += complete
        for line in content[:complete].splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                self._each(record)


class Curves:
    """The metrics of a run, a column each: NaN where a step has none."""

    def __init__(self, path: Path) -> None:
        self.steps = array("q")
        self.values: dict[str, array[float]] = {}
        self._lines = JsonLines(path, self._add, self._clear)

    def read(self) -> None:
        """Take in new steps."""
        self._lines.read()

    def last(self, name: str) -> float | None:
        """Return the value of the last step; None where it has none."""
        column = self.values.get(name)
        return None if column is None or len(column) < len(self.steps) or math.isnan(column[-1]) else column[-1]

    def column(self, name: str) -> list[float | None]:
        """Return the values by step, None where there is none, or no finite one."""
        column = self.values[name]
        values = [value if math.isfinite(value) else None for value in column]
        return values + [None] * (len(self.steps) - len(values))

    def recent(self, name: str) -> float | None:
        """Return the mean of the last steps that have it."""
        values = [value for value in self.values.get(name, ())[-_RECENT_STEPS:] if math.isfinite(value)]
        return sum(values) / len(values) if values else None

    def _clear(self) -> None:
        self.steps, self.values = array("q"), {}

    def _add(self, record: dict[str, Any]) -> None:
        index = len(self.steps)
        self.steps.append(record.pop("step"))
        for name, value in record.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            column = self.values.setdefault(name, array("d"))
            column.extend([math.nan] * (index - len(column)))
            column.append(number)


class Run:
    """One run on disk, finished or under way. Thread-safe: requests are answered by several threads."""

    def __init__(self, number: int, folder: Path, name: str) -> None:
        self.number = number
        self.folder = folder.resolve()
        self.name = name
        self.logs = logs_folder(self.folder)
        self.lock = threading.RLock()
        self.curves = Curves(self.logs / METRICS_FILE)
        self._events: list[dict[str, Any]] = []
        self._drops: list[dict[str, Any]] = []
        self._event_lines = JsonLines(self.logs / EVENTS_FILE, self._events.append, self._events.clear)
        self._drop_lines = JsonLines(self.logs / DROPPED_FILE, self._drops.append, self._drops.clear)

    @property
    def rollouts(self) -> Path | None:
        """Return where its rollouts are; None: it has recorded none so far."""
        return rollouts_folder(self.folder)

    def about(self) -> dict[str, Any]:
        """Return what the run says of itself."""
        return _json(self.logs / RUN_FILE)

    def recorded(self) -> dict[str, list[int]]:
        """Return the steps with rollouts, by kind."""
        folder = self.rollouts
        return {kind: steps_of(folder, kind) if folder else [] for kind in KINDS}

    def version(self) -> str:
        """Return words that change when a file of the run does: of its metrics, what it does now, events, drops,
        itself, its rollouts; and its status."""
        names = (METRICS_FILE, LIVE_FILE, EVENTS_FILE, DROPPED_FILE, RUN_FILE)
        paths = [*(self.logs / name for name in names), self.rollouts or self.folder / "rollouts"]
        stamps = [f"{stat.st_mtime_ns:x}.{stat.st_size:x}" if (stat := _stat(p)) else "-" for p in paths]
        return " ".join([*stamps, _status(_json(self.logs / LIVE_FILE), self.about())])

    def state(self) -> dict[str, Any]:
        """Return what the run is doing, how far it is, and where its time goes."""
        with self.lock:
            self.curves.read()
            live, about = _json(self.logs / LIVE_FILE), self.about()
            steps, total = self.curves.steps, int(about.get("total_steps") or 0)
            step = max(int(steps[-1]) if steps else 0, int(live.get("step") or 0))
            status = _status(live, about)
            seconds = self.curves.recent("time/step")
            left = (total - step) * seconds if total and seconds and status == "running" else None
            groups = ("time/", "memory/", "rollout/", "throughput/", "env/")
            latest = {
                name: value for name in sorted(self.curves.values) if (value := self.curves.last(name)) is not None
            }
            return {
                "status": status,
                "outcome": live.get("outcome"),
                "doing": live.get("doing", []),
                "since": live.get("since", live.get("time")),
                "rollout": live.get("rollout", {}),
                "engines": live.get("engines", {}),
                "usage": live.get("usage", {}),
                "now": time.time(),
                "step": step,
                "total_steps": total,
                "step_seconds": seconds,
                "seconds_left": left,
                "latest": {name: value for name, value in latest.items() if name.startswith(groups)},
            }

    def events(self) -> list[dict[str, Any]]:
        """Return what happened, by step: warnings, failures, checkpoints, restarts of engines."""
        with self.lock:
            self._event_lines.read()
            self.curves.read()
            del self._events[:-_MAX_LINES]
            events = list(self._events)
            for index, step in enumerate(self.curves.steps):
                for name, kind in (("time/save", "checkpoint"), ("rollout/engine_restarts", "engine restart")):
                    column = self.curves.values.get(name, ())
                    if index < len(column) and column[index] > 0:
                        text = "" if kind == "checkpoint" else f"{column[index]:g} engines were replaced"
                        events.append({"step": int(step), "kind": kind, "text": text})
        return sorted(events, key=lambda event: event["step"])

    def traces(self) -> list[str]:
        """Return the profiles of the run's steps, which Perfetto opens, by their paths in its folder."""
        paths = [path.resolve() for path in sorted((self.logs / "profiler").glob("*.json.gz"))]
        inside = [path for path in paths if path.is_relative_to(self.folder) and path.name.endswith(".json.gz")]
        return [str(path.relative_to(self.folder)) for path in inside]

    def failures(self) -> list[dict[str, Any]]:
        """Return examples of what was dropped, the latest first."""
        with self.lock:
            self._drop_lines.read()
            del self._drops[:-_MAX_LINES]
            return self._drops[::-1]


def named_runs(folders: list[Path]) -> list[Run]:
    """Return runs with names that tell them apart. Raises `ValueError` for a folder that is no run's."""
    runs = []
    for number, folder in enumerate(folders):
        if not folder.is_dir():
            raise ValueError(f"there is no folder {str(folder)!r}")
        run = Run(number, folder, folder.resolve().name)
        if not (run.logs / METRICS_FILE).is_file() and not (run.logs / RUN_FILE).is_file() and run.rollouts is None:
            raise ValueError(
                f"{folder} has neither logs/metrics.jsonl nor rollouts; give the output_dir of a run "
                "(with jsonl in its track_with)"
            )
        runs.append(run)
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = "/".join(run.folder.parts[-2:])
    return runs


def _status(live: dict[str, Any], about: dict[str, Any]) -> str:
    if not live:
        return "unknown"
    if live.get("doing") == ["ended"]:
        return str(live.get("outcome", "finished"))
    if about.get("host") == socket.gethostname() and not _alive(live.get("pid")):
        return "stopped"
    return "running"


def _alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
