"""The trained model's folder is whole or as it was, and nobody else's model is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from roll.checkpoint.files import CheckpointWriteError
from roll.checkpoint.model_export import set_aside, write_model


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
