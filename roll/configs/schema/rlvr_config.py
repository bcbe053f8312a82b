"""The configuration of `pipeline: rlvr`: prompts with verifiable rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll.configs.schema.fields import number
from roll.configs.schema.reward_config import CustomRewardFunction, RewardConfig, RewardModelConfig, ValidationConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.worker_config import GeneratingArgs, WorkerConfig


@dataclass(frozen=True, kw_only=True)
class RLVRConfig(RLConfig):
    """Rows of data sets as tasks, one response per episode, a reward function per domain."""

    pipeline: Literal["rlvr"]
    """Which pipeline the file is for."""

    num_return_sequences_in_group: int = number(8, ge=1)
    """Responses per prompt; they form the group that rewards are compared in."""

    rewards: dict[str, RewardConfig]
    """How each domain is scored, by domain name."""

    custom_reward_function: CustomRewardFunction | None = None
    """A reward function of your own, for domains with `name: custom`."""

    global_template: str | None = None
    """Template of all prompts, over `data_args.template`. null: no exception."""

    tag_to_template: dict[str, str] = field(default_factory=dict)
    """Template by tag, over `global_template`."""

    validation: ValidationConfig | None = None
    """Held-out prompts. null: no validation."""

    reward_model: RewardModelConfig | None = None
    """A sequence classifier that scores responses; started only if a domain uses it."""

    @property
    def group_size(self) -> int:
        return self.num_return_sequences_in_group

    @property
    def groups_per_step(self) -> int:
        return self.rollout_batch_size

    @property
    def group_size_key(self) -> str:
        return "num_return_sequences_in_group"

    @property
    def needs_group(self) -> tuple[tuple[str, str], ...]:
        filters = {domain: reward.query_filter_config.type for domain, reward in self.rewards.items()}
        return tuple(
            (f"rewards.{domain}.query_filter_config std_filter", "drops groups of one")
            for domain, kind in filters.items()
            if kind == "std_filter"
        )

    @property
    def validation_sampling(self) -> tuple[str, GeneratingArgs] | None:
        if self.validation is None:
            return None
        return "validation.generating_args", self.validation.generating_args

    def domain_weight(self, domain: str) -> float:
        return self.rewards[domain].weight

    @property
    def reward_model_domains(self) -> tuple[str, ...]:
        """Domains whose score is the reward model's, or has a part of it."""
        return tuple(domain for domain, reward in self.rewards.items() if reward.uses_reward_model)

    @property
    def sections(self) -> dict[str, WorkerConfig]:
        reward_model = {} if self.reward_model is None else {"reward_model": self.reward_model}
        return {**super().sections, **reward_model}

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        return {role: w for role, w in super().roles.items() if role != "reward_model" or self.reward_model_domains}

    def tags_of(self, domain: str) -> tuple[str, ...]:
        """Tags of a domain's rows."""
        return self.rewards[domain].tag_included or (domain,)

    def domain_of(self, tag: str) -> str | None:
        """Domain of a tag; None when no domain includes it."""
        return next((domain for domain in self.rewards if tag in self.tags_of(domain)), None)
