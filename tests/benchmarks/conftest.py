"""Benchmarks as they are called from the command line, in this process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch, capsys) -> Callable[..., str]:
    """`bench("layouts", "--families", "llama")` runs `main` of that file and returns what it printed."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for path in BENCHMARKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def runs_start_here(monkeypatch) -> None:
    """Have the runs that a benchmark starts by a command happen in this process, which has imported it all."""
    from roll.cli.__main__ import main
    from roll.cli.train import start_pipeline

    start = subprocess.run

    def run(command, *, check=False, **options):
        if Path(command[1]).name == "start_pipeline.py":
            in_process = functools.partial(start_pipeline, command[2:], BENCHMARKS.parent / "examples")
        elif command[1:3] == ["-m", "roll.cli"]:
            in_process = functools.partial(main, command[3:])
        else:
            return start(command, check=check, **options)
        with contextlib.redirect_stdout(sys.stderr):
            code = in_process()
        if check and code:
            raise subprocess.CalledProcessError(code, command)
        return subprocess.CompletedProcess(command, code, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(resource, "RUSAGE_CHILDREN", resource.RUSAGE_SELF)
