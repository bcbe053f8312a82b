"""A thousand pictures that can't be used: a sentence each, in bounded memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL")
from bad_pictures import BAD


def test_a_thousand_bad_pictures_get_a_sentence_each() -> None:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-W", "ignore", str(tests / "bad_pictures.py"), "1000"]
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(found["outcomes"].values()) == 1000
    assert {name for name in found["outcomes"] if name.endswith("read")} <= {"damaged: read"}, found
    assert {f"{name}: refused" for name in BAD} <= set(found["outcomes"])
    assert found["grown_mib"] < 1200
    assert found["slowest_s"] < 20
