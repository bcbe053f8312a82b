"""A game that a tiny random model learns in seconds: answer every letter in its own case, for a few turns.

A quarter of the characters are right at the start, so there is a reward to climb from the first step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.envs.base import Env, Observation, StepResult
from roll.utils.seeding import stable_hash


class Letters(Env):
    """Shows `l` or `U`; a response in lower or upper case is right."""

    instructions = "case"

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        rng = random.Random(stable_hash("letters", seed))
        self._wanted = [rng.choice("lU") for _ in range(self._turns)]
        self._right: list[bool] = []
        return self._shown()

    def _shown(self) -> Observation:
        return Observation.of(f"{self._wanted[len(self._right)]}=", state=self._wanted[len(self._right)])

    def step(self, action: str) -> StepResult:
        check = str.islower if self._wanted[len(self._right)] == "l" else str.isupper
        share = sum(map(check, action[:2])) / 2
        self._right.append(share == 1)
        over = len(self._right) == self._turns
        return StepResult(
            reward=share,
            terminated=over,
            observation=None if over else self._shown(),
            metrics={"success": float(all(self._right))} if over else {},
        )

    def solution(self) -> list[str]:
        return ["aa" if wanted == "l" else "AA" for wanted in self._wanted[len(self._right) :]]


YAML = """
pipeline: agentic
exp_name: letters
seed: 3
executor: inline
output_dir: {output}
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


def write_toy_env(folder: Path, model: Path) -> Path:
    """Write configuration and environment into `folder`; returns the folder, the file is `toy.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).read_text(encoding="utf-8")
    (folder / "letters.py").write_text(source[: source.index('YAML = """')], encoding="utf-8")
    (folder / "toy.yaml").write_text(YAML.format(output=folder / "output", model=model, folder=folder))
    return folder
