"""The notebooks run as they are, and are kept with what they gave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def code_cells(file: Path) -> list[dict]:
    return [cell for cell in json.loads(file.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_kept_executed(file: Path):
    cells = code_cells(file)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    text = "".join("".join(output.get("text", ())) for cell in cells for output in cell["outputs"])
    assert "mean reward" in text
    assert str(Path.home()) not in file.read_text("utf-8")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path):
    command = [sys.executable, str(ROOT / "tests" / "support" / "run_notebook.py"), str(file)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_there_are_two():
    assert len(NOTEBOOKS) == 2
