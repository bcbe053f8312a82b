"""Checkpoints of somebody else: their pickles call nothing."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from roll.utils.pickles import UnsafeCheckpoint, plain_values_only


class Owned:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def saved(folder, **values):
    state = {"weight": torch.arange(4.0), "bf16": torch.ones(3, dtype=torch.bfloat16), **values}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore")
def test_what_torch_wrote_is_read(tmp_path):
    saved(tmp_path, lr=0.1, betas=(0.9, 0.95), decoupled=True, foreach=None, name="adamw")
    into = {"weight": torch.zeros(4), "bf16": torch.zeros(3, dtype=torch.bfloat16), "lr": 0.0, "betas": (0.0, 0.0)}
    with plain_values_only(tmp_path):
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    assert into["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert into["bf16"].tolist() == [1.0, 1.0, 1.0]
    assert (into["lr"], into["betas"]) == (0.1, (0.9, 0.95))


@pytest.mark.filterwarnings("ignore")
def test_an_index_that_calls_a_function_is_refused_before_it_does(tmp_path):
    saved(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Owned(tmp_path / "owned")))
    with pytest.raises(UnsafeCheckpoint, match=r"it names posix\.mkdir, which would run"), plain_values_only(tmp_path):
        pass
    assert not (tmp_path / "owned").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_value_that_calls_a_function_is_not_read(tmp_path):
    saved(tmp_path / "state", lr=Owned(tmp_path / "owned"))
    with pytest.raises(BaseException, match="(?i)weights.only|unsupported"), plain_values_only(tmp_path / "state"):
        dcp.load({"lr": 0.0}, checkpoint_id=tmp_path / "state", no_dist=True)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x05K\x01"])
def test_a_damaged_index_is_named(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UnsafeCheckpoint, match=r"\.metadata can't be read"), plain_values_only(tmp_path):
        pass


def test_the_environment_is_as_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    with plain_values_only(tmp_path):
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
