"""The configuration of `pipeline: rlvr`: prompts with verifiable rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll.configs.base import ActorInferConfig, ActorTrainConfig, ReferenceConfig, TrainConfig, WorkerConfig
from roll.configs.pipeline import PipelineConfig
from roll.configs.placement import PlacementPlan
from roll.configs.policy import PolicyOptimisation
from roll.configs.rewards import CustomRewardFunction, RewardConfig, RewardModelConfig, ValidationConfig
from roll.configs.validate import warnings_of


@dataclass(frozen=True, kw_only=True)
class RLVRConfig(PolicyOptimisation, PipelineConfig):
    """Everything a run is told. Inert and frozen; derived values are properties."""

    pipeline: Literal["rlvr"]
    """Which pipeline the file is for; `rlvr` is the only one in this version."""

    reward_pretrain: str | None = None
    """Model of the critic and of the reward model if they name none themselves. null: `pretrain` for the critic."""

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

    actor_train: ActorTrainConfig = field(default_factory=ActorTrainConfig)
    """The policy that learns."""

    actor_infer: ActorInferConfig = field(default_factory=ActorInferConfig)
    """Its copy that generates."""

    reference: ReferenceConfig | None = None
    """The frozen policy of the KL terms; started only if one of them is on. null: with LoRA, `actor_train` with its
    adapters off."""

    critic: TrainConfig | None = None
    """The value model of `adv_estimator: gae`; started only for it."""

    reward_model: RewardModelConfig | None = None
    """A sequence classifier that scores responses; started only if a domain uses it."""

    @property
    def reward_model_domains(self) -> tuple[str, ...]:
        """Domains whose score is the reward model's, or has a part of it."""
        return tuple(domain for domain, reward in self.rewards.items() if reward.uses_reward_model)

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The model roles that will be started, by name."""
        roles: dict[str, WorkerConfig] = {"actor_train": self.actor_train, "actor_infer": self.actor_infer}
        if self.reference is not None and self.uses_reference:
            roles["reference"] = self.reference
        if self.critic is not None and self.uses_critic:
            roles["critic"] = self.critic
        if self.reward_model is not None and self.reward_model_domains:
            roles["reward_model"] = self.reward_model
        return roles

    @property
    def reference_is_actor(self) -> bool:
        """Whether reference log-probs are those of `actor_train` without its adapters: no model is started for them."""
        return self.uses_reference and self.reference is None and self.actor_train.model_args.uses_lora

    def model_path(self, role: str) -> str:
        """Model of a role: the one it names, else its default; raises `ValueError` when there is neither."""
        worker: WorkerConfig | None = getattr(self, role)
        own = worker.model_args.model_name_or_path if worker is not None else None
        path = own or self.default_model(role)
        if path is None:
            raise ValueError(f"no model for {role}: set {role}.model_args.model_name_or_path or pretrain")
        return path

    def default_model(self, role: str) -> str | None:
        """Model of a role that names none. The policy's is no classifier, so it is nothing for a reward model."""
        if role == "reward_model":
            return self.reward_pretrain
        scores = self.reward_pretrain if role == "critic" else None
        return scores or self.pretrain or self.actor_train.model_args.model_name_or_path

    def tags_of(self, domain: str) -> tuple[str, ...]:
        """Tags of a domain's rows."""
        return self.rewards[domain].tag_included or (domain,)

    def domain_of(self, tag: str) -> str | None:
        """Domain of a tag; None when no domain includes it."""
        return next((domain for domain in self.rewards if tag in self.tags_of(domain)), None)

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant."""
        return warnings_of(self)

    @property
    def prompt_budget(self) -> int:
        """Prompts that may be started for one step."""
        return self.max_num_gen_batches * self.rollout_batch_size

    @property
    def min_survivors(self) -> int:
        """Usable responses below which a group isn't trained on."""
        return min(2, self.num_return_sequences_in_group)

    @property
    def placement(self) -> PlacementPlan:
        """Slots of every rank that will be started."""
        roles = {}
        for name, worker in self.roles.items():
            per_rank, slots = worker.num_gpus_per_worker, worker.slots
            roles[name] = tuple(slots[i : i + per_rank] for i in range(0, len(slots), per_rank))
        return PlacementPlan(num_nodes=self.num_nodes, num_gpus_per_node=self.num_gpus_per_node, roles=roles)
