"""The tables of `roll migrate` against the releases that they name: names, types, defaults, and a row for every key.

The releases are installed without their dependencies; `ROLL_PEERS` names a folder where they are already. TRL's
classes are imported, which takes the transformers of this environment.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll.workbench.migrate.peers import SYSTEMS, release
from roll.workbench.migrate.table import PeerKey, systems

SCRIPT = Path(__file__).parents[2] / "docs" / "generate" / "peer_tables.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for there in filter(None, os.environ.get("ROLL_PEERS", "").split(os.pathsep)):
        if (Path(there) / "trl").is_dir():
            return Path(there)
    folder = tmp_path_factory.mktemp("peers")
    pins = [f"{name}=={release(name)}" for name in SYSTEMS]
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(folder), *pins]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{', '.join(pins)} can't be installed: {done.stderr[-300:]}")
    return folder


def test_names_types_and_defaults_are_those_of_the_releases_and_every_key_has_a_row(
    folder: Path, evidence_folder: Path
):
    command = [sys.executable, str(SCRIPT), str(folder), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    (evidence_folder / "peer_tables.md").write_text(done.stdout, "utf-8")
    assert not done.stderr, done.stderr[-3000:]
    table, _, listed = done.stdout.partition("\n\n")
    for name in SYSTEMS:
        assert f" {release(name)} | defaults that differ: 0 | rows of unknown keys: 0 |" in table, listed
    assert done.returncode == 0, f"keys without a row:\n{listed}"


def test_a_changed_default_and_an_unknown_row_are_found(folder: Path):
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    now = script.table("openrlhf", folder)
    before = script.differing("openrlhf", now)
    now["train_ppo_ray"]["algo.kl.init_coef"] = ["float", 0.5]
    assert set(script.differing("openrlhf", now)) - set(before) == {"train_ppo_ray.algo.kl.init_coef: 0.01, now 0.5"}
    rows = systems()["openrlhf"].rows
    rows.append(PeerKey(key="made.up.by.nobody", fate="translated", to=("seed",)))
    try:
        assert script.unknown_rows("openrlhf", folder)[-1] == "openrlhf: made.up.by.nobody"
    finally:
        rows.pop()
