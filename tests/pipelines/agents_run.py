"""Runs of the agentic pipeline whose episodes are played by the agents of tests/gateway/agents.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

AGENTS = Path(__file__).parents[1] / "gateway" / "agents.py"

YAML = """
pipeline: agentic
exp_name: agents
seed: 3
executor: inline
output_dir: {folder}/output
rollout_dump_dir: {folder}/dump
track_with: jsonl
pretrain: {model}
max_steps: 2
rollout_batch_size: {batch}
sequence_length: 160
prompt_length: 32
response_length: 2
custom_envs: {envs}
train_env_manager: {{num_env_groups: {tags}, group_size: 4}}
val_env_manager: {{num_env_groups: {tags}}}
adv_estimator: reinforce
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-2, per_device_train_batch_size: {batch}}}
actor_infer:
  generating_args: {{temperature: 1.0, ignore_eos: true}}
"""


def endpoint(**env_config: Any) -> dict[str, Any]:
    """A section of `custom_envs`."""
    return {"env_type": "endpoint", "env_config": env_config}


def command(what: str, **env_config: Any) -> dict[str, Any]:
    """One whose program does `what`."""
    return endpoint(command=[sys.executable, str(AGENTS), *what.split()], **env_config)


def write_run(folder: Path, model: Path, envs: dict[str, Any]) -> Path:
    """Write `toy.yaml` into the folder, for `toy.run_toy`; validation plays one episode of each tag."""
    text = YAML.format(folder=folder, model=model, envs=json.dumps(envs), tags=len(envs), batch=4 * len(envs))
    (folder / "toy.yaml").write_text(text)
    return folder
