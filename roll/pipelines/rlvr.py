"""Reinforcement learning with verifiable rewards: dataset rows as tasks, one turn, a reward function per domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll.configs.schema.rlvr_config import RLVRConfig
from roll.data.prompts import PromptSet
from roll.data.sampler import TaskSource
from roll.envs.base import Observation
from roll.pipelines.reward_router import RewardRouter
from roll.pipelines.validation import validation_metrics, validation_samples
from roll.pipelines.workload import Split, TrainingSource, Workload, query_filter
from roll.rollout.agent import Agent
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode import EpisodePlayer
from roll.rollout.reward_env import RewardEnv
from roll.tracking.base import Sample
from roll.types.episode import Group, Task
from roll.types.metrics import Metrics
from roll.utils.importing import load_object


class PromptWorkload(Workload):
    """One prompt, one response, one reward; or what a domain's own rollout makes of it. See the base class.

    Args:
        training: tasks and their prompts; None for a mere validation.
    """

    def __init__(
        self,
        config: RLVRConfig,
        tokenizer: Any,
        *,
        training: tuple[TaskSource, PromptSet] | None,
        validation: PromptSet | None,
        rewards: RewardRouter,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = {"val": validation, "train": None if training is None else training[1]}
        self._rewards = rewards
        self.source: TrainingSource | None = None if training is None else training[0]
        self.validation_tasks: Sequence[Task] | None = None if validation is None else validation.tasks
        section = config.validation
        self.validation_group_size = (section.generating_args.num_return_sequences or 1) if section else 1

    def player(self, driver: EngineDriver, split: Split) -> EpisodePlayer:
        config, prompts = self._config, self._prompts[split]
        assert prompts is not None
        args = config.actor_infer.generating_args
        if split == "val":
            assert config.validation is not None
            args = config.validation.generating_args

        def first_prompt(task: Task, _observation: Observation) -> tuple[int, ...]:
            return prompts.prompt_ids(task)

        agent = Agent(self._tokenizer, first_prompt, keep_stop_string=args.include_stop_str_in_output)
        return EpisodePlayer(
            driver,
            agent,
            lambda task, name: RewardEnv(self._rewards.submit, task, name),
            max_sequence_length=config.max_sequence_length,
            rollouts={
                domain: load_object(reward.rollout, key=f"rewards.{domain}.rollout")()
                for domain, reward in config.rewards.items()
                if reward.rollout is not None
            },
        )

    def keep(self, group: Group) -> str | None:
        return query_filter(group, self._config.rewards[group.task.domain].query_filter_config)

    def first_metrics(self) -> Metrics:
        prompts, metrics = self._prompts["train"], Metrics()
        assert prompts is not None
        metrics.update(prompts.metrics)
        return metrics

    def validation_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        assert self._config.validation is not None
        return validation_metrics(groups, self._config.validation)

    def samples(self, step: int, groups: Sequence[Group]) -> list[Sample]:  # noqa: ARG002 - shown as they are
        return validation_samples(groups, self._tokenizer, self._config.log_val_generations)
