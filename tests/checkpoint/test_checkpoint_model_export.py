"""The trained model's folder is whole or as it was, and nobody else's model is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from roll.checkpoint.files import CheckpointWriteError
from roll.checkpoint.model_export import set_aside, write_model
from roll.checkpoint.store import CheckpointStore


def writer(text: str):
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(text)
        (folder / "model.safetensors").write_text(text)
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_config.json").write_text(text)

    return write


def content(folder: Path) -> str:
    texts = {path.read_text() for path in folder.rglob("*") if path.is_file() and path.name != "roll_export.json"}
    assert len(texts) == 1
    return texts.pop()


def test_a_model_replaces_that_of_the_same_run_and_moves_another_aside(tmp_path):
    place = tmp_path / "deep" / "model"
    write_model(place, writer("one"), {"exp_name": "a", "step": 1})
    write_model(place, writer("two"), {"exp_name": "a", "step": 2})
    assert content(place) == "two"
    assert json.loads((place / "roll_export.json").read_text()) == {"exp_name": "a", "step": 2}
    write_model(place, writer("three"), {"exp_name": "b", "step": 1})
    assert (place / "model.safetensors").read_text() == "three"
    assert content(place / "earlier.1") == "two"
    assert set_aside(place) == place / "earlier.2"
    assert set_aside(place) is None
    assert content(place / "earlier.2") == "three"


@pytest.mark.parametrize("failure", [OSError(28, "No space left"), RuntimeError("safetensors: no space")])
def test_a_failure_leaves_what_was_there(tmp_path, failure):
    def fail(folder: Path) -> None:
        writer("half")(folder)
        raise failure

    write_model(tmp_path, writer("one"), {"exp_name": "a"})
    with pytest.raises(CheckpointWriteError, match=r"couldn't be written to .* GiB are free there.*space"):
        write_model(tmp_path, fail, {"exp_name": "a"})
    assert content(tmp_path) == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter", "config.json", "model.safetensors", "roll_export.json",
    ]  # fmt: skip


def test_files_that_another_machine_keeps_to_itself_are_an_error_and_the_model_that_was_there_stays(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("roll.checkpoint.model_export._ARRIVE_SECONDS", 0.0)
    write_model(tmp_path, writer("one"), {"exp_name": "a"})
    with pytest.raises(CheckpointWriteError, match=r"model.safetensors, aren't in .*host7, where .*scp -r HOST:"):
        write_model(tmp_path, lambda _: {"model.safetensors": 7}, {"exp_name": "a"}, writers="host7, where x runs")

    def half(folder: Path) -> dict[str, int]:
        writer("half")(folder)
        return {"config.json": 4, "model.safetensors": 5}

    with pytest.raises(CheckpointWriteError, match=r"1 of its files, such as model.safetensors"):
        write_model(tmp_path, half, {"exp_name": "a"})
    assert content(tmp_path) == "one"


def test_weights_get_the_permissions_of_the_files_beside_them(tmp_path):
    """safetensors 0.8 writes with mode 0600, so nobody but the writer could load the model."""
    import torch
    from safetensors.torch import save_file

    def write(folder: Path) -> None:
        save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    before = os.umask(0o027)
    try:
        write_model(tmp_path / "model", write, {"exp_name": "a"})
        with CheckpointStore(tmp_path / "checkpoints").writing(1) as folder:
            (folder / "actor_train").mkdir()
            write(folder / "actor_train")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".safetensors", ".json")]
    # 0666 without the bits of umask 027
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


@pytest.mark.parametrize("earlier", ["of a run", "of the user's"])
def test_wherever_it_is_killed_a_folder_with_a_config_is_whole(tmp_path, monkeypatch, earlier):
    """Every rename may be the last thing that happens; the next run starts, and mends what is left."""

    class Killed(BaseException):
        pass

    real, whole = os.rename, {"config.json", "model.safetensors", "adapter", "roll_export.json"}
    for limit in range(9):
        place = tmp_path / str(limit)
        write_model(place, writer("one"), {"exp_name": "a"})
        if earlier == "of the user's":
            (place / "roll_export.json").unlink()
        left = iter(range(limit))

        def rename(source: str, target: str, left=left) -> None:
            if next(left, None) is None:
                raise Killed
            real(source, target)

        monkeypatch.setattr(os, "rename", rename)
        killed = True
        try:
            write_model(place, writer("two"), {"exp_name": "a"})
            killed = False
        except Killed:
            pass
        monkeypatch.setattr(os, "rename", real)
        assert killed == (limit < 8)
        if (place / "config.json").exists():
            assert whole <= {path.name for path in place.iterdir()}
        names = {path.name for path in place.iterdir() if not path.name.startswith((".", "earlier."))}
        assert not names or names & {"config.json", "roll_export.json"}, "`export_checks` refuses it"
        texts = [path.read_text() for path in place.rglob("model.safetensors")]
        assert "one" in texts or (place / "config.json").exists()
        write_model(place, writer("three"), {"exp_name": "a"})
        assert (place / "model.safetensors").read_text() == "three"
