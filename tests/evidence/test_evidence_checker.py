"""Every shipped YAML broken at random: 4,000 files as they are read, and 16,000 once they are composed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from config_fuzz import cases, shipped, verdict

SEED = int(os.environ.get("ROLL_EVIDENCE_SEED", "0"))
COUNTS = {False: 4_000, True: 16_000}
"""Cases by whether Hydra has composed the file before it is broken."""


def test_every_broken_configuration_is_refused_or_planned(tmp_path, monkeypatch, evidence_folder):
    monkeypatch.chdir(tmp_path)
    files, faults, ran = shipped(tmp_path), [], 0
    for composed, count in COUNTS.items():
        for case in cases(count, SEED + composed, files, composed=composed):
            ran += 1
            if said := verdict(case):
                faults.append(said)
    report = f"{ran} cases, {len(faults)} faults\n" + "\n\n".join(faults)
    (evidence_folder / "checker.txt").write_text(report, encoding="utf-8")
    assert not faults, report[:5000]
