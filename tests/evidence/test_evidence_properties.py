"""Large fuzzes: every property-based test again, with many more examples and new draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = os.environ.get("ROLL_EVIDENCE_EXAMPLES", "2000")
TESTS = Path(__file__).parents[1]


def test_every_property_holds_for_many_examples():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", "--examples", EXAMPLES, "--timeout", "0"]
    done = subprocess.run([*command, str(TESTS)], cwd=TESTS.parent, check=False)
    assert done.returncode == 0
