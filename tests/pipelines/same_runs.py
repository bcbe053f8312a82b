"""Comparing whole runs of the toy: what they logged, a run that is killed, one executor with the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from toy import metrics_of, run_toy, write_toy

from roll.tracking.names import is_timing

OF_THE_WAY = ("sync/copied_gigabytes", "sync/gathered_gigabytes", "sync/delta_share")
"""Metrics of how weights travel, which differs from executor to executor."""


def comparable(rows):
    """Rows of metrics without what no two runs share."""
    return [{name: v for name, v in row.items() if not is_timing(name) and name not in OF_THE_WAY} for row in rows]


def logged(folder: Path):
    """Comparable rows that the run in a folder has logged."""
    return comparable(metrics_of(folder / "output" / "logs"))


def in_process(folder: Path, settings: tuple[str, ...], *overrides: str, moment: str = "", nth: int = 0) -> int:
    """Exit code of a run in a process of its own, which kills itself at the `nth` call of a `moment`."""
    script = Path(__file__).with_name("toy_process.py")
    command = [sys.executable, str(script), str(folder), moment, str(nth), *settings, *overrides]
    return subprocess.run(command, capture_output=True, timeout=300, check=False).returncode


def check_ray_equals_inline(
    model: Path,
    folder: Path,
    settings: tuple[str, ...],
    *more: str,
    names: tuple[str, ...],
    write: Callable[[Path, Path], Path] = write_toy,
):
    """Two data-parallel ranks under Ray, with `more` for them, take the steps of one rank in this process.

    The runs are in `inline` and `ray` below the folder, where `write` puts what is played.
    """
    inline = run_toy(write(folder / "inline", model), *settings)
    ray = run_toy(
        write(folder / "ray", model),
        *settings,
        "executor=ray",
        "num_gpus_per_node=2",
        "actor_train.device_mapping='0-1'",
        "actor_train.training_args.gradient_accumulation_steps=1",
        *more,
    )
    for mine, theirs in zip(inline, ray, strict=True):
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5), name
        assert mine["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)
