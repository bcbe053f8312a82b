"""The best checkpoint: kept by every rotation, named by manifests, found by the link `best`, whole after any kill."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_checkpoint_kill import _in_child
from test_checkpoint_remote import at_once, url  # noqa: F401 - fixtures

from roll.checkpoint import CheckpointError, CheckpointStore
from roll.checkpoint.best import LINK, Best, best_of
from roll.checkpoint.remote_store import RemoteCheckpoints, download


def save(store: CheckpointStore, step: int, best: int | None = None) -> None:
    """Save a step, and say that the checkpoint of step `best` is the best so far."""
    meta = {} if best is None else Best(metric="val/accuracy", better="higher", value=best / 10, step=best).as_meta()
    with store.writing(step, meta) as folder:
        (folder / "weights").write_text(f"of step {step}")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_the_best_stays_besides_the_newest_until_another_one_is_better(tmp_path):
    store = CheckpointStore(tmp_path, max_to_keep=2)
    seen = []
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5)):
        save(store, step, best)
        seen.append([name.removeprefix("checkpoint-") for name in names(tmp_path) if name != LINK])
        assert os.readlink(tmp_path / LINK) == f"checkpoint-{best}"
        assert store.best().step == best
    assert seen == [["1"], ["1", "2"], ["1", "2", "3"], ["1", "3", "4"], ["4", "5"], ["5", "6"]]


def test_with_one_to_keep_the_best_and_the_newest_stay(tmp_path):
    store = CheckpointStore(tmp_path, max_to_keep=1)
    for step in (1, 2, 3):
        save(store, step, 1)
    assert names(tmp_path) == [LINK, "checkpoint-1", "checkpoint-3"]


def test_the_best_is_resumed_from_by_its_name(tmp_path):
    store = CheckpointStore(tmp_path, max_to_keep=2)
    for step, best in ((1, 1), (2, 2), (3, 2)):
        save(store, step, best)
    assert store.resolve("best").path == tmp_path / "checkpoint-2"
    assert store.resolve(True).step == 3
    (tmp_path / "checkpoint-2" / "weights").write_text("of seed 2")
    with pytest.raises(CheckpointError, match="damaged"):
        store.resolve("best")


def test_without_a_best_one_its_name_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="holds no best checkpoint"):
            store.resolve("best")
        save(store, 1)
    assert not (tmp_path / LINK).exists()


def test_a_run_that_starts_over_takes_the_link_aside_too(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1, 1)
    aside = store.set_aside()
    assert names(aside) == [LINK, "checkpoint-1"]
    assert (aside / LINK / "weights").read_text() == "of step 1"
    assert names(tmp_path) == ["earlier.1"]


def test_a_link_whose_checkpoint_goes_is_removed(tmp_path):
    store = CheckpointStore(tmp_path, max_to_keep=1)
    save(store, 1, 1)
    save(store, 2)  # by a run that compares nothing
    assert names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize(
    "entry", [None, 3, {}, {"step": 1}, {"metric": "a", "better": "higher", "value": "x", "step": 1}]
)
def test_a_manifest_that_says_something_else_names_no_best(entry):
    assert best_of({"best": entry}) is None


def test_a_folder_in_the_way_of_the_link_stays_as_it_is(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    (tmp_path / LINK).mkdir()
    save(store, 1, 1)
    assert "is in the way of a link to the best checkpoint" in caplog.text
    assert (tmp_path / LINK).is_dir() and not (tmp_path / LINK).is_symlink()
    assert store.best().step == 1


def test_a_disk_without_links_has_the_best_one_all_the_same(tmp_path, caplog, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "symlink", refuse)
    store = CheckpointStore(tmp_path)
    save(store, 1, 1)
    assert "there is no link" in caplog.text
    assert store.resolve("best").step == 1


def killed_at(root: Path, saves: Sequence[tuple[int, int]], point: int) -> bool:
    """Save in a child that is killed just before its `point`-th change of the disk; False if it ends first."""

    def run() -> None:
        left = [point]

        def armed(original: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                if left[0] == 0:
                    os.kill(os.getpid(), 9)
                left[0] -= 1
                return original(*args, **kwargs)

            return call

        for name in ("mkdir", "fsync", "rename", "replace", "rmdir", "unlink", "symlink"):
            setattr(os, name, armed(getattr(os, name)))
        store = CheckpointStore(root, max_to_keep=1)
        for step, best in saves:
            save(store, step, best)

    return os.WIFSIGNALED(_in_child(run))


def test_a_kill_between_any_two_changes_of_the_disk_leaves_the_best_one_whole(tmp_path):
    point, killed = 0, True
    while killed:
        root = tmp_path / str(point)
        for step, best in ((1, 1), (2, 1)):
            save(CheckpointStore(root, max_to_keep=1), step, best)
        killed = killed_at(root, [(3, 3), (4, 3)], point)
        store = CheckpointStore(root, max_to_keep=1)
        newest = store.resolve(True)
        best = store.resolve("best")  # verifies hashes
        assert best.step == best_of(newest.meta).step == (1 if newest.step == 2 else 3)
        # The link may be one save behind, but never leads nowhere: what it leads to is deleted after it was moved.
        assert (root / LINK / "weights").read_text().startswith("of step ")
        save(store, 9, best.step)
        assert os.readlink(root / LINK) == f"checkpoint-{best.step}"
        assert names(root) == sorted([LINK, f"checkpoint-{best.step}", "checkpoint-9"])
        assert not list(root.glob(".best*"))
        point += 1
    assert point > 20, "the points of two saves weren't reached"


def test_the_best_stays_at_an_address_and_is_downloaded_by_its_name(url, tmp_path):  # noqa: F811
    store, there = CheckpointStore(tmp_path / "one", max_to_keep=1), RemoteCheckpoints(url, max_to_keep=1)
    for step, best in ((1, 1), (2, 1), (3, 1)):
        save(store, step, best)
        there.upload(store.latest())
    assert sorted(checkpoint.step for checkpoint in there.complete()) == [1, 3]
    assert download(f"{url}/best", tmp_path / "two", 60.0).step == 1
    save(store, 4, 4)
    there.upload(store.latest())
    assert [checkpoint.step for checkpoint in there.complete()] == [4]
