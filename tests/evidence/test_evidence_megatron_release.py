"""The other release of Megatron-core: the layout contract, checkpoints, and checkpoints that change releases.

0.19.2 wants Python 3.12, and the suite runs on 3.11. Only Megatron's data sets are compiled, so its Python parts run
when the wheel is unpacked and its folder comes first on `PYTHONPATH`. `ROLL_PEER_WHEELS` names a folder that has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from peer_wheels import VARIABLE

TESTS = Path(__file__).parents[1]
OTHER = "0.19.2"
CONTRACTS = ("layouts", "checkpoint", "releases", "model", "weights")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The folder of the other release."""
    if metadata.version("megatron-core") == OTHER:
        pytest.skip(f"megatron-core {OTHER} is installed: the full tier is the test")
    folder = tmp_path_factory.mktemp("megatron")
    wheels = Path(os.environ.get(VARIABLE, folder))
    if not list(wheels.glob(f"megatron_core-{OTHER}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.12", "-d", str(wheels), f"megatron-core=={OTHER}"]
        subprocess.run(command, check=True)
    (wheel,) = wheels.glob(f"megatron_core-{OTHER}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "files")
    return folder / "files"


def run(*command: str, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = [*([str(first)] if first else []), str(TESTS), str(TESTS / "strategies"), str(TESTS.parent)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], env=env, cwd=TESTS.parent, capture_output=True, text=True)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_holds_on_the_other_release(other: Path, contract: str):
    file = TESTS / "strategies" / f"test_megatron_{contract}.py"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), "-k", "not other_cells", first=other)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_checkpoint_goes_on_in_the_later_release_and_is_refused_in_the_earlier(other: Path, tmp_path: Path):
    script = str(TESTS / "evidence" / "megatron_checkpoint.py")
    for folder, first, then in ((tmp_path / "up", None, other), (tmp_path / "down", other, None)):
        folder.mkdir()
        written = run(script, "write", str(folder), first=first)
        assert written.returncode == 0, written.stderr[-3000:]
        resumed = run(script, "resume", str(folder), first=then)
        if then is other:
            assert resumed.returncode == 0, resumed.stderr[-3000:]
        else:
            assert f"resume with megatron-core=={OTHER}" in resumed.stderr
