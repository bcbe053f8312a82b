"""Faults are caught that are planted in a copy of the code: one of the tests that reach the line fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deliberate_faults import FAULTS, Fault
from drawn_faults import draw, seats
from planted_faults import Copy, Reach, Trial, reach

ROOT = Path(__file__).parents[2]
NUMBER, SEED = (int(os.environ.get(f"ROLL_EVIDENCE_{name}") or n) for name, n in (("FAULTS", 40), ("SEED", 35)))
SPARE = 8
"""So many are drawn for each that is planted, as no test of the fast tier reaches some."""


@pytest.fixture(scope="module")
def copy():
    made = Copy(ROOT)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Fault]]:
    return draw(ROOT / "roll", NUMBER, SEED, SPARE)


@pytest.fixture(scope="module")
def reached(drawn: dict[str, list[Fault]]) -> Reach:
    workers = ["-n", str(os.cpu_count() or 1), "--dist", "loadfile", "--no-loadscope-reorder"]
    faults = [*FAULTS, *(fault for of_package in drawn.values() for fault in of_package)]
    return reach(ROOT, faults, ["--tier", "fast", *workers], seconds=3600)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_deliberate_fault_is_caught(copy: Copy, reached: Reach, evidence_folder: Path, fault: Fault):
    assert judged(copy, fault, reached, evidence_folder), f"no test notices: {fault.name}"


def test_drawn_faults_are_caught(copy: Copy, reached: Reach, evidence_folder: Path, drawn: dict[str, list[Fault]]):
    """Some may change nothing that could be noticed; whoever reads the table judges the few that survive."""
    survivors = []
    for package, number in seats(ROOT / "roll", NUMBER).items():
        for fault in [fault for fault in drawn[package] if fault.name in reached.tests][:number]:
            if not judged(copy, fault, reached, evidence_folder):
                survivors.append(fault.name)
    assert len(survivors) <= NUMBER // 5, survivors


def judged(copy: Copy, fault: Fault, reached: Reach, folder: Path) -> bool:
    tier, test = Trial(copy, fault, reached).caught_by() or ("", "survives")
    with (folder / "faults.md").open("a", encoding="utf-8") as table:
        table.write(f"| {fault.name} | `{fault.file}` | {tier} | `{test}` |\n")
    return bool(tier)
