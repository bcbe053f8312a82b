"""Checkpoints at addresses that fsspec reaches: uploads that are cut off, failures, retention, downloads."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from roll.checkpoint import CheckpointStore
from roll.checkpoint import remote_store as remote
from roll.checkpoint.files import CheckpointError
from roll.checkpoint.remote_store import RemoteCheckpoints, RemoteError, download


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.0)


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/bucket/run"
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return "memory://bucket/run"


def saved(folder: Path, step: int, text: str = "x"):
    store = CheckpointStore(folder)
    with store.writing(step, {"exp_name": "toy"}) as place:
        (place / "actor").mkdir()
        (place / "actor" / "weights").write_text(text * 100)
        (place / "pipeline.json").write_text(json.dumps({"step": step}))
    latest = store.latest()
    assert latest is not None
    return latest


def names(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in fs.ls(root, detail=False))


def test_what_was_uploaded_comes_back_with_its_hashes_on_another_machine(url, tmp_path):
    there = RemoteCheckpoints(url)
    assert there.complete() == []
    mine = saved(tmp_path / "one", 4)
    there.upload(mine)
    (found,) = there.complete()
    assert (found.step, found.serial, found.files, found.meta) == (4, mine.serial, mine.files, mine.meta)
    store = CheckpointStore(tmp_path / "two")
    got = RemoteCheckpoints(url).download(found, store)
    assert got.path == tmp_path / "two" / "checkpoint-4"
    assert store.resolve(True).path == got.path
    assert (got.path / "actor" / "weights").read_text() == "x" * 100
    assert saved(tmp_path / "two", 5).serial == mine.serial + 1


def test_only_the_newest_stay_and_a_torn_upload_is_no_checkpoint(url, tmp_path, monkeypatch):
    there = RemoteCheckpoints(url, max_to_keep=2)
    for step in (1, 2):
        there.upload(saved(tmp_path, step))
    put = RemoteCheckpoints._put

    def cut(self, source, target):
        if target.endswith("manifest.json"):
            raise ConnectionError("gone")
        put(self, source, target)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteCheckpoints, "_put", cut)
        with pytest.raises(
            RemoteError, match=r"upload of checkpoint-3 to .* failed: ConnectionError: gone \(3 attempts\)"
        ):
            there.upload(saved(tmp_path, 3))
    assert "checkpoint-3" in names(url)
    assert [checkpoint.step for checkpoint in there.complete()] == [2, 1]
    there.upload(saved(tmp_path, 4))
    assert [checkpoint.step for checkpoint in there.complete()] == [4, 2]
    assert names(url) == ["checkpoint-2", "checkpoint-4"], "the torn one is removed"
    there.upload(saved(tmp_path, 2, "again"))
    assert [checkpoint.step for checkpoint in there.complete()] == [2, 4]
    assert RemoteCheckpoints(url).download(there.complete()[0], CheckpointStore(tmp_path / "two")).step == 2


def test_an_operation_is_tried_again_and_has_an_end(url, tmp_path, monkeypatch):
    import time

    there, mine, calls = RemoteCheckpoints(url), saved(tmp_path, 1), []
    put = RemoteCheckpoints._put

    def shaky(self, source, target):
        calls.append(target)
        if len(calls) % 3:
            raise TimeoutError("slow")
        put(self, source, target)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteCheckpoints, "_put", shaky)
        there.upload(mine)
    assert len(calls) == 3 * 3  # two files and the manifest
    monkeypatch.setattr(RemoteCheckpoints, "_complete", lambda _: time.sleep(5))
    with pytest.raises(RemoteError, match=r"a list of .*bucket/run isn't done after 0.1 s"):
        RemoteCheckpoints(url, seconds=0.1).complete()


def test_an_upload_that_is_late_writes_nothing_after_it_was_given_up(url, tmp_path, monkeypatch):
    import threading

    there, mine, go, calls = RemoteCheckpoints(url, seconds=0.2), saved(tmp_path, 1), threading.Event(), []
    put = RemoteCheckpoints._put

    def slow(self, source, target):
        calls.append(target)
        go.wait(5)
        put(self, source, target)

    monkeypatch.setattr(RemoteCheckpoints, "_put", slow)
    with pytest.raises(RemoteError, match=r"isn't done after 0.2 s"):
        there.upload(mine)
    late = [thread for thread in threading.enumerate() if thread.name == "remote checkpoints"]
    go.set()
    for thread in late:
        thread.join(5)
    assert len(calls) == 1, "the manifest above all"


def test_a_file_that_is_missing_behind_its_manifest_is_damage_and_no_failure_of_the_store(url, tmp_path):
    there = RemoteCheckpoints(url)
    there.upload(saved(tmp_path / "one", 1))
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/checkpoint-1/actor/weights")
    with pytest.raises(CheckpointError, match="checkpoint-1 is damaged: .*isn't there"):
        there.download(there.complete()[0], CheckpointStore(tmp_path / "two"))


def test_a_damaged_copy_is_refused_and_leaves_nothing(url, tmp_path):
    there = RemoteCheckpoints(url)
    there.upload(saved(tmp_path / "one", 1))
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/checkpoint-1/actor/weights", b"y" * 100)
    store = CheckpointStore(tmp_path / "two")
    with pytest.raises(CheckpointError, match="is damaged"):
        there.download(there.complete()[0], store)
    assert store.complete() == []
    assert [path.name for path in store.root.iterdir()] == [".lock"]
    fs.pipe_file(f"{root}/checkpoint-1/manifest.json", b"{")
    assert there.complete() == []


def test_one_checkpoint_is_fetched_by_its_address_and_only_once(url, tmp_path, monkeypatch):
    RemoteCheckpoints(url).upload(saved(tmp_path / "one", 7))
    got = download(f"{url}/checkpoint-7", tmp_path / "here", 60)
    assert (got.step, got.path) == (7, tmp_path / "here" / "checkpoint-7")
    monkeypatch.setattr(RemoteCheckpoints, "_download", None)
    assert download(f"{url}/checkpoint-7/", tmp_path / "here", 60).path == got.path
    with pytest.raises(CheckpointError, match="holds checkpoint-7; checkpoint-8 isn't a complete checkpoint"):
        download(f"{url}/checkpoint-8", tmp_path / "here", 60)


def test_a_manifest_that_names_files_elsewhere_is_not_followed(url, tmp_path):
    RemoteCheckpoints(url).upload(saved(tmp_path / "one", 1))
    fs, root = fsspec.core.url_to_fs(url)
    manifest = json.loads(fs.cat_file(f"{root}/checkpoint-1/manifest.json"))
    manifest["files"]["../../../evil"] = {"size": 1, "sha256": "0"}
    fs.pipe_file(f"{root}/checkpoint-1/manifest.json", json.dumps(manifest).encode())
    assert RemoteCheckpoints(url).complete() == []


def test_an_unknown_protocol_is_named():
    with pytest.raises(ValueError, match="nowhere"):
        RemoteCheckpoints("nowhere://bucket")
