"""Hand-made rollouts and configurations: no model, no files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from roll.configs.schema.reward_config import RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.training_args import TrainingArgs
from roll.configs.schema.worker_config import ActorTrainConfig, TrainConfig
from roll.pipelines.credit.stages import Stages, StepData
from roll.pipelines.rollouts.assemble import Rollouts, assemble
from roll.types.metrics import Metrics
from roll.types.trajectory import Group, Task, Trajectory, Turn

PROMPT = (7, 8)


@dataclass(frozen=True)
class R:
    """A response: its score and number of tokens."""

    score: float
    length: int = 1
    status: str = "ok"
    answer: str | None = None


def make_config(**keys: Any) -> RLVRConfig:
    """Domains `a` (weight 1) and `b` (weight 2), advantages that are the rewards themselves."""
    defaults: dict[str, Any] = {
        "adv_estimator": "reinforce",
        "rewards": {"a": RewardConfig(name="gsm8k"), "b": RewardConfig(name="gsm8k", weight=2.0)},
        "response_length": 10,
        "rollout_batch_size": 2,
        "num_return_sequences_in_group": 2,
        "actor_train": ActorTrainConfig(
            training_args=TrainingArgs(per_device_train_batch_size=2, gradient_accumulation_steps=2)
        ),
        "critic": TrainConfig(training_args=TrainingArgs(per_device_train_batch_size=4)),
    }
    return RLVRConfig(pipeline="rlvr", **{"pretrain": "none", **defaults, **keys})


def make_group(name: str, responses: list[R], domain: str = "a") -> Group:
    task = Task(id=name, source="hand", payload={}, seed=0, tag=domain, domain=domain)
    trajectories = tuple(
        Trajectory(
            task_id=name,
            member=member,
            turns=(
                Turn(
                    prompt_ids=PROMPT,
                    response_ids=tuple(range(10, 10 + r.length)),
                    logprobs=(-1.0,) * r.length,
                    versions=(3,) * r.length,
                    finish_reason="length" if r.status == "truncated" else "stop",
                ),
            ),
            reward=r.score,
            status=r.status,  # type: ignore[arg-type]
            answer=r.answer,
        )
        for member, r in enumerate(responses)
    )
    return Group(task=task, trajectories=trajectories)


def make_rollouts(*groups: list[R], domains: str = "") -> Rollouts:
    """One group per argument; `domains` is a letter per group."""
    named = zip(groups, domains or "a" * len(groups), strict=True)
    return assemble([make_group(f"t{i}", responses, domain) for i, (responses, domain) in enumerate(named)])


def with_versions(rollouts: Rollouts, *versions: int) -> Rollouts:
    """The same rows with these weight versions on the action tokens, in order; one number is for all of them."""
    mask = rollouts.batch.action_mask
    column = torch.full((len(mask),), -1)
    column[mask] = torch.tensor(versions)
    return replace(rollouts, batch=rollouts.batch.with_columns(versions=column))


def fresh(rollouts: Rollouts, step: int) -> Rollouts:
    """The same rows as if the weights that this step trains had sampled them."""
    return with_versions(rollouts, step - 1)


def on_actions(rollouts: Rollouts, *values: float) -> torch.Tensor:
    """A token column with these values on the action tokens, in order, and junk elsewhere."""
    mask = rollouts.batch.action_mask
    column = torch.full((len(mask),), 99.0)
    column[mask] = torch.tensor(values)
    return column


def credited_by(stages: Stages, rollouts: Rollouts, step: int = 1) -> tuple[Rollouts, Metrics]:
    """The rollouts with a batch that is ready for the update, and what is logged."""
    data = stages(StepData(rollouts, step))
    return data.rollouts, data.metrics
