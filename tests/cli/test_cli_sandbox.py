"""`roll sandbox test`."""

from __future__ import annotations

import pytest

from roll.cli import sandbox
from roll.cli.__main__ import main


def test_attacks_are_run_and_those_that_succeed_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    few = {name: sandbox.ATTACKS[name] for name in ("read the list of users", "never end", "output without end")}
    monkeypatch.setattr(sandbox, "ATTACKS", few)
    assert main(["sandbox", "test", "unconfined"]) == 1
    printed = capsys.readouterr().out
    assert "read the list of users" in printed
    assert printed.count("NOT CONTAINED") == 1
    assert "2 of 3 contained" in printed


def test_a_sandbox_that_does_not_work_is_an_error_of_the_user(capsys: pytest.CaptureFixture[str]):
    assert main(["sandbox", "test", "docker"]) == 2
    assert "expected auto, sandlock, bwrap, unconfined, or an http(s) address" in capsys.readouterr().err
