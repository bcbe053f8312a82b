"""What a run has left in its folder, for those who go on with it in Python."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.configs.schema.run_config import RunConfig
from roll.tracking.jsonl import METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE
from roll.tracking.recorded_responses import RecordedRollouts
from roll.tracking.steplines import read_steps


@dataclass(frozen=True, slots=True)
class RunResult:
    """The files of a run, read when they are asked for."""

    folder: Path
    """Its `output_dir`."""
    config: RunConfig = field(repr=False)
    """What it ran, every key."""

    @property
    def model_path(self) -> Path | None:
        """Return the trained model as a Hugging Face folder, which `from_pretrained` takes; None: none was written."""
        path = self.config.export_path
        return path if self.config.exports and (path / "config.json").is_file() else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return a dictionary for each row, by step: what docs/metrics.md lists. `pandas.DataFrame` takes the list."""
        return self._lines(METRICS_FILE)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Return some responses of each validation, as text, if `log_val_generations` asks for them."""
        return self._lines(SAMPLES_FILE)

    @property
    def summary(self) -> dict[str, float]:
        """Return the closing numbers; empty if the run hasn't ended well."""
        file = self.config.logging_path / SUMMARY_FILE
        if not file.is_file():
            return {}
        numbers: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
        return numbers

    @property
    def checkpoints(self) -> list[Path]:
        """Return folders of the complete checkpoints, the oldest first."""
        from roll.checkpoint import CheckpointStore

        return [checkpoint.path for checkpoint in reversed(CheckpointStore(self.config.checkpoint_path).complete())]

    @property
    def best_checkpoint(self) -> Path | None:
        """Return the folder of the checkpoint that `save_best` has chosen; None: there is none."""
        from roll.checkpoint import CheckpointStore

        best = CheckpointStore(self.config.checkpoint_path).best()
        return None if best is None else best.path

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric was logged, and its values."""
        points = [(row["step"], float(row[name])) for row in self.metrics if name in row]
        return [step for step, _ in points], [value for _, value in points]

    def rollouts(self, step: int | None = None) -> list[dict[str, Any]]:
        """Return the training rows of a step, or of all, as dictionaries: prompt, response, reward, token columns.

        Raises `ValueError` if the run kept none, or none of that step.
        """
        folder = self.config.extra_output_dirs.get("rollout_dump_dir")
        if not folder:
            raise ValueError("the run kept no rollouts; set rollout_dump_dir, e.g. to <output_dir>/rollouts")
        rows = list(RecordedRollouts(Path(folder)).rows(step))
        if not rows:
            raise ValueError(f"{folder} has no rollouts")
        return rows

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.config.logging_path / name
        if file.is_file():
            return read_steps(file)
        if "jsonl" not in self.config.track_with:
            raise ValueError(f"the run kept no {name}; add jsonl to track_with")
        return []
