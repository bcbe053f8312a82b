"""Files of a pinned release of another project, read from its wheel when a campaign runs: none of them is kept here."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "ROLL_PEER_WHEELS"
"""A folder with wheels that were fetched already."""


def unpacked(name: str, requirements: Path, folder: Path) -> Path:
    """Unpack the release of a package that a file of requirements pins, and return the folder of its files."""
    lines = requirements.read_text("utf-8").split()
    pinned = next(line for line in lines if line.startswith(f"{name}=="))
    version = pinned.partition("==")[2]
    wheels = Path(os.environ.get(VARIABLE, folder))
    if not list(wheels.glob(f"{name}-{version}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(wheels), pinned]
        subprocess.run(command, check=True)
    (wheel,) = wheels.glob(f"{name}-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "files")
    return folder / "files"
