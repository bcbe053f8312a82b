"""`roll plan --measure`: seconds of a step, from a short run of the real pipeline in a folder that goes away."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from roll.configs.schema.run_config import RunConfig
from roll.pipelines.run.stored_config import CONFIG_FILE, store_config

STEPS = 2
"""Steps of the run; the last is reported, as the first also loads and compiles."""
_DRY: dict[str, Any] = {
    "max_steps": STEPS, "num_train_epochs": None, "val_before_train": False, "eval_steps": 0, "save_steps": 0,
    "save_best": None, "export_model": False, "resume_from_checkpoint": False, "track_with": ("jsonl",),
    "tracker_kwargs": {}, "logging_dir": None, "rollout_dump_dir": None, "render_save_dir": None,
    "log_val_generations": 0, "profile_steps": (),
}  # fmt: skip
"""What a dry run leaves out, by key, in the pipelines that have it."""


def measured_step(config: RunConfig, folder: Path, *, timeout: float) -> dict[str, float]:
    """Run two steps and return the second one's seconds by phase; `step` is the whole.

    Args:
        config: with `folder` as its output_dir.
        folder: an empty one, for all that the run writes.
        timeout: seconds for the whole run, start included.

    Raises:
        ValueError: the run failed, or took longer.
    """
    names = {field.name for field in dataclasses.fields(config)}
    dry = dataclasses.replace(config, **{key: value for key, value in _DRY.items() if key in names})
    store_config(dry)
    command = [sys.executable, "-m", "roll.cli", "train", str(folder / CONFIG_FILE)]
    with open(folder / "dry_run.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"--measure: the dry run of {STEPS} steps took more than {timeout:g} s; give it longer with "
                "--measure_timeout, or fewer prompts with rollout_batch_size"
            ) from None
        finally:
            _end(process)
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if code:
        errors = [line for line in lines if line.startswith(("error:", "*"))] or lines[-3:]
        raise ValueError(f"--measure: the dry run failed: {' '.join(errors)[:2000]}")
    rows = [json.loads(line) for line in (dry.logging_path / "metrics.jsonl").read_text("utf-8").splitlines()]
    timed = [row for row in rows if row.get("step") == STEPS and "time/step" in row]
    if not timed:
        raise ValueError(f"--measure: the dry run ended before step {STEPS}: there is no more data than for one step")
    spans = {name.removeprefix("time/"): float(value) for name, value in timed[-1].items() if name.startswith("time/")}
    return {name: value for name, value in spans.items() if "/" not in name and not name.endswith("_share")}


def as_line(seconds: dict[str, float]) -> str:
    """Return the phases, the longest first, as one line."""
    parts = sorted(((v, k) for k, v in seconds.items() if k not in ("step", "controller")), reverse=True)
    shown = ", ".join(f"{name} {value:.2f} s" for value, name in parts if value >= 0.005)
    return f"measured here, step {STEPS} of a dry run: {seconds['step']:.2f} s ({shown})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the run and what it has started, if it still runs: asked first, then by force."""
    for number, patience in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
