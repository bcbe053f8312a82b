"""A task that a tiny random model learns in seconds: answer in lower or upper case as the prompt asks.

A quarter of the characters are right at the start, so there is a reward to climb from the first step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REWARD = '''
"""The share of the response that is written in the wanted case."""


def case(response, task):
    check = str.islower if task.payload["ground_truth"] == "lower" else str.isupper
    return sum(map(check, response[:2])) / 2
'''

YAML = """
pipeline: rlvr
exp_name: toy
seed: 3
executor: inline
output_dir: {output}
track_with: jsonl
pretrain: {model}
max_steps: 4
rollout_batch_size: 8
num_return_sequences_in_group: 8
prompt_length: 16
response_length: 2
reward_retries: 0
rewards:
  case: {{name: custom, tag_included: case}}
custom_reward_function: {{path: {folder}/case_reward.py, name: case}}
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-2, per_device_train_batch_size: 32, gradient_accumulation_steps: 2}}
  data_args: {{file_name: {folder}/case.jsonl, prompt: prompt, tag: tag, template: plain}}
actor_infer:
  generating_args: {{temperature: 1.0, ignore_eos: true}}
validation:
  data_args: {{file_name: {folder}/case.jsonl, prompt: prompt, tag: tag, template: plain}}
  generating_args: {{temperature: 0.0, ignore_eos: true}}
"""


def write_toy(folder: Path, model: Path, rows: int = 16) -> Path:
    """Write configuration, data and reward into `folder`; returns the folder, the file is `toy.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case_reward.py").write_text(REWARD)
    lines = [
        {"id": str(i), "tag": "case", "prompt": f"{i % 10}{'lU'[i % 2]}=", "ground_truth": ("lower", "upper")[i % 2]}
        for i in range(rows)
    ]
    (folder / "case.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "toy.yaml").write_text(YAML.format(output=folder / "output", model=model, folder=folder))
    return folder


def config_of(folder: Path, *overrides: str) -> Any:
    """Return the checked configuration of a folder's `toy.yaml`."""
    from roll.configs.checks.prerequisites import check_prerequisites
    from roll.configs.parsing.loader import load_config

    config = load_config(folder, "toy", overrides)
    check_prerequisites(config)
    return config


def run_toy(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run it in this process; the rows of its metrics file."""
    from roll.pipelines import run_pipeline

    config = config_of(folder, *overrides)
    run_pipeline(config)
    return metrics_of(config.logging_path)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
