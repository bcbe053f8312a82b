"""The benchmark of this folder's code runs, at its smallest size."""

from __future__ import annotations

import runpy
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gae.py"


def test_the_benchmark_of_gae_prints_times_and_a_rounding_error(capsys):
    runpy.run_path(str(BENCHMARK))["main"](["--rows", "2", "--tokens", "9", "--repeats", "1"])
    printed = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert set(printed) == {"scan_seconds", "loop_seconds", "relative_error"}
    assert float(printed["relative_error"]) < 1e-6
