"""The recorded run that comes with the package, for `roll view --demo`."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent / "demo"


def demo_run() -> Path:
    """Return the folder of the run: the quickstart's, as docs/generate/view_demo.py has recorded it."""
    return HERE / "quickstart"
