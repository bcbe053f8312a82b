"""Many kills: runs that die at random moments, again and again, end with the numbers of one that never died."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from same_runs import exported, logged
from test_pipelines_resume import EVERYTHING
from toy import write_toy

KILLS = int(os.environ.get("ROLL_EVIDENCE_KILLS", "20"))
MOST_KILLS_OF_A_RUN = 4


def start(folder: Path) -> subprocess.Popen:
    script = Path(__file__).parents[1] / "pipelines" / "toy_process.py"
    command = [sys.executable, str(script), str(folder), "", "0", *EVERYTHING, "resume_from_checkpoint=auto"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, tmp_path_factory):
    """Return the folder of a run that nobody kills, its rows and its duration in seconds."""
    folder = write_toy(tmp_path_factory.mktemp("kills") / "whole", tiny_model)
    begun = time.monotonic()
    assert start(folder).wait(timeout=600) == 0
    return folder, logged(folder), time.monotonic() - begun


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_run_that_is_killed_at_random_moments_equals_one_that_never_was(uninterrupted, tiny_model, tmp_path, seed):
    whole, rows, seconds = uninterrupted
    draw = random.Random(seed)
    folder = write_toy(tmp_path / "killed", tiny_model)
    for _ in range(draw.randint(1, MOST_KILLS_OF_A_RUN)):
        process = start(folder)
        try:
            process.wait(timeout=draw.uniform(0.2, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert start(folder).wait(timeout=600) == 0
    assert logged(folder) == rows
    assert exported(folder) == exported(whole)
