"""The configuration of `pipeline: rlvr`: prompts with verifiable rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.configs.schema.acts_if import acting, needs, unless
from roll.configs.schema.fields import named, number, one_or_many
from roll.configs.schema.judge_config import JUDGE, JudgeConfig
from roll.configs.schema.policy_config import CosineLength, NormLevel, OverlongShaping
from roll.configs.schema.reward_config import (
    ANY_TAG,
    REWARD_MODELS,
    CustomRewardFunction,
    RewardConfig,
    RewardModelConfig,
    ValidationConfig,
)
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.tool_config import InteractionConfig
from roll.configs.schema.worker_config import ActorTrainConfig, WorkerConfig


@dataclass(frozen=True, kw_only=True)
class RLVRConfig(RLConfig):
    """Rows of data sets as tasks, one response per episode, a reward function per domain."""

    group_size_key: ClassVar[str] = "num_return_sequences_in_group"

    pipeline: Literal["rlvr"]
    num_return_sequences_in_group: int = number(8, ge=1, le=65_536)
    """Responses per prompt; they form the group that rewards are compared in."""
    num_train_epochs: int | None = number(None, ge=0)
    """Passes over the training rows. 0 or null: `max_steps` decides."""
    truncation: Literal["error", "left", "right", "middle", "filter"] = "error"
    """What happens to a longer prompt: stop with an error, cut its left, right or middle, or leave the row
    out (counted)."""
    reward_retries: int = number(2, ge=0)
    """Further tries after a reward function raised or its process died; then the sample is dropped and counted. A
    timeout isn't tried again."""
    reward_env: tuple[str, ...] = one_or_many()
    """Environment variables that the processes of reward functions see, e.g. the key of a service, besides the usual
    ones (`PATH`, `HOME`, locale, caches; docs/rewards.md). No other reaches them: they handle model output."""
    rewards: dict[str, RewardConfig]
    """How each domain is scored, by domain name."""
    actor_train: ActorTrainConfig = field(default_factory=ActorTrainConfig)
    custom_reward_function: CustomRewardFunction | None = None
    """A reward function of your own, for domains with `name: custom`."""
    global_template: str | None = None
    """Template of all prompts, over `data_args.template`. null: no exception."""
    tag_to_template: dict[str, str] = field(default_factory=dict)
    """Template by tag, over `global_template`."""
    validation: ValidationConfig | None = None
    """Held-out prompts. null: `validation_share` decides."""
    validation_share: float = number(0.0, ge=0, lt=1)
    """Share of the training prompts that is held out instead, of all files, procedural tasks and domains together,
    drawn by the seed. `validation` then says how they are sampled, and has no `data_args`. 0: none."""
    reward_model: RewardModelConfig | None = None
    """A sequence classifier that scores responses; started only if a domain uses it."""
    reward_models: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Further ones by name, for domains with `name: reward_models.<name>` or `reward_models_weights`."""
    judge: JudgeConfig | None = None
    """A language model that grades responses; asked, and started, only if a domain uses it."""
    reward_norm: NormLevel | None = None
    """Normalise scores before the estimator: subtract the mean and divide by the standard deviation of the
    whole batch, of the prompt's group, or of all scores so far. null: off."""
    reward_shift: bool = acting(False, needs("reward_norm", fix="reward_norm=group (or batch, running)"))
    """Only subtract the mean (with `reward_scale` too: both, as with neither)."""
    reward_scale: bool = acting(False, needs("reward_norm", fix="reward_norm=group (or batch, running)"))
    """Only divide by the standard deviation."""
    use_reward_scaling: bool = acting(False, unless("reward_norm", why="that already divides scores"))
    """Divide scores by the standard deviation of all scores so far."""
    use_reward_norm: bool = acting(False, needs("use_reward_scaling"))
    """Also subtract the mean of all scores so far."""
    overlong_shaping: OverlongShaping | None = None
    """Soft penalty for responses near the length limit. null: off."""
    interactions: tuple[InteractionConfig, ...] = ()
    """Simulated users; a domain's `interaction`, or a row's `interaction_kwargs`, says who answers its responses."""
    cosine_length: CosineLength | None = None
    """Reward short right responses and long wrong ones more, in place of the score. null: off."""

    @property
    def group_size(self) -> int:
        return self.num_return_sequences_in_group

    @property
    def groups_per_step(self) -> int:
        return self.rollout_batch_size

    @property
    def reward_mean_over(self) -> NormLevel | None:
        if self.use_reward_scaling:
            return "running" if self.use_reward_norm else None
        return None if self.reward_scale and not self.reward_shift else self.reward_norm

    @property
    def reward_std_over(self) -> NormLevel | None:
        if self.use_reward_scaling:
            return "running"
        return None if self.reward_shift and not self.reward_scale else self.reward_norm

    @property
    def needs_group(self) -> tuple[tuple[str, str], ...]:
        filters = {domain: reward.query_filter_config.type for domain, reward in self.rewards.items()}
        return tuple(
            (f"rewards.{domain}.query_filter_config std_filter", "drops groups of one")
            for domain, kind in filters.items()
            if kind == "std_filter"
        )

    def domain_weight(self, domain: str) -> float:
        return self.rewards[domain].weight

    def template_variables(self, domain: str) -> dict[str, Any]:
        """Variables of the chat template in a domain's prompts."""
        return {**self.chat_template_kwargs, **self.rewards[domain].chat_template_kwargs}

    @property
    def prompt_templates(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        sections = [self.actor_train.data_args, *([self.validation.data_args] if self.validation else [])]
        templates: list[tuple[str, Mapping[str, Any]]] = []
        for domain in self.rewards:
            usual = [self.global_template or data.template for data in sections]
            own = [self.tag_to_template[tag] for tag in self.tags_of(domain) if tag in self.tag_to_template]
            templates += [(template, self.template_variables(domain)) for template in (*usual, *own)]
        return tuple(each for number, each in enumerate(templates) if each not in templates[:number])

    def reward_terms(self, domain: str) -> dict[str, float]:
        reward = self.rewards[domain]
        factor = reward.weight * (1.0 if reward.rule_weight is None else reward.rule_weight)
        return {name: factor * part.weight for name, part in reward.parts.items()}

    @property
    def reward_model_domains(self) -> tuple[str, ...]:
        """Domains whose score is the reward model's, or has a part of it."""
        return tuple(domain for domain, reward in self.rewards.items() if reward.uses_reward_model)

    def domains_of(self, role: str) -> tuple[str, ...]:
        """Domains in whose score this model has a say."""
        return tuple(domain for domain, reward in self.rewards.items() if role in reward.models)

    @property
    def sections(self) -> dict[str, WorkerConfig]:
        several = {f"{REWARD_MODELS}.{name}": model for name, model in self.reward_models.items()}
        return {**super().sections, **several}

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        idle = {role for role, worker in self.sections.items() if self._scores(worker) and not self.domains_of(role)}
        if self.judge is not None and self.judge.endpoint is not None:
            idle.add(JUDGE)
        return {role: worker for role, worker in super().roles.items() if role not in idle}

    @staticmethod
    def _scores(worker: WorkerConfig) -> bool:
        return isinstance(worker, (RewardModelConfig, JudgeConfig))

    def tags_of(self, domain: str) -> tuple[str, ...]:
        """Tags of a domain's rows."""
        return self.rewards[domain].tag_included or (domain,)

    def domain_of(self, tag: str) -> str | None:
        """Domain of a tag; None when no domain includes it."""
        owners = {tag: domain for domain in self.rewards for tag in self.tags_of(domain)}
        return owners.get(tag, owners.get(ANY_TAG))


@dataclass(frozen=True, kw_only=True)
class DistillConfig(RLVRConfig):
    """As `rlvr`, with a teacher; rewards only if there are any. Inert and frozen; derived values are properties."""

    pipeline: Literal["distill"]  # type: ignore[assignment]
    exp_name: str = "distill"
    num_return_sequences_in_group: int = number(1, ge=1, le=65_536)
    """Responses per prompt. One will do, unless rewards are compared."""
    adv_estimator: str = named("reinforce", args="adv_estimator_args")
    """As in `rlvr`, for the share of the rewards, `distill.reward_coef`."""
    rewards: dict[str, RewardConfig] = field(
        default_factory=lambda: {"distill": RewardConfig(name="none", tag_included=(ANY_TAG,))}
    )
    """How each domain is scored, for validation and for `distill.reward_coef`. Left out: rows of any tag, no score."""
