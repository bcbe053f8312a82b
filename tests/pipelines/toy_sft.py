"""A fine-tuning run: say the digit that follows, in a word whose length differs from row to row."""

from __future__ import annotations

import json
from pathlib import Path

YAML = """
pipeline: sft
exp_name: toy
seed: 5
executor: inline
output_dir: {folder}/output
track_with: jsonl
pretrain: {model}
max_steps: 3
sequence_length: 48
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-2, per_device_train_batch_size: 2, gradient_accumulation_steps: 3}}
  data_args: {{file_name: {folder}/rows.jsonl, prompt: question, response: answer}}
"""


def write_sft(folder: Path, model: Path, rows: int = 20) -> Path:
    """Write configuration and rows into `folder`; returns the folder, the file is `toy.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.yaml").write_text(YAML.format(folder=folder, model=model))
    lines = [{"question": f"{i % 10}?", "answer": "abcdefghij"[(i + 1) % 10] * (1 + i % 10 % 3)} for i in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
