"""`roll plan --measure`: a short run of the real pipeline, which leaves nothing behind and never hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from roll.cli.__main__ import main


def job(folder: Path, model: Path, **more: object) -> Path:
    """Fine-tuning inline, with trackers, checkpoints and validation, which a dry run leaves out."""
    (folder / "rows.jsonl").write_text('{"prompt": "a b", "response": "c"}\n' * 8, "utf-8")
    tree = {
        "pipeline": "sft", "pretrain": str(model), "executor": "inline", "max_steps": 50, "sequence_length": 32,
        "output_dir": str(folder / "out"), "logging_dir": str(folder / "logs"), "save_steps": 1, "eval_steps": 1,
        "validation_share": 0.25, "track_with": ["stdout", "tensorboard"],
        "actor_train": {
            "training_args": {"per_device_train_batch_size": 2},
            "data_args": {"file_name": str(folder / "rows.jsonl"), "prompt": "prompt", "response": "response",
                          "template": "plain"},
        },
        **more,
    }  # fmt: skip
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(tree), "utf-8")
    return file


def test_the_seconds_of_a_step_are_measured_and_nothing_is_left_behind(tmp_path: Path, tiny_model: Path, capsys):
    file = job(tmp_path, tiny_model)
    before = sorted(tmp_path.rglob("*"))
    code = main(["plan", str(file), "--devices", "cpu:8", "--measure", "--json"])
    assert code == 0, capsys.readouterr()
    seconds = json.loads(capsys.readouterr().out)["measured_seconds"]
    assert 0 < seconds["train_actor"] <= seconds["step"] < 60
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ({}, ["--measure_timeout", "0.2"], "took more than 0.2 s"),
        ({"sequence_length": 3, "truncation": "error"}, [], "the dry run failed"),
    ],
)
def test_a_run_that_fails_or_takes_too_long_is_one_sentence(
    tmp_path: Path, tiny_model: Path, capsys, more: dict, options: list[str], said: str
):
    file = job(tmp_path, tiny_model, **more)
    assert main(["plan", str(file), "--devices", "cpu:8", "--measure", *options]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err
