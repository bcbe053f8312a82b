"""Comparing whole runs of `toy.yaml`: what they logged and exported, a run that is killed, two ranks with one."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from fork_server import ForkServer
from toy import metrics_of

from roll.tracking.names import is_timing

OF_THE_WAY = ("sync/copied_gigabytes", "sync/gathered_gigabytes", "sync/delta_share")
"""Metrics of how weights travel, which differs from executor to executor."""
IMPORTED = (
    *("toy_process", "toy", "roll.pipelines.start", "roll.pipelines.workers.train_worker", "roll.strategies.hf.fsdp2"),
    *("roll.strategies.engines.hf.hf_infer", "transformers.models.llama.modeling_llama", "roll.pipelines.rl.agentic"),
)
"""What a run in a process of its own imports; it starts no thread."""


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics without what no two runs share."""
    return [{name: v for name, v in row.items() if not is_timing(name) and name not in OF_THE_WAY} for row in rows]


def logged(folder: Path) -> list[dict[str, Any]]:
    """Comparable rows that the run in a folder has logged."""
    return comparable(metrics_of(folder / "output" / "logs"))


def exported(folder: Path) -> dict[str, bytes]:
    """Every file of the model that a run has exported."""
    root = folder / "output" / "hf_model"
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@functools.cache
def _server() -> ForkServer:
    # As many threads as this process has: their number is part of what makes the bits.
    server = ForkServer(*IMPORTED, OMP_NUM_THREADS=os.environ["OMP_NUM_THREADS"])
    atexit.register(server.close)
    return server


def in_process(folder: Path, settings: tuple[str, ...], *overrides: str, moment: str = "", nth: int = 0) -> int:
    """Exit code of a run in a process of its own, which kills itself at the `nth` call of a `moment`."""
    server, arguments = _server(), (str(folder), moment, str(nth), *settings, *overrides)
    with tempfile.TemporaryFile() as errors:
        run = server.fork(f"import toy_process; toy_process.main(*{arguments!r})", server.environment, errors.fileno())
        code = run.wait(300)
        if code > 0:
            errors.seek(0)
            sys.stderr.write(errors.read().decode(errors="replace")[-4000:])
    return code
