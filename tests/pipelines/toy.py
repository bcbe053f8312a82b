"""A task that a tiny model learns in seconds: answer each prompt with its letter. Used by the pipeline tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LETTERS = "abcd"

REWARD = '''
"""The share of the response's first characters that are the wanted letter."""


def letter(response, task):
    wanted = task.payload["ground_truth"]
    return sum(c.lower() == wanted or c.isdigit() for c in response[:2]) / 2
'''

YAML = """
pipeline: rlvr
exp_name: toy
seed: 3
executor: inline
output_dir: {output}
track_with: [jsonl]
pretrain: {model}
max_steps: 4
rollout_batch_size: 4
num_return_sequences_in_group: 4
prompt_length: 16
response_length: 2
reward_retries: 0
rewards:
  letters: {{name: custom, tag_included: [letters]}}
custom_reward_function: {{path: {reward}, name: letter}}
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-2, per_device_train_batch_size: 8, gradient_accumulation_steps: 2}}
  data_args: {{file_name: {data}, prompt: prompt, tag: tag, template: plain}}
actor_infer:
  generating_args: {{temperature: 1.0, ignore_eos: true}}
validation:
  data_args: {{file_name: {data}, prompt: prompt, tag: tag, template: plain}}
  generating_args: {{temperature: 0.0, ignore_eos: true}}
"""


def write_toy(folder: Path, model: Path, rows: int = 16) -> Path:
    """Write configuration, data and reward into `folder`; returns the folder, the file is `toy.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    reward, data = folder / "letter_reward.py", folder / "letters.jsonl"
    reward.write_text(REWARD)
    letters = [LETTERS[i % len(LETTERS)] for i in range(rows)]
    lines = [
        {"id": str(i), "tag": "letters", "prompt": f"{letter}{i // 4}=", "ground_truth": letter}
        for i, letter in enumerate(letters)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = YAML.format(output=folder / "output", model=model, reward=reward, data=data)
    (folder / "toy.yaml").write_text(text)
    return folder


def run_toy(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run it in this process; the rows of its metrics file."""
    from roll.configs.environment import check_environment
    from roll.configs.loader import load_config
    from roll.pipelines import run_pipeline

    config = load_config(folder, "toy", overrides)
    check_environment(config)
    run_pipeline(config)
    return metrics_of(config.logging_path)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
