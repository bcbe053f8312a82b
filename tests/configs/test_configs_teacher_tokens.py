"""A teacher with other tokens is refused by the key and the folder that say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.configs.checks.teacher_checks import teacher_checks
from roll.configs.parsing.loader import load_config


@pytest.mark.parametrize("own", ["model", "tokenizer"])
def test_a_teacher_with_other_tokens_is_named_by_its_folder(tmp_path: Path, own: str) -> None:
    for name, tokens in (("student", {"a": 0, "b": 1}), ("teacher", {"a": 0, "b": 1, "c": 2})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    folder = {"model": "teacher", "tokenizer": "student"}[own]
    more = f", tokenizer_name_or_path: {tmp_path}/teacher" if own == "tokenizer" else ""
    (tmp_path / "job.yaml").write_text(
        f"""
pipeline: distill
executor: inline
pretrain: {tmp_path}/student
teacher: {{model_args: {{model_name_or_path: {tmp_path}/{folder}{more}}}}}
max_steps: 1
rollout_batch_size: 1
prompt_length: 8
response_length: 8
rewards: {{scored: {{name: none}}}}
actor_train:
  training_args: {{per_device_train_batch_size: 1}}
  data_args: {{file_name: {tmp_path}/rows.jsonl, template: plain}}
"""
    )
    (violation,) = teacher_checks(load_config(tmp_path, "job", []))
    assert str(violation).startswith(
        f"teacher.model_args.{own}_name_or_path: got '{tmp_path}/teacher', expected a model with the student's "
        "tokenizer: the student has 2 tokens, the teacher 3"
    )
