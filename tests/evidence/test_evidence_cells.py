"""The cells of products that the full tier leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from thinned import THINNED

TESTS = Path(__file__).parents[1]


def test_all_cells_of_the_thinned_products_pass():
    files = sorted({f"tests/{test.partition('::')[0]}" for test in THINNED})
    command = [sys.executable, "-m", "pytest", "-q", "--tier", "evidence", "--strict-tier", *files]
    assert subprocess.run(command, cwd=TESTS.parent, check=False).returncode == 0
