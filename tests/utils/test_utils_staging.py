"""Copies of models in shared memory: one per machine, gone with the last reader, also when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll.utils import staging

READER = """
import sys, time
from pathlib import Path
from roll.utils import staging
staging.FOLDER = Path(sys.argv[1])
original = staging._copy
def slowly(copy, source, files):
    time.sleep(0.3)
    original(copy, source, files)
    print("copied", flush=True)
staging._copy = slowly
print(staging.staged(sys.argv[2]), flush=True)
sys.stdin.readline()
staging.release()
"""


@pytest.fixture
def shm(tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(staging, "FOLDER", folder)
    yield folder
    staging.release()


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    return folder


def reader(shm: Path, model: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READER, str(shm), str(model)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_copy_has_what_is_read_and_goes_with_its_reader(shm, model):
    copy = Path(staging.staged(str(model)))
    assert copy.parent == shm
    assert {file.name for file in copy.iterdir()} == {"config.json", "model.safetensors"}
    assert (copy / "model.safetensors").read_bytes() == b"w" * 1000
    assert staging.staged(str(model)) == str(copy)
    (model / "config.json").write_text('{"changed": 1}')
    assert staging.staged(str(model)) != str(copy)
    staging.release()
    assert not list(shm.iterdir())


def test_several_processes_make_one_copy_and_the_last_removes_it(shm, model):
    readers = [reader(shm, model) for _ in range(4)]
    try:
        said = [[process.stdout.readline().strip()] for process in readers]
        for process, lines in zip(readers, said, strict=True):
            if lines == ["copied"]:
                lines.append(process.stdout.readline().strip())
        assert sum(lines[0] == "copied" for lines in said) == 1
        (copy,) = {lines[-1] for lines in said}
        for process in readers[:3]:
            process.communicate("\n", timeout=20)
            assert Path(copy).is_dir()
        readers[3].communicate("\n", timeout=20)
        assert not list(shm.iterdir())
    finally:
        for process in readers:
            process.kill()
            process.wait()


def test_what_a_killed_process_leaves_goes_with_the_next_start(shm, model):
    process = reader(shm, model)
    assert process.stdout.readline().strip() == "copied"
    copy = Path(process.stdout.readline().strip())
    staging.sweep()
    assert copy.is_dir()  # it is read
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert copy.is_dir()
    (model / "config.json").write_text('{"another": 1}')
    another = staging.staged(str(model))
    assert {path.name for path in shm.iterdir()} == {Path(another).name, f"{Path(another).name}.lock"}


def test_the_reaper_removes_what_its_controller_left(shm, model, tmp_path):
    from roll.distributed import ray_reaper

    process = reader(shm, model)
    process.stdout.readline()
    copy = Path(process.stdout.readline().strip())
    process.kill()
    process.wait()
    there = Path("/dev/shm") / f"{staging.PREFIX}test{os.getpid()}"
    there.mkdir()
    there.with_suffix(".lock").touch()
    ray_reaper.reap(str(tmp_path / "session"))
    assert not there.exists()
    assert not there.with_suffix(".lock").exists()
    assert copy.is_dir()  # of this test's folder, not of the machine's


def test_a_copy_that_somebody_else_put_there_is_not_read(shm, model, tmp_path):
    copy = Path(staging.staged(str(model)))
    staging.release()
    (tmp_path / "theirs").mkdir()
    copy.symlink_to(tmp_path / "theirs")
    with pytest.raises(ValueError, match="isn't a folder that this user made"):
        staging.staged(str(model))


@pytest.mark.parametrize("name", ["org/name", "{model}/config.json"])
def test_what_is_no_folder_is_refused(shm, model, name):
    with pytest.raises(ValueError, match="isn't a folder here"):
        staging.staged(name.format(model=model))


def test_a_model_that_does_not_fit_says_how_large_it_is(shm, model, monkeypatch):
    with open(model / "model.safetensors", "ab") as file:
        file.truncate(2**42)
    with pytest.raises(ValueError, match=r"doesn't fit into .*: it has 4194304 MiB, \d+ MiB are free"):
        staging.staged(str(model))
    staging.sweep()
    assert not list(shm.iterdir())


def test_a_process_that_copies_for_ever_is_named(shm, model, monkeypatch):
    monkeypatch.setattr(staging, "_LOCK_TIMEOUT_S", 0.5)
    process = reader(shm, model)
    assert process.stdout.readline()
    lock = next(shm.glob("*.lock"))
    process.kill()
    process.wait()
    import fcntl

    with open(lock, "r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"another process has held .*\.lock for 0.5 s, to copy"):
            staging.staged(str(model))
        assert time.monotonic() - start < 10
