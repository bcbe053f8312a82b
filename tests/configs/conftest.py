"""A small valid job on disk, for tests that break it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

JOB = {
    "pipeline": "rlvr",
    "executor": "inline",
    "max_steps": 2,
    "pretrain": "model",
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 4,
    "prompt_length": 32,
    "response_length": 16,
    "rewards": {"math": {"name": "math_rule", "tag_included": ["algebra"]}, "words": {"name": "gsm8k"}},
    "actor_train": {
        "training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "data_args": {"file_name": "train.jsonl", "prompt": "question"},
    },
    "validation": {"data_args": {"file_name": "test.jsonl", "prompt": "question"}},
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `job.yaml`, its data and its model's config.json; also the working directory."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    return tmp_path


def write_job(folder: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    row = json.dumps({"question": "1+1?", "ground_truth": "2", "tag": "words"})
    (folder / "train.jsonl").write_text(row + "\n")
    (folder / "test.jsonl").write_text(row + "\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (folder / "empty.jsonl").write_text("")
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "torn.jsonl").write_text('{"question": "1+1?", "grou')
    (folder / "header.csv").write_text("question,ground_truth\n")
    (folder / "rewards.py").write_text("def score(response, task):\n    inner = 1\n    return inner\n")
    (folder / "things.py").write_text("class Thing:\n    pass\n")
    (folder / "broken.py").write_text("def score(:\n")
    (folder / "notes.txt").write_text("hello")
    (folder / "hollow").mkdir()
    locked = folder / "locked"
    locked.mkdir()
    os.chmod(locked, 0o500)
