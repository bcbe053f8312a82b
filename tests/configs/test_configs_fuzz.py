"""A fixed sample of broken files: a clear error or a plan. `make evidence EVIDENCE=checker` breaks 20,000."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from config_fuzz import cases, shipped, verdict


def test_a_sample_of_broken_files_is_refused_or_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = shipped(tmp_path)
    few = files[::7]  # composing one takes most of the time
    sample = [*cases(30, 7, few, composed=False), *cases(120, 8, few, composed=True)]
    assert [said for case in sample if (said := verdict(case))] == []
