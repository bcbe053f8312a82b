"""What left the run without being trained on: counted by reason, with examples in `dropped.jsonl`."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.tracking.steplines import StepLines

DROPPED_FILE = "dropped.jsonl"
_EXAMPLES = 3
_TRACEBACK_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: |$)")


class DropLog:
    """Nothing is dropped in silence: `add` each item as it goes, `close_step` once a step.

    Counts are per step and depend on nothing before it, so a resumed run reports the same ones.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        """Open the file in `folder`; all items are counted, the first of a step and reason are written out."""
        self._lines = StepLines(folder / DROPPED_FILE, resume_step)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._examples: list[dict[str, Any]] = []

    def add(self, reason: str, item: str, detail: str = "", sample: Mapping[str, Any] | None = None) -> None:
        """Count a dropped item: a task, trajectory or row id, or `file:line`.

        `reason` is one word, which names `dropped/<reason>`; `detail` says why this one, `sample` (JSON values) what it
        looked like.
        """
        assert reason.isidentifier(), f"a reason is one word, got {reason!r}"
        with self._lock:
            self._counts[reason] += 1
            if self._counts[reason] <= _EXAMPLES:
                example = {"reason": reason, "item": item, "detail": detail, "sample": dict(sample or {})}
                self._examples.append(example)

    def close_step(self, step: int) -> dict[str, float]:
        """Write the examples since the last call, and return the counts by metric name."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            examples, self._examples = self._examples, []
        for example in examples:
            self._lines.append({"step": step, **example, "count": counts[example["reason"]]})
        return {f"dropped/{reason}": float(count) for reason, count in sorted(counts.items())}

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def last_words(error: str) -> str:
    """Return the exception of an error's text, with file and line where it holds a traceback."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    frames = [(i, match) for i, line in enumerate(lines) if (match := _TRACEBACK_LINE.match(line))]
    if not frames:
        return lines[0]
    last, frame = frames[-1]
    exception = next((line for line in lines[last + 1 :] if _EXCEPTION.match(line)), lines[-1])
    return f"{exception} ({frame['file']}, line {frame['line']})"
