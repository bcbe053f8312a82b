from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.checkpoint import CheckpointError, CheckpointStore, CheckpointWriteError
from roll.checkpoint import files as checkpoint_files
from roll.checkpoint.files import read_manifest, verify
from roll.cli.exits import Exit, report


def save(store: CheckpointStore, step: int, content: str = "weights") -> None:
    with store.writing(step, {"config": "abc"}) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "rank0.bin").write_text(f"{content} of step {step}")
        checkpoint_files.write_json(folder / "cursor.json", {"row": step})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


def test_what_was_saved_is_found_with_its_step_and_meta(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 12)
    found = store.latest()
    assert found is not None
    assert (found.step, found.meta) == (12, {"config": "abc"})
    assert set(found.files) == {"actor/rank0.bin", "cursor.json"}
    assert found.files["actor/rank0.bin"].size == len("weights of step 12")
    assert checkpoint_files.read_json(found.path / "cursor.json") == {"row": 12}
    assert names(tmp_path) == ["checkpoint-12"]


def test_a_store_without_a_folder_holds_nothing(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "absent").latest() is None
    assert not (tmp_path / "absent").exists()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5, "old")
    save(store, 5, "new")
    found = store.latest()
    assert found is not None
    assert (found.path / "actor" / "rank0.bin").read_text() == "new of step 5"
    assert names(tmp_path) == ["checkpoint-5"]


def save_interrupted(store: CheckpointStore, step: int, interrupt: Callable[[], object]) -> None:
    with store.writing(step) as folder:
        (folder / "half").write_text("x")
        interrupt()


def test_an_exception_in_the_block_leaves_nothing_and_keeps_the_previous(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(KeyError):
        save_interrupted(store, 2, lambda: {}["absent"])
    assert names(tmp_path) == ["checkpoint-1"]
    assert verify(tmp_path / "checkpoint-1").step == 1


def test_a_full_disk_is_a_failure_and_no_mistake_of_the_user():
    assert report(CheckpointWriteError("no space")) == Exit.FAILED
    assert report(CheckpointError("no such checkpoint")) == Exit.MISTAKE


@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_full_disk_is_reported_and_leaves_the_previous_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    interrupt = full if where == "write" else lambda: monkeypatch.setattr(os, where, full)
    message = r"step 2 couldn't be written.*No space left.*GiB are free.*checkpoint-1"
    with pytest.raises(CheckpointWriteError, match=message):
        save_interrupted(store, 2, interrupt)
    monkeypatch.undo()
    assert names(tmp_path) == ["checkpoint-1"]
    assert verify(tmp_path / "checkpoint-1").step == 1


def test_a_root_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = CheckpointStore(tmp_path / "file" / "checkpoints")
    message = r"step 3 couldn't be written to .*file/checkpoints"
    with pytest.raises(CheckpointWriteError, match=message), store.writing(3):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_clear_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointWriteError, match="Permission denied"), store.writing(2):
            pass
    finally:
        tmp_path.chmod(0o700)
    assert verify(tmp_path / "checkpoint-1").step == 1


def _truncate(folder: Path) -> None:
    os.truncate(folder / "actor" / "rank0.bin", 3)


def _remove(folder: Path) -> None:
    (folder / "cursor.json").unlink()


def _append(folder: Path) -> None:
    with open(folder / "actor" / "rank0.bin", "a") as file:
        file.write("!")


def _flip(folder: Path) -> None:
    path = folder / "actor" / "rank0.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(bytes(content))


def _manifest_to_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def _move_out(name: str) -> Callable[[Path], None]:
    """Leave a link to what is moved out of the folder: its size and content are right."""

    def move(folder: Path) -> None:
        outside = folder.parent / "elsewhere"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return move


def _edit_manifest(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "manifest.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


DAMAGE: list[tuple[str, Callable[[Path], None], str, bool]] = [
    # what happened, how, the message, whether the cheap check of `latest` sees it
    ("truncated file", _truncate, r"rank0\.bin has 3 bytes, expected 17", True),
    ("missing file", _remove, r"cursor\.json is missing", True),
    ("extra bytes", _append, r"rank0\.bin has 18 bytes, expected 17", True),
    ("flipped bit", _flip, r"content of \['actor/rank0\.bin'\] differs", False),
    ("no manifest", lambda f: (f / "manifest.json").unlink(), r"manifest\.json doesn't exist", True),
    ("empty manifest", lambda f: (f / "manifest.json").write_text(""), r"isn't valid JSON", True),
    ("torn manifest", lambda f: os.truncate(f / "manifest.json", 40), r"isn't valid JSON", True),
    ("binary manifest", lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), r"isn't valid JSON", True),
    ("manifest is a list", lambda f: (f / "manifest.json").write_text("[]"), r"isn't a checkpoint's manifest", True),
    ("files missing", _edit_manifest(lambda m: m.pop("files")), r"isn't a checkpoint's manifest.*files", True),
    ("bad step", _edit_manifest(lambda m: m.update(step="x")), r"isn't a checkpoint's manifest", True),
    ("endless serial", _edit_manifest(lambda m: m.update(serial=float("inf"))), r"isn't a checkpoint's manifest", True),
    (
        "NUL in a name",
        _edit_manifest(lambda m: m["files"].update({"a\0": {"size": 1, "sha256": ""}})),
        r"outside",
        True,
    ),
    ("another step", _edit_manifest(lambda m: m.update(step=999)), r"says step 999", True),
    ("no files", _edit_manifest(lambda m: m.update(files={})), r"names no files", True),
    ("a folder for a manifest", _manifest_to_folder, r"can't be read", True),
    ("a link to elsewhere", _move_out("cursor.json"), r"is a link to a file elsewhere", True),
    ("a folder that is a link", _move_out("actor"), r"is a link to a file elsewhere", True),
    ("a manifest that is a link", _move_out("manifest.json"), r"is a link to a file elsewhere", True),
    ("foreign format", _edit_manifest(lambda m: m.update(format="other")), r"format 'other'", True),
    ("newer version", _edit_manifest(lambda m: m.update(version=99)), r"version 99.*upgrade", True),
]


@pytest.mark.parametrize(("damage", "message", "cheap"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_damage_is_named_and_an_older_checkpoint_is_used(
    tmp_path: Path, damage: Callable[[Path], None], message: str, cheap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    damage(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match=message):
        verify(tmp_path / "checkpoint-2")
    latest = store.latest()
    assert latest is not None
    assert latest.step == (1 if cheap else 2)
    with caplog.at_level(logging.WARNING):
        found = store.resolve("auto")
    assert found is not None
    assert found.step == 1
    assert "checkpoint-2" in caplog.text


def test_the_newest_is_the_last_saved_even_after_going_back_to_an_earlier_step(tmp_path: Path) -> None:
    # Saved 10, 20, 30; resumed from 10 by hand, saved 12: 12 is what the run stands at, 20 and 30 are another past.
    store = CheckpointStore(tmp_path, max_to_keep=2)
    for step in (10, 20, 30, 12):
        save(store, step)
    assert [checkpoint.step for checkpoint in store.complete()] == [12, 30]


def test_pruning_keeps_the_newest_and_touches_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0" / "pytorch_model.bin").write_text("somebody else's")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / ".checkpoint-1.note").write_text("mine")
    store = CheckpointStore(tmp_path, max_to_keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert names(tmp_path) == [".checkpoint-1.note", "checkpoint-0", "checkpoint-3", "checkpoint-4", "checkpoint-best"]


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=2)
    for step in (1, 2):
        save(store, step)
    _truncate(tmp_path / "checkpoint-2")
    save(store, 3)
    assert [checkpoint.step for checkpoint in store.complete()] == [3, 1]


def test_the_one_resumed_from_lives_until_a_newer_is_complete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=1)
    save(store, 1)
    assert store.resolve(True) is not None
    with pytest.raises(RuntimeError, match="killed"), store.writing(2):
        raise RuntimeError("killed")
    assert names(tmp_path) == ["checkpoint-1"]
    save(store, 2)
    assert names(tmp_path) == ["checkpoint-2"]


def test_auto_stops_where_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    _truncate(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged .*checkpoint-1.*set it to false"):
        store.resolve("auto")


def test_what_is_in_the_way_and_not_ours_is_renamed_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "notes.txt").write_text("keep me")
    store = CheckpointStore(tmp_path)
    save(store, 7)
    kept = [path for path in tmp_path.iterdir() if ".kept-" in path.name]
    assert [(path / "notes.txt").read_text() for path in kept] == ["keep me"]
    assert [checkpoint.step for checkpoint in store.complete()] == [7]


def test_two_writers_of_one_folder_are_told_apart(tmp_path: Path) -> None:
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    with first.writing(1) as folder:
        (folder / "a").write_text("x")
        with pytest.raises(CheckpointError, match="another process is writing.*its own output_dir"), second.writing(2):
            pass
        assert second.latest() is None  # a reader isn't disturbed, nor does it disturb
    assert names(tmp_path) == ["checkpoint-1"]
    save(second, 2)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


RESUME = [
    # resume_from_checkpoint, folders of the store, the step resumed from (None: afresh) or the error's words
    (False, [1, 2], None),
    (True, [1, 2], 2),
    ("auto", [1, 2], 2),
    ("auto", [], None),
    (True, [], "holds no intact checkpoint.*no checkpoint-<step> folder.*set it to auto"),
    ("checkpoint-1", [1, 2], 1),
    ("{root}/checkpoint-1", [1, 2], 1),
    ("checkpoint-9", [1, 2], "checkpoint-9 doesn't exist.*checkpoint-1, checkpoint-2"),
    ("{root}", [1, 2], r"isn't a complete checkpoint; it holds \['checkpoint-1', 'checkpoint-2'\]: name one"),
    ("{root}/empty", [1], "isn't a complete checkpoint: it has no manifest.json"),
    ("/nowhere/checkpoint-3", [], "/nowhere/checkpoint-3 doesn't exist"),
]


@pytest.mark.parametrize(("resume", "steps", "expected"), RESUME)
def test_resume_from_checkpoint_means_what_its_table_says(
    tmp_path: Path, resume: bool | str, steps: list[int], expected: int | str | None
) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / "empty").mkdir()
    for step in steps:
        save(store, step)
    if isinstance(resume, str):
        resume = resume.format(root=tmp_path)
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            store.resolve(resume)
    else:
        found = store.resolve(resume)
        assert (found.step if found else None) == expected


def test_a_named_checkpoint_that_is_damaged_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    _flip(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match="is damaged"):
        store.resolve("checkpoint-2")


def test_a_checkpoint_can_be_copied_elsewhere_and_resumed_from(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "a")
    save(store, 4)
    shutil.copytree(tmp_path / "a" / "checkpoint-4", tmp_path / "moved")
    found = CheckpointStore(tmp_path / "b").resolve(tmp_path / "moved")
    assert found is not None
    assert found.step == 4
    assert found.path == tmp_path / "moved"


@pytest.mark.parametrize("value", [0.1, 1e-300, 2**53 + 1, -0.0, "ä\n", [1, [2.5, None]], {"a": {"b": True}}])
def test_json_state_comes_back_the_same(tmp_path: Path, value: object) -> None:
    checkpoint_files.write_json(tmp_path / "s.json", value)
    assert repr(checkpoint_files.read_json(tmp_path / "s.json")) == repr(value)


def test_json_refuses_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    checkpoint_files.write_json(tmp_path / "s.json", 1)
    with pytest.raises(ValueError, match="JSON compliant"):
        checkpoint_files.write_json(tmp_path / "s.json", float("nan"))
    assert checkpoint_files.read_json(tmp_path / "s.json") == 1


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be >= 0, got -1"), CheckpointStore(tmp_path).writing(-1):
        pass


def test_reading_a_manifest_does_not_need_the_store(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 3)
    recorded = read_manifest(tmp_path / "checkpoint-3").files.values()
    assert sum(record.size for record in recorded) == sum(
        path.stat().st_size
        for path in (tmp_path / "checkpoint-3").rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )
