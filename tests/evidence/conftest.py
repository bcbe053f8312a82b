"""Campaigns: `make evidence` runs them all, `make evidence EVIDENCE=kills` one; docs/testing.md says what they show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def evidence_folder(tmp_path_factory) -> Path:
    """Return where a campaign leaves its log: `$ROLL_EVIDENCE`, or a temporary folder."""
    folder = Path(os.environ.get("ROLL_EVIDENCE") or tmp_path_factory.mktemp("evidence"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
