"""A tracker that sends to a service is refused without a key, wherever the service's own package looks for one."""

from __future__ import annotations

import pytest

from roll.configs.checks.tracker_checks import tracker_checks
from roll.configs.parsing.loader import read_tree

TREE = {"pipeline": "sft", "max_steps": 1, "sequence_length": 8, "pretrain": "m"}
TREE["actor_train"] = {"data_args": {"file_name": "a.jsonl"}}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_BASE_URL", "NETRC", "HF_TOKEN",
                 "WANDB_IDENTITY_TOKEN_FILE", "SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_ROOT", "SWANLAB_SAVE_DIR",
                 "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*trackers):
    config = read_tree({**TREE, "track_with": list(trackers)}).config
    return [violation.problem for violation in tracker_checks(config)]


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_wandb_without_a_key_is_refused():
    (sentence,) = refused("stdout", "wandb")
    assert "wandb has no key: neither WANDB_API_KEY" in sentence
    assert refused({"name": "wandb", "mode": "offline"}) == refused("jsonl") == []


@pytest.mark.parametrize("variable", ["WANDB_API_KEY=k", "WANDB_MODE=offline", "WANDB_IDENTITY_TOKEN_FILE=f"])
def test_wandbs_variables_do(variable, monkeypatch):
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    assert refused("wandb") == []
    assert len(refused({"name": "wandb", "mode": "online"})) == (name == "WANDB_MODE")


def test_wandbs_files_do(home, monkeypatch):
    write(home / ".netrc", "machine api.wandb.ai login user password 123\n")
    assert refused("wandb") == []
    write(home / ".netrc", "machine github.com login user password 123\n")
    assert len(refused("wandb")) == 1
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here.org")
    write(home / ".netrc", "machine wandb.here.org login user password 123\n")
    assert refused("wandb") == []
    (home / ".netrc").unlink()
    assert "for https://wandb.here.org" in refused("wandb")[0]
    write(home / ".config/wandb/settings", "[default]\nmode = offline\n")
    assert refused("wandb") == []
    write(home / "wandb/settings", "[default]\nmode = online\n")
    assert len(refused("wandb")) == 1


def test_swanlab_and_trackio_likewise(home, monkeypatch):
    assert "swanlab has no key" in refused("swanlab")[0]
    assert refused({"name": "swanlab", "mode": "local"}) == refused("trackio") == []
    write(home / ".swanlab/.netrc", "machine https://api.swanlab.cn login https://swanlab.cn password 123\n")
    assert refused("swanlab") == []
    assert "no token of the hub" in refused({"name": "trackio", "space_id": "me/space"})[0]
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://here")
    assert "no write token" in refused("trackio")[0]
