"""Toy preferences for the tests of `dpo` and `reward_model`: letters in lower case are liked, capitals aren't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

YAML = """
pipeline: {pipeline}
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
  training_args:
    learning_rate: 1.0e-2
    adam_epsilon: 1.0e-6
    per_device_train_batch_size: 4
    gradient_accumulation_steps: 3
  data_args: {{file_name: {folder}/rows.jsonl}}
"""
TRAINING = "actor_train.training_args"
LORA = ("actor_train.model_args.lora_rank=4", "actor_train.model_args.lora_alpha=8")


def preferences(count: int, *, single: bool = False) -> list[dict[str, Any]]:
    """Answers of several lengths; held-out rows have the same rule."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        liked, other = "abcdefghij"[i % 10] * (1 + i % 3), "ABCDEFGHIJ"[(i + 3) % 10] * (1 + i // 2 % 3)
        prompt = f"{i % 10}?"
        if single:
            good = i % 2 == 0
            text = liked if good else other
            rows.append({"prompt": prompt, "completion": text, "label": good, "score": 1 if good else -1})
        else:
            rows.append({"prompt": prompt, "chosen": liked, "rejected": other, "margin": i % 2})
    return rows


def write(folder: Path, model: Path, pipeline: str = "dpo", rows: int = 20, *, single: bool = False) -> Path:
    """Write configuration and rows into `folder`; returns the folder, the file is `toy.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.yaml").write_text(YAML.format(folder=folder, model=model, pipeline=pipeline))
    lines = preferences(rows, single=single)
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def tokenizer_in(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def policy_in(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def classifier_in(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return AdamW with an epsilon far above rounding, which would otherwise make a step of a gradient of nothing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)


def step_by_hand(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> dict[str, float]:
    """One clipped step."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"preference/loss": float(loss.detach()), "actor/grad_norm": float(norm)}
