"""What a page needs to know of a run under way besides its metrics: `run.json`, `live.json` and `events.jsonl`.

    run.json       written once: name, steps to come, folder of the rollouts
    live.json      what the run is doing now, how far the step is, what its processes use; replaced every second
    events.jsonl   what a person should see on a curve: warnings and failures, a line each with the step

All of it stands in the folder of the logs. Writing costs microseconds and never fails a run.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.tracking.rollouts import clean
from roll.tracking.steplines import StepLines

RUN_FILE = "run.json"
LIVE_FILE = "live.json"
EVENTS_FILE = "events.jsonl"
_CHANGES_SECONDS = 0.2
"""Changes that follow each other sooner aren't written: nobody could read them."""
_ENDED = "ended"
_GAUGE_SECONDS = 1.0
"""Between two looks at what changes within a phase."""
_STOP_SECONDS = 5.0

_logger = logging.getLogger(__name__)


class LiveFiles:
    """One per run; `about` is what `run.json` says."""

    def __init__(self, folder: Path, about: Mapping[str, Any], *, resume_step: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._events = StepLines(folder / EVENTS_FILE, resume_step)
        self._written = 0.0
        self._step = resume_step or 0
        self._doing: list[str] = []
        self._since = time.time()
        self._gauges: Mapping[str, Any] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        _replace(folder / RUN_FILE, {"version": 1, "started": time.time(), "host": socket.gethostname(), **about})
        self.phase(("start",))

    def watch(self, gauges: Callable[[], Mapping[str, Any]]) -> None:
        """Look at what changes within a phase every second, in a thread of its own; nobody waits for it.

        Args:
            gauges: returns JSON values by name; called from that thread. If it fails once it isn't asked again.
        """
        self._thread = threading.Thread(target=self._poll, args=(gauges,), name="live", daemon=True)
        self._thread.start()

    def _poll(self, gauges: Callable[[], Mapping[str, Any]]) -> None:
        while not self._stop.wait(_GAUGE_SECONDS):
            try:
                values = gauges()
            except Exception:  # a page that shows less is no reason to end a run
                _logger.exception("live.json has no gauges from now on; the run goes on")
                return
            self.show(values)

    def show(self, gauges: Mapping[str, Any]) -> None:
        """Say what changes within a phase, JSON values by name; nothing once the run has ended."""
        with self._lock:
            if not self._stop.is_set():
                self._gauges = gauges
                self._live()

    def phase(self, doing: Sequence[str]) -> None:
        """Say what the run does now: names of timed spans, outermost first; none: between two."""
        now = time.time()
        with self._lock:
            self._doing, self._since = list(doing), now
            if now - self._written >= _CHANGES_SECONDS:
                self._written = now
                self._live()

    def step_done(self, step: int) -> None:
        """Say which step is over."""
        self._step, self._written = step, 0.0

    def event(self, step: int, kind: str, text: str) -> None:
        """Record what happened during a step."""
        self._events.append({"step": step, "kind": kind, "text": text, "time": time.time()})

    def end(self, outcome: str) -> None:
        """Say how the run ended: `finished`, `failed`. Only the first call counts."""
        if self._step < 0:
            return
        with self._lock:
            self._stop.set()
            self._doing, self._since, self._gauges = [_ENDED], time.time(), {}
            self._live(outcome=outcome)
            self._step = -1
        self._events.close()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _live(self, **more: Any) -> None:
        state = {"doing": self._doing, "since": self._since, "step": self._step, **self._gauges, **more}
        _replace(self._folder / LIVE_FILE, {**state, "time": time.time(), "pid": os.getpid()})


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(clean(content), ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        _logger.warning("%s can't be written: %s", path, error)
