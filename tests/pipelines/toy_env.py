"""A run of the agentic pipeline on a game that a tiny random model learns in seconds: see toy_letters.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

from rollout_files import read_rollouts

YAML = """
pipeline: agentic
exp_name: letters
seed: 3
executor: inline
output_dir: {output}
rollout_dump_dir: {folder}/dump
track_with: jsonl
pretrain: {model}
max_steps: 4
rollout_batch_size: 32
sequence_length: 160
prompt_length: 32
response_length: 2
custom_envs:
  letters: {{env_type: "{folder}/letters.py:Letters", action_pattern: null, system_template: null, max_steps: 4}}
train_env_manager: {{num_env_groups: 4, group_size: 8}}
val_env_manager: {{num_env_groups: 16, generating_args: {{temperature: 0.0, ignore_eos: true}}}}
adv_estimator: reinforce
reward_normalization: {{grouping: traj_group, method: mean_std}}
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-2, per_device_train_batch_size: 32}}
actor_infer:
  generating_args: {{temperature: 1.0, ignore_eos: true}}
"""


SHORT = ("rollout_batch_size=64", "+custom_envs.letters.env_config.turns=2")
"""Two turns, which plain text (see `without_template`) makes learnable in 24 steps."""
CRITIC = (
    "critic.model_args.disable_gradient_checkpointing=true",
    "critic.training_args.per_device_train_batch_size=32",
    "critic.training_args.learning_rate=1e-2",
)


def faulty(folder: Path, fault: str, where: str = "step", share: float = 0.2, turns: int = 3) -> tuple[str, ...]:
    """Settings that play `Faulty` instead, in this folder of `write_toy_env`."""
    config = f"{{turns: {turns}, fault: {fault}, where: {where}, share: {share}}}"
    return (f"custom_envs.letters.env_type='{folder}/letters.py:Faulty'", f"+custom_envs.letters.env_config={config}")


def without_template(model: Path, folder: Path) -> Path:
    """The model with a tokenizer without a chat template: a conversation is plain text, and easier to learn from."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def episodes(folder: Path) -> list[SimpleNamespace]:
    """Every training row that a run dumped into `folder/dump`, step by step, without paths and seconds."""
    rows = [row for file in sorted((folder / "dump").glob("rollouts-*.parquet")) for row in read_rollouts(file)]
    for row in rows:
        del row.source, row.spans
    return rows


def write_toy_env(folder: Path, model: Path) -> Path:
    """Write configuration and environment into `folder`; returns the folder, the file is `toy.yaml`.

    Rollouts are dumped into `folder/dump`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("toy_letters.py")
    shutil.copy(source, folder / "letters.py")
    (folder / "toy.yaml").write_text(YAML.format(output=folder / "output", model=model, folder=folder))
    return folder
