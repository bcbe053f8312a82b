"""Programs that try to do harm do none, and the suite sees harm where nothing is contained."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attack_setups import UNPRIVILEGED
from attack_world import REPOSITORY, campaign, harms_of, read_attacks

from roll.isolation.sandbox.base import SandboxUnavailable
from roll.isolation.sandbox.local import LocalSandbox
from roll.isolation.sandbox.open_sandbox import open_sandbox

ATTACKS = {attack.name: attack for attack in read_attacks()}
SAMPLE = (
    "fork_bomb", "memory_bomb", "endless_output", "fakes_the_protocol", "reads_the_tests",
    "reads_environment_of_the_caller", "kills_its_parent", "setsid", "many_folders", "changes_permissions",
    "overwrites_modules", "udp",
)  # fmt: skip
HARMLESS = {
    "reads_the_tests": "secret",
    "reads_the_tests_through_a_link": "secret",
    "reads_environment_of_others": "secret",
    "overwrites_the_victim_file": "file outside",
    "changes_permissions": "file outside",
    "writes_beside_its_folder": "left behind",
    "kills_the_victim": "victim",
    "changes_priorities": "priority",
    "tcp": "TCP",
    "udp": "UDP",
    "unix_socket": "unix",
    "abstract_socket": "abstract",
    "lists_processes": "wanted",
}
"""Attacks whose harm is done to the world of the suite alone, and how it is told."""
SLACK_S = 5.0


@pytest.fixture(scope="module")
def mechanism() -> str:
    try:
        open_sandbox("sandlock").close()
    except SandboxUnavailable as error:
        pytest.skip(f"sandlock doesn't work here: {error}")
    return "sandlock"


def test_the_table_holds_many_attacks_with_their_harm():
    assert len(ATTACKS) == len(read_attacks()) >= 60
    assert all(attack.harm and attack.source.strip() for attack in ATTACKS.values())
    assert set(SAMPLE) | set(HARMLESS) <= set(ATTACKS)


def test_a_sample_of_attacks_does_no_harm(mechanism: str):
    assert campaign(mechanism, [ATTACKS[name] for name in SAMPLE], threads=2, slack_s=SLACK_S) == {}


def test_the_suite_sees_harm_where_nothing_is_contained():
    with LocalSandbox("unconfined", parallel=1) as sandbox:
        for name, word in HARMLESS.items():
            harms = harms_of(ATTACKS[name], sandbox, slack_s=SLACK_S, alone=False)
            assert any(word in harm for harm in harms), (name, harms)


def test_no_attack_does_harm(mechanism: str):
    assert campaign(mechanism, list(ATTACKS.values()), threads=4, slack_s=SLACK_S) == {}


@pytest.mark.parametrize("mechanism", ["sandlock", "bwrap"])
@pytest.mark.parametrize("setup", ["plain", "user", "container", "container-user"])
def test_no_attack_does_harm_in_another_set_up(mechanism: str, setup: str):
    if setup != "plain" and os.geteuid() != 0:
        pytest.skip("only root can become another user or give up capabilities")
    if mechanism == "bwrap" and setup.startswith("container"):
        pytest.skip("bwrap needs namespaces, which such a container forbids")
    if mechanism == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap isn't installed")
    script, python = Path(__file__).parent / "attack_world.py", sys.executable
    path = _import_path()
    if setup.endswith("user"):
        python = _python_for_others()
    done = subprocess.run(
        [python, "-B", str(script), mechanism, setup],
        env={**os.environ, "PYTHONPATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _import_path() -> str:
    """Return this project's folder and that of sandlock: a Python with another library needs no more."""
    spec = importlib.util.find_spec("sandlock")
    return os.pathsep.join([str(REPOSITORY), *([str(Path(spec.origin).parents[1])] if spec and spec.origin else [])])


def _python_for_others() -> str:
    """Return a Python of this version that every user can run with sandlock."""
    name = f"python3.{sys.version_info.minor}"
    code = "import sys, importlib.util; sys.exit(importlib.util.find_spec('sandlock') is None)"
    environment = {"PYTHONPATH": _import_path()}
    for python in filter(None, (sys.executable, shutil.which(name, path="/usr/bin:/usr/local/bin"))):
        with contextlib.suppress(PermissionError):  # below another user's home
            done = subprocess.run(
                [python, "-c", code],
                user=UNPRIVILEGED,
                group=UNPRIVILEGED,
                extra_groups=[],
                cwd="/",
                env=environment,
                capture_output=True,
                check=False,
            )
            if done.returncode == 0:
                return python
    pytest.skip("no Python here can be run by another user with sandlock")
