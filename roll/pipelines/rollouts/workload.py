"""What one pipeline with rollouts doesn't share with another: its tasks, and how an episode of one is played.

rlvr.py has prompts of data sets with reward functions, agentic.py has environments.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from roll.configs.schema.reward_config import QueryFilterConfig, ResponseFilterConfig
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode_groups import ResumableTaskSource
from roll.rollout.episode_player import EpisodePlayer
from roll.tracking.base import Sample
from roll.types.metrics import Metrics
from roll.types.trajectory import Group, Task, Trajectory

Split = Literal["train", "val"]


class TrainingSource(ResumableTaskSource, Protocol):
    """Training tasks, with a cursor that can be set and tasks that can be found again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""

    def task(self, task_id: str) -> Task:
        """Return the task with this id."""

    @property
    def remaining(self) -> int | None:
        """Return tasks that are left; None without end."""


class Workload(ABC):
    """The tasks of a run, and who plays them."""

    source: TrainingSource | None  # Training tasks; None where nothing is trained
    validation_tasks: Sequence[Task] | None  # None without validation
    validation_group_size: int

    @abstractmethod
    def player(self, driver: EngineDriver, split: Split) -> EpisodePlayer:
        """Return what plays training or validation tasks."""

    @abstractmethod
    def keep(self, group: Group) -> str | None:
        """Return why the group isn't worth training on; None to keep it."""

    @abstractmethod
    def validation_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics of finished validation groups."""

    @abstractmethod
    def samples(self, step: int, groups: Sequence[Group]) -> list[Sample]:
        """Return a few validation episodes as text."""

    def warn(self, groups: Sequence[Group]) -> None:
        """Log what is odd about the groups of a step. Default: nothing."""

    def first_metrics(self) -> Metrics:
        """Return what is logged once about the training tasks. Default: nothing."""
        return Metrics()

    def take_metrics(self) -> Metrics:
        """Return what happened while episodes were played since the last call. Default: nothing."""
        return Metrics()

    def stop(self, driver: EngineDriver) -> None:
        """End what plays episodes on the engines' event loop, as long as there is one. Default: nothing does."""

    def close(self) -> None:
        """Release what the workload has started. Default: nothing."""


def response_filter(trajectory: Trajectory, rule: ResponseFilterConfig) -> str | None:
    """Return why a domain's filter leaves out this response; None to keep it."""
    if rule.type == "no_filter":
        return None
    value = trajectory.reward if rule.type == "score_filter" else float(trajectory.num_response_tokens)
    low, high = rule.filter_args.threshold_down, rule.filter_args.threshold_up
    if (low is None or value > low) and (high is None or value < high):
        return None
    what = "score" if rule.type == "score_filter" else "length"
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return f"filtered: {what} {value:g} outside ({low:g}, {high:g})"


def query_filter(group: Group, rule: QueryFilterConfig) -> str | None:
    """Return why a domain's filter drops this group; None to keep it."""
    rewards = torch.tensor([t.reward for t in group.survivors], dtype=torch.float64)
    args = rule.filter_args
    if rule.type == "mean_filter":
        mean = float(rewards.mean())
        if not args.threshold_down < mean < args.threshold_up:
            return f"filtered: mean score outside ({args.threshold_down:g}, {args.threshold_up:g})"
    if rule.type == "std_filter":
        spread = float(rewards.std()) if len(rewards) > 1 else 0.0
        if spread <= args.std_threshold:
            return f"filtered: standard deviation of scores not above {args.std_threshold:g}"
    return None
