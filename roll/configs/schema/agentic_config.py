"""The configuration of `pipeline: agentic`: environments that are played over several turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from roll.configs.schema.acts_if import acting, needs
from roll.configs.schema.agents_config import GatewayConfig
from roll.configs.schema.batch_plan import BatchPlan
from roll.configs.schema.env_config import (
    CustomEnv,
    EnvManager,
    EnvWorkers,
    RewardNormalization,
    ValEnvManager,
    split_evenly,
)
from roll.configs.schema.fields import named, number
from roll.configs.schema.rl_config import RLConfig


@dataclass(frozen=True, kw_only=True)
class AgenticConfig(RLConfig):
    """Pairs of an environment and a seed as tasks, an episode of several responses each."""

    group_size_key: ClassVar[str] = "train_env_manager.group_size"
    validation_key: ClassVar[str] = "val_env_manager"

    pipeline: Literal["agentic"]
    exp_name: str = "agentic"
    warm_start: str | None = None
    """A configuration file of `pipeline: sft` that is run first, with this run's `seed`, below
    `<output_dir>/warm_start`; what it makes is then `pretrain`. Once its model is there it isn't run again. Relative to
    the working directory. null: none."""
    custom_envs: dict[str, CustomEnv]
    """Kinds of environments by tag."""
    train_env_manager: EnvManager = field(default_factory=EnvManager)
    """What is played in training. `rollout_batch_size` episodes are a step."""
    val_env_manager: ValEnvManager | None = None
    """What is played in validation: with seeds of its own, the same in every validation. null: no validation."""
    env_workers: EnvWorkers = field(default_factory=EnvWorkers)
    """The processes that environments live in, of training and validation each."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    """Where agents of `env_type: endpoint` reach the policy."""
    sample_unit: Literal["trajectory", "step", "concat"] = "trajectory"
    """What a training row is. `trajectory`: a whole episode; its context is carried on to the end. `step`: a turn; its
    prompt shows the last `history_length` exchanges and the new message. `concat`: turns that follow on one another;
    the context is carried on for `history_length` exchanges and is then reset to the new message."""
    reward_normalization: RewardNormalization = field(default_factory=RewardNormalization)
    """How episodes' rewards are compared before `adv_estimator`, or by `gigpo` and `step_reinforce`. Estimators that
    compare the members of a group themselves (grpo, rloo, ...) take `method: identity`."""
    adv_estimator: str = named("reinforce", args="adv_estimator_args")
    """As in `pipeline: rlvr`, and gigpo, step_reinforce. The default leaves the comparison of episodes to
    `reward_normalization`."""
    episode_reward_weight: float = number(1.0, ge=0)
    """`gigpo`: weight of the advantage of the whole episode."""
    step_reward_weight: float = number(1.0, ge=0)
    """`gigpo`: weight of the advantage of a turn among those that met the same state."""
    step_reward_gamma: float = number(0.95, ge=0, le=1)
    """`gigpo` and `step_reinforce`: discount per turn."""
    discount_over: Literal["token", "turn"] = "token"
    """`gae`, `reinforce` and `reinforce_plus_plus`: whether `gamma` and `lambd` discount from token to token or from
    turn to turn."""
    render_save_dir: str | None = acting(
        None, needs("log_val_generations", fix="log_val_generations=4"), needs("val_env_manager")
    )
    """Folder for pictures and texts of the first `log_val_generations` validation episodes. null: none."""

    @property
    def group_size(self) -> int:
        return self.train_env_manager.group_size

    @property
    def one_token_responses(self) -> bool:
        return all(env.max_tokens_per_step == 1 for env in self.custom_envs.values())

    @property
    def groups_per_step(self) -> int:
        return self.rollout_batch_size // self.group_size

    @property
    def managers(self) -> dict[str, EnvManager]:
        """Return those there are, by their keys."""
        val = {} if self.val_env_manager is None else {"val_env_manager": self.val_env_manager}
        return {"train_env_manager": self.train_env_manager, **val}

    @property
    def env_processes(self) -> EnvWorkers:
        """Return `env_workers`, or what follows from `max_env_num_per_worker` of the managers."""
        limits = [(m.episodes_at_once, m.max_env_num_per_worker) for m in self.managers.values()]
        sized = [(episodes, each) for episodes, each in limits if each is not None]
        if not sized:
            return self.env_workers
        processes, most = max(-(-episodes // each) for episodes, each in sized), max(each for _, each in sized)
        return replace(self.env_workers, world_size=processes, max_env_num_per_worker=most)

    @property
    def needs_group(self) -> tuple[tuple[str, str], ...]:
        needs = []
        rule = self.reward_normalization
        per_episode = self.adv_estimator != "step_reinforce"  # compares turns, of which one episode has several
        if rule.grouping == "traj_group" and rule.method != "identity" and per_episode:
            needs.append(("reward_normalization", "compares the episodes of a group: one alone gets 0"))
        if self.train_env_manager.group_filter.type == "std_filter":
            needs.append(("train_env_manager.group_filter std_filter", "drops groups of one"))
        return tuple(needs)

    @property
    def warm_start_path(self) -> Path:
        """Folder of the warm start's run."""
        return self.output_path / "warm_start"

    @property
    def warm_model_path(self) -> Path:
        """Folder of the model that it makes."""
        return self.warm_start_path / "hf_model"

    def default_model(self, role: str) -> str | None:
        return super().default_model(role) or (str(self.warm_model_path) if self.warm_start is not None else None)

    @property
    def makes_model(self) -> bool:
        return self.warm_start is not None or super().makes_model

    @property
    def extra_output_dirs(self) -> dict[str, str | None]:
        return {**super().extra_output_dirs, "render_save_dir": self.render_save_dir}

    @property
    def batch(self) -> BatchPlan:
        return replace(super().batch, words=("groups", "episodes"), size_unit=self.group_size)

    @property
    def redundancy(self) -> int:
        return self.train_env_manager.group_size_redundancy

    @property
    def max_open_groups(self) -> int | None:
        return self.train_env_manager.num_env_groups

    @property
    def task_budget(self) -> int:
        each = self.train_env_manager.max_traj_per_env
        budget = super().task_budget
        return budget if each < 0 else min(budget, each * self.train_env_manager.num_env_groups)

    @property
    def validation_chunk(self) -> int | None:
        return None if self.val_env_manager is None else self.val_env_manager.num_env_groups

    def template_variables(self, tag: str) -> dict[str, Any]:
        """Variables of the chat template in the prompts of a kind of environment."""
        return {**self.chat_template_kwargs, **self.custom_envs[tag].chat_template_kwargs}

    @property
    def prompt_templates(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        variables = [self.template_variables(tag) for tag in self.custom_envs]
        return tuple(("native", each) for number, each in enumerate(variables) if each not in variables[:number])

    def domain_weight(self, domain: str) -> float:
        assert domain in self.custom_envs
        return 1.0

    def tags_of(self, manager: EnvManager) -> tuple[str, ...]:
        """Tags that a manager plays."""
        return manager.tags or tuple(self.custom_envs)

    def partition_of(self, manager: EnvManager) -> tuple[int, ...]:
        """Return the groups of each of its tags."""
        if manager.num_groups_partition is not None:
            return manager.num_groups_partition
        return split_evenly(manager.num_env_groups, self.tags_of(manager))

    @property
    def validation_groups(self) -> int:
        """Tasks of one validation."""
        manager = self.val_env_manager
        assert manager is not None, "asked of a configuration with validation"
        return manager.num_env_groups if self.val_batch_size is None else self.val_batch_size // manager.group_size
