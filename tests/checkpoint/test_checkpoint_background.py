"""Checkpoints that are written in the background: whole or not there, errors with their names, waits with an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.checkpoint import CheckpointStore, CheckpointWriteError, background
from roll.checkpoint.background import BackgroundSave, write_part
from roll.checkpoint.files import verify


def part(folder: Path, name: str, go_on: threading.Event | None = None):
    """A part of two files, the second after `go_on`."""

    def write() -> Iterator[Path]:
        for i in range(2):
            if i and go_on is not None:
                go_on.wait(10)
            path = folder / name / f"{i}.bin"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(name.encode() * 100)
            yield path

    return write


def test_a_checkpoint_appears_once_every_part_is_written_and_hashes_are_those_of_the_writers(tmp_path):
    store, go_on, complete = CheckpointStore(tmp_path), threading.Event(), []
    unfinished = store.begin(3, {"exp_name": "x"})
    for name in ("a", "b"):
        write_part(unfinished.folder, name, part(unfinished.folder, name, go_on if name == "b" else None))
    (unfinished.folder / "pipeline.json").write_text("{}")
    saving = BackgroundSave(unfinished, ["a", "b"], complete.append)
    assert store.complete() == []
    assert not saving.done
    go_on.set()
    saving.wait(10)
    found = verify(tmp_path / "checkpoint-3")
    assert sorted(found.files) == ["a/0.bin", "a/1.bin", "b/0.bin", "b/1.bin", "pipeline.json"]
    assert [checkpoint.path for checkpoint in complete] == [found.path]
    with store.writing(4) as folder:  # the lock is free again
        (folder / "x").write_text("x")


def test_an_error_of_one_part_leaves_no_checkpoint_and_is_raised_with_its_step(tmp_path):
    store = CheckpointStore(tmp_path)
    with store.writing(1) as folder:
        (folder / "x").write_text("x")
    unfinished = store.begin(2)

    def full() -> Iterator[Path]:
        raise OSError(28, "No space left on device")
        yield

    write_part(unfinished.folder, "critic rank 1", full)
    saving = BackgroundSave(unfinished, ["critic rank 1"], lambda _: None)
    with pytest.raises(
        CheckpointWriteError, match=r"step 2 couldn't be written.*critic rank 1: .*No space left.*intact"
    ):
        saving.wait(10)
    assert [checkpoint.step for checkpoint in store.complete()] == [1]
    assert not unfinished.folder.exists()


def test_a_part_that_never_comes_is_named_after_the_limit(tmp_path):
    store = CheckpointStore(tmp_path)
    unfinished = store.begin(2)
    saving = BackgroundSave(unfinished, ["actor_train rank 1"], lambda _: None)
    with pytest.raises(CheckpointWriteError, match=r"step 2 isn't written after 0.2 s.*waiting for actor_train rank 1"):
        saving.wait(0.2)
    unfinished = CheckpointStore(tmp_path / "other").begin(2)
    saving = BackgroundSave(unfinished, ["actor_train rank 1"], lambda _: None)
    with pytest.raises(CheckpointWriteError, match=r"stands still for 0.2 s: waiting for actor_train rank 1"):
        saving.wait(100, stalled=0.2)


def test_a_full_disk_is_told_with_the_room_that_was_kept_for_it(tmp_path, monkeypatch):
    free, write_json = [1 << 16], background.write_json

    def on_a_small_disk(path, value):
        kept = sum(file.stat().st_size for file in path.parent.glob("*.reserve"))
        if free[0] - kept <= 0:
            raise OSError(28, "No space left on device")
        write_json(path, value)

    monkeypatch.setattr(background, "write_json", on_a_small_disk)
    unfinished = CheckpointStore(tmp_path).begin(1)

    def full() -> Iterator[Path]:
        free[0] = sum(file.stat().st_size for file in unfinished.folder.rglob("*") if file.is_file())
        raise OSError(28, "No space left on device")
        yield

    write_part(unfinished.folder, "a", full)
    saving = BackgroundSave(unfinished, ["a"], lambda _: None)
    with pytest.raises(CheckpointWriteError, match="No space left"):
        saving.wait(5)


def test_what_comes_after_a_complete_checkpoint_has_a_limit_of_its_own(tmp_path):
    begun, uploaded = threading.Event(), threading.Event()

    def upload(_) -> None:
        begun.set()
        uploaded.wait(10)

    unfinished = CheckpointStore(tmp_path).begin(1)
    write_part(unfinished.folder, "a", part(unfinished.folder, "a"))
    saving = BackgroundSave(unfinished, ["a"], upload)
    assert begun.wait(10)
    threading.Timer(0.5, uploaded.set).start()
    saving.wait(0.1)
    assert uploaded.is_set()


def test_files_that_a_rank_wrote_elsewhere_are_missed(tmp_path):
    store = CheckpointStore(tmp_path / "here")
    unfinished = store.begin(2)
    elsewhere = tmp_path / "there"
    elsewhere.mkdir()
    write_part(elsewhere, "a", part(elsewhere, "a")).join(10)
    (unfinished.folder / ".parts").mkdir()
    (elsewhere / ".parts" / "a.json").rename(unfinished.folder / ".parts" / "a.json")
    saving = BackgroundSave(unfinished, ["a"], lambda _: None)
    with pytest.raises(ValueError, match=r"2 files that ranks have written.*storage that all machines share"):
        saving.wait(10)
