"""Nsight Systems around the workers: what `nsys` is told.

Recording begins and ends where a profiled step does (`cudaProfilerStart`), so that a report has these steps alone. With
`executor: ray` each chosen rank's process is started under `nsys` by Ray; with `inline` the command is.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

OPTIONS = {
    "trace": "cuda,nvtx,osrt,cudnn,cublas",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "repeat",
    "cuda-graph-trace": "node",
    "force-overwrite": "true",
}


def ray_options(folder: Path, track: str) -> dict[str, str]:
    """Return what Ray's runtime environment is told (`_nsight`), for a report of this rank in the folder."""
    return {**OPTIONS, "o": str(folder.absolute() / f"nsight.{track}.%p")}


def command(folder: Path, arguments: Sequence[str]) -> str:
    """Return the shell command that starts a run in one process under `nsys`."""
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    return shlex.join(["nsys", "profile", *options, "-o", str(folder / "nsight.%p"), *arguments])
