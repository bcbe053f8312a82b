"""Every deliberate fault is caught: planted in a copy of the code, it makes one of the tests that reach it fail."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deliberate_faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
LEFT = (".git", ".venv*", "output", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Return a copy of the project, beside a link to the shared data if there is some."""
    folder = tmp_path_factory.mktemp("faults") / "project"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT))
    if (ROOT.parent / "shared").is_dir():
        (folder.parent / "shared").symlink_to(ROOT.parent / "shared")
    return folder


def run(folder: Path, tier: str, where: tuple[str, ...]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tier", tier]
    command += ["--strict-tier"]
    tests = [f"tests/{name}" for name in where]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    return done.returncode, done.stdout[-3000:]


def caught_by(folder: Path, fault: Fault) -> tuple[str, str] | None:
    """Return (tier, id) of the first test that fails, or None."""
    for tier in ("fast", "full"):
        code, output = run(folder, tier, fault.where)
        assert code in (0, 1, 5), f"{fault.name}: the tests did not run:\n{output}"
        if code == 1:
            first = next((line for line in output.splitlines() if line.startswith("FAILED ")), "")
            return tier, first.removeprefix("FAILED ").partition(" - ")[0]
    return None


@functools.cache
def passes_without_fault(folder: Path, where: tuple[str, ...]) -> bool:
    """Return whether the tests pass in the copy as it is; otherwise they would catch anything."""
    return all(run(folder, tier, where)[0] in (0, 5) for tier in ("fast", "full"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_deliberate_fault_is_caught(copy: Path, evidence_folder: Path, fault: Fault):
    path = copy / "roll" / fault.file
    text = path.read_text("utf-8")
    assert text.count(fault.old) == 1, f"{fault.file} has {text.count(fault.old)} times {fault.old!r}; mend the table"
    assert passes_without_fault(copy, fault.where), f"a test of {fault.where} fails without the fault"
    path.write_text(text.replace(fault.old, fault.new), "utf-8")
    try:
        caught = caught_by(copy, fault)
    finally:
        path.write_text(text, "utf-8")
    assert caught is not None, f"no test of {fault.where} notices: {fault.name}"
    with (evidence_folder / "faults.md").open("a", encoding="utf-8") as table:
        table.write(f"| {fault.name} | `{fault.file}` | {caught[0]} | `{caught[1]}` |\n")
