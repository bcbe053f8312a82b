"""Kill -9 at every point of a save, in a forked process, and look at what is left."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.checkpoint import CheckpointStore
from roll.checkpoint.files import verify


def _save(store: CheckpointStore, step: int) -> None:
    with store.writing(step, {"step": step}) as folder:
        for name in ("a", "b"):
            (folder / name).write_bytes(bytes([step % 256]) * 5000)


def _in_child(run: Callable[[], None]) -> int:
    """Run in a fork that must not come back; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def _killed_at(root: Path, step: int, point: int) -> bool:
    """Save `step` in a child that is killed just before its `point`-th change of the disk; False if it ends first."""

    def run() -> None:
        left = [point]

        def armed(original: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return original(*args, **kwargs)

            return call

        for name in ("mkdir", "fsync", "rename", "replace", "rmdir", "unlink"):
            setattr(os, name, armed(getattr(os, name)))
        _save(CheckpointStore(root, max_to_keep=2), step)

    return os.WIFSIGNALED(_in_child(run))


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step saved before"])
def test_a_kill_between_any_two_changes_of_the_disk_leaves_whole_checkpoints(tmp_path: Path, step: int) -> None:
    point = 0
    while True:
        root = tmp_path / str(point)
        store = CheckpointStore(root, max_to_keep=2)
        _save(store, 1)
        _save(store, 2)
        killed = _killed_at(root, step, point)
        found = store.resolve(True)  # verifies hashes
        assert found is not None
        assert found.step in (2, step)
        named = [path for path in root.iterdir() if path.name.startswith("checkpoint-")]
        assert len(store.complete()) == len(named), f"half a checkpoint under its name, killed at point {point}"
        _save(store, 9)  # the next save removes the litter
        assert sorted(p.name for p in root.iterdir() if p.name.startswith(".")) == [".lock"]
        assert len(store.complete()) == 2
        if not killed:
            break
        point += 1
    assert point > 8, "the points of a save weren't reached"


def test_a_kill_at_a_random_moment_never_loses_an_acknowledged_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(0)
    acknowledged = tmp_path / "acknowledged"
    root = tmp_path / "checkpoints"
    start = 0
    for attempt in range(12):
        pid = os.fork()
        if pid == 0:
            store = CheckpointStore(root, max_to_keep=2)
            for step in range(start + 1, start + 1000):
                _save(store, step)
                acknowledged.write_text(str(step))
            os._exit(0)
        deadline = time.monotonic() + 30
        while attempt == 11 and not acknowledged.exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # on a busy machine the others may have died too soon
        time.sleep(rng.uniform(0.0, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        text = acknowledged.read_text() if acknowledged.exists() else ""
        found = CheckpointStore(root).resolve("auto")
        if text:
            assert found is not None
            assert found.step >= int(text)
            assert (found.path / "a").read_bytes() == bytes([found.step % 256]) * 5000
        for checkpoint in CheckpointStore(root).complete():
            verify(checkpoint.path)
        start = found.step if found else 0
    assert start > 0, "no child lived long enough to save anything"
