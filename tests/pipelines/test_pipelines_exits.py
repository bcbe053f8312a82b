"""How a run ends that is stopped while it saves, or finds the disk full."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toy import write_toy

STOP = """
import os, sys
from roll.checkpoint import store
from roll.cli.__main__ import main
hash_files, saves = store.hash_files, []
def stopped(*args, **kwargs):
    saves.append(1)
    if len(saves) == {save}:
        os.kill(os.getpid(), {number})
    return hash_files(*args, **kwargs)
store.hash_files = stopped
sys.argv[0] = "roll"
sys.exit(main())
"""
"""A signal in the middle of a save: its files are there, its manifest isn't."""
QUICK = ("max_steps=3", "save_steps=1", "export_model=false")


def start(folder: Path, code: str, *arguments: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*wrapper, sys.executable, "-c", code, "train", "toy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, check=False)


@pytest.mark.parametrize(
    ("number", "save", "code", "said"),
    [
        (signal.SIGINT, 2, 130, "interrupted; roll resume {output} goes on after step 1\n"),
        (signal.SIGTERM, 1, 143, "terminated; no checkpoint was saved yet, so the next start begins at the first step"),
    ],
)
def test_a_signal_during_a_save_leaves_the_checkpoints_before_it(tiny_model, tmp_path, number, save, code, said):
    folder = write_toy(tmp_path, tiny_model)
    done = start(folder, STOP.format(save=save, number=int(number)), *QUICK)
    assert done.returncode == code, done.stderr
    assert said.format(output=folder / "output") in done.stderr
    assert "Traceback" not in done.stderr
    left = {path.name for path in (folder / "output" / "checkpoints").iterdir()} - {".lock"}
    assert left == ({"checkpoint-1"} if save == 2 else set())


def small_disk(place: Path, mib: int) -> tuple[str, ...]:
    """What runs a command with a disk of so many MiB at a place."""
    wrapper = ("unshare", "-Urm", "sh", "-c")
    mount = f'mount -t tmpfs -o size={mib}m tmpfs {place} && exec "$@"'
    place.mkdir()
    if not shutil.which("unshare") or subprocess.run([*wrapper, mount, "sh", "true"], capture_output=True).returncode:
        pytest.skip("no mounts of one's own here")
    return (*wrapper, mount, "sh")


RUN = "import sys; from roll.cli.__main__ import main; sys.argv[0] = 'roll'; sys.exit(main())"
FULL_AT_2 = """
import functools
from roll.pipelines.workers import train_worker as train
save, saves = train.TrainWorker.save, []
@functools.wraps(save)
def filled(self, folder, *contents):
    saves.append(1)
    if len(saves) == 2:
        with open({ballast!r}, "wb") as file:
            try:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            except OSError:
                file.truncate(file.tell() - 65536)
    return save(self, folder, *contents)
train.TrainWorker.save = filled
"""


def test_a_full_disk_ends_a_save_with_a_sentence_and_leaves_the_checkpoint_before(tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    output = folder / "output"
    wrapper = small_disk(output, 200)
    code = FULL_AT_2.format(ballast=str(output / "ballast")) + (
        "import sys, os; from roll.cli.__main__ import main; sys.argv[0] = 'roll'; code = main()\n"
        f"print(sorted(os.listdir({str(output / 'checkpoints')!r}))); sys.exit(code)"
    )
    done = start(folder, code, *QUICK, wrapper=wrapper)
    assert done.returncode == 1, done.stderr
    last = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(last) == 1 and f"{output / 'checkpoints'}" in last[0] and "iB are free there" in last[0], done.stderr
    assert "checkpoint-1" in last[0] and "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "['.lock', 'checkpoint-1']"


@pytest.mark.parametrize("mib", [1])
def test_a_disk_that_is_full_from_the_start(tiny_model, tmp_path, mib):
    folder = write_toy(tmp_path, tiny_model)
    done = start(folder, RUN, *QUICK, wrapper=small_disk(folder / "output", mib))
    assert done.returncode in (1, 2), done.stderr
    assert "free" in done.stderr and "Traceback" not in done.stderr, done.stderr
