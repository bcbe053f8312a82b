"""`jsonl`: `metrics.jsonl`, one object a step; `samples.jsonl`; and `summary.json` at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll.tracking.base import Destination, Sample, Tracker
from roll.tracking.names import is_timing
from roll.tracking.steplines import StepLines, read_steps

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"


class JsonlTracker(Tracker):
    """Plain files that any tool reads. Non-finite numbers are the strings `nan`, `inf`, `-inf`."""

    essential = True  # the run's own record, which `roll plot` and a resumed run read

    def __init__(self, destination: Destination) -> None:
        self._folder = destination.folder
        self._metrics = StepLines(destination.folder / METRICS_FILE, destination.resume_step)
        self._samples = StepLines(destination.folder / SAMPLES_FILE, destination.resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line, keys sorted so that equal runs give equal files."""
        self._metrics.append({"step": step, **dict(sorted(metrics.items()))})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._samples.append({"step": step, **asdict(sample)})

    def finish(self, summary: Mapping[str, float]) -> None:
        self._metrics.close()
        self._samples.close()
        if summary:
            text = json.dumps(dict(summary), indent=2, sort_keys=True)
            (self._folder / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")


def comparable_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl` without timings: equal for two runs that computed the same."""
    records = read_steps(path)
    return [{name: value for name, value in record.items() if not is_timing(name)} for record in records]
