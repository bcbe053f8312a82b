"""What a page needs to know of a run under way besides its metrics: `run.json`, `live.json` and `events.jsonl`.

    run.json       written once: name, steps to come, folder of the rollouts
    live.json      what the run is doing now; replaced whenever that changes
    events.jsonl   what a person should see on a curve: warnings and failures, a line each with the step

All of it stands in the folder of the logs. Writing costs microseconds and never fails a run.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
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

_logger = logging.getLogger(__name__)


class LiveFiles:
    """One per run; `about` is what `run.json` says."""

    def __init__(self, folder: Path, about: Mapping[str, Any], *, resume_step: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._events = StepLines(folder / EVENTS_FILE, resume_step)
        self._written = 0.0
        self._step = resume_step or 0
        _replace(folder / RUN_FILE, {"version": 1, "started": time.time(), "host": socket.gethostname(), **about})
        self.phase(("start",))

    def phase(self, doing: Sequence[str]) -> None:
        """Say what the run does now: names of timed spans, outermost first; none: between two."""
        now = time.time()
        if now - self._written >= _CHANGES_SECONDS:
            self._written = now
            self._live({"doing": list(doing), "step": self._step})

    def step_done(self, step: int) -> None:
        """Say which step is over."""
        self._step, self._written = step, 0.0

    def event(self, step: int, kind: str, text: str) -> None:
        """Record what happened during a step."""
        self._events.append({"step": step, "kind": kind, "text": text, "time": time.time()})

    def end(self, outcome: str) -> None:
        """Say how the run ended: `finished`, `failed`. Only the first call counts."""
        if self._step >= 0:
            self._live({"doing": [_ENDED], "step": self._step, "outcome": outcome})
            self._step = -1
            self._events.close()

    def _live(self, state: Mapping[str, Any]) -> None:
        _replace(self._folder / LIVE_FILE, {**state, "time": time.time(), "pid": os.getpid()})


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(clean(content), ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        _logger.warning("%s can't be written: %s", path, error)
