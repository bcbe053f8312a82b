"""Runs of made-up things: the toy of the pipelines' tests, started as a user starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))


@pytest.fixture
def trained(tmp_path, tiny_model, monkeypatch, capsys) -> Callable[..., list[dict[str, Any]]]:
    """Train two steps of the toy in a folder of its own, by `roll train`; its rows of metrics.

    What the launcher prints is shown when it fails.
    """
    from toy import metrics_of, write_toy

    from roll.cli.__main__ import main

    monkeypatch.chdir(write_toy(tmp_path, tiny_model))

    def run(*overrides: str) -> list[dict[str, Any]]:
        status = main(["train", "toy", "max_steps=2", "export_model=false", *overrides])
        assert status == 0, capsys.readouterr().err
        return metrics_of(tmp_path / "output" / "logs")

    return run
