"""Files of functions are seen from the working directory, else beside the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.api.run import check
from roll.configs.errors import ConfigError
from roll.configs.full_check import load_checked
from roll.configs.parsing.beside import with_files_beside
from roll.configs.parsing.loader import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def away(tmp_path, monkeypatch):
    """A working directory that isn't the configuration's folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_a_function_is_looked_for_beside_the_configuration(away):
    (away / "jobs/mine.py").write_text("def near(response, task):\n    return 1.0\n")
    tree = {"rewards": {"a": {"name": "mine.py:near"}}, "other": ["mine.py", "gone.py:x", "text", 3]}
    beside = str(away / "jobs/mine.py")
    seen = with_files_beside(tree, away / "jobs/job.yaml")
    assert seen == {"rewards": {"a": {"name": f"{beside}:near"}}, "other": [beside, "gone.py:x", "text", 3]}
    (away / "here/mine.py").write_text("")  # what is there comes first
    assert with_files_beside(tree, away / "jobs/job.yaml")["rewards"] == tree["rewards"]


def test_the_last_folders_of_the_configuration_may_stand_in_front(away):
    (away / "jobs/play.py").write_text("")
    for text in ("jobs/play.py:act", "./play.py:act"):
        moved = with_files_beside({"env_type": text}, away / "jobs/job.yaml")
        assert moved == {"env_type": f"{away}/jobs/play.py:act"}
    assert with_files_beside({"env_type": "other/play.py:act"}, away / "jobs/job.yaml") == {
        "env_type": "other/play.py:act"
    }
    agent = {"command": "python jobs/play.py --fast", "agent": "play.py:act", "cwd": "elsewhere"}
    assert with_files_beside({"env_config": agent}, away / "jobs/job.yaml") == {"env_config": agent}
    del agent["cwd"]
    seen = with_files_beside({"env_config": agent}, away / "jobs/job.yaml")["env_config"]
    assert seen == {"command": f"python {away}/jobs/play.py --fast", "agent": f"{away}/jobs/play.py:act"}


@pytest.mark.parametrize(
    ("name", "key"), [("sft/sft_smollm2_cpu", "prepare"), ("frozen_lake/agentic_frozen_lake_cpu", "warm_start")]
)
def test_examples_of_a_checkout_can_be_named_from_anywhere(away, name, key):
    file = ROOT / "examples" / f"{name}.yaml"
    config = load_config(file.parent, file.stem)
    assert Path(getattr(config, key).partition(":")[0]).is_file()


def test_a_missing_file_is_refused_with_both_places(away):
    file = away / "jobs/job.yaml"
    file.write_text("pipeline: sft\nmax_steps: 1\nsequence_length: 8\nprepare: gone.py:make\npretrain: m\n"
                    "actor_train: {data_args: {file_name: a.jsonl}}\n")  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load_checked(file)
    assert f"seen from {Path.cwd()} or from the configuration's folder {away / 'jobs'}" in str(caught.value)
    tree = {"pipeline": "sft", "max_steps": 1, "sequence_length": 8, "prepare": "gone.py:make", "pretrain": "m"}
    with pytest.raises(ConfigError) as caught:
        check({**tree, "actor_train": {"data_args": {"file_name": "a.jsonl"}}})
    assert f"seen from {Path.cwd()};" in str(caught.value) or f"seen from {Path.cwd()}\n" in str(caught.value)
