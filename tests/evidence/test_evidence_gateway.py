"""The endpoint's own cost, two hundred streams at once, and ten thousand requests that no honest client sends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_gateway_hostile as hostile
from hypothesis import HealthCheck, given, settings

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(3600)
def test_a_request_costs_at_most_three_milliseconds_at_a_hundred_sessions(evidence_folder) -> None:
    """Beyond a server that does nothing. On a machine with nothing else to do: other processes count, too."""
    command = [sys.executable, ROOT / "benchmarks" / "gateway.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    (evidence_folder / "gateway.md").write_text(done.stdout, encoding="utf-8")
    cost = dict(re.findall(r"^(server|episodes): ([\d.]+) ms of its own", done.stdout, re.MULTILINE))
    assert float(cost["server"]) <= 3
    assert float(cost["episodes"]) <= 3
    assert "2000 of 2000 streams arrived whole" in done.stdout
    grown = re.search(r"memory grew by (-?[\d.]+) MiB", done.stdout)
    assert grown is not None and float(grown[1]) < 5


@pytest.mark.timeout(3600)
def test_ten_thousand_mutated_requests_do_no_harm() -> None:
    door = hostile.Door()

    @settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(hostile.mutated())
    def ask(asked) -> None:
        hostile.ask_mutated(door, *asked)

    ask()
    door.loop.close()
