"""The key `sandbox`: which values there are, who needs one, and that a run without one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from refused import check_refused

from roll.configs.checks import sandbox_checks as checks
from roll.configs.checks.sandbox_checks import sandbox_checks, sandboxed_domains
from roll.configs.parsing.loader import load_config
from roll.isolation.sandbox.base import SandboxError, SandboxUnavailable


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own.py"
    file.write_text(
        "def runs(response, task, *, sandbox, timeout=1.0):\n    return 0.0\n"
        "def reads(response, task):\n    return 0.0\n",
        encoding="utf-8",
    )
    return str(file)


@pytest.mark.parametrize("value", ["docker", "sandlok", "http://", "https://user:secret@host", "ftp://host", "''"])
def test_a_sandbox_that_there_is_not_is_refused(job: Path, value: str):
    check_refused(job, [f"sandbox={value}"], "sandbox", ["auto, sandlock, bwrap, unconfined", "sandbox server"])


@pytest.mark.parametrize("value", ["auto", "sandlock", "bwrap", "unconfined", "http://host:8321", "https://host/path"])
def test_a_sandbox_that_no_reward_needs_is_fine(job: Path, value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "probe_sandbox", lambda _: pytest.fail("nobody needs it"))
    config = load_config(job, "job", [f"sandbox={value}"])
    assert config.sandbox == value
    assert sandboxed_domains(config) == ()
    assert list(sandbox_checks(config)) == []


def test_a_function_that_asks_for_a_sandbox_is_found_and_asked_for_no_more(job: Path, own: str):
    config = load_config(job, "job", [f"rewards.math.name={own}:runs", f"rewards.words.name={own}:reads"])
    assert sandboxed_domains(config) == ("math",)
    config = load_config(
        job, "job", ["rewards.math.name=custom", f"custom_reward_function={{path: {own}, name: runs}}"]
    )
    assert sandboxed_domains(config) == ("math",)


@pytest.mark.parametrize("error", [SandboxUnavailable("sandlock: no; bwrap: no"), SandboxError("it broke")])
def test_a_run_without_the_sandbox_that_it_needs_is_refused(
    job: Path, own: str, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fail(name: str) -> str:
        raise error

    monkeypatch.setattr(checks, "probe_sandbox", fail)
    (violation,) = sandbox_checks(load_config(job, "job", [f"rewards.math.name={own}:runs"]))
    assert violation.path == "sandbox"
    assert "rewards.math runs what the model writes" in str(violation)
    assert str(error) in str(violation)


def test_the_plan_repeats_that_nothing_contains(job: Path):
    told = "sandbox: unconfined: what the model writes is run as this user, and nothing contains it"
    assert told in load_config(job, "job", ["sandbox=unconfined"]).explain_results()
    assert told not in load_config(job, "job", []).explain_results()
