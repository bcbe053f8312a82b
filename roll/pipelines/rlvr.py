"""Reinforcement learning with verifiable rewards: dataset rows as tasks, one turn, a reward function per domain."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.worker_config import DataArgs
from roll.data.procedural import procedural_tasks, questions_of
from roll.data.prompts import PromptSet, encode_prompts
from roll.data.sampler import TaskSource
from roll.data.sources import load_tasks, route_by_tag
from roll.data.templates import PromptEncoder
from roll.envs.base import Observation
from roll.pipelines.reward_router import RewardRouter
from roll.pipelines.validation import validation_metrics, validation_samples
from roll.pipelines.workload import Split, TrainingSource, Workload, query_filter
from roll.rollout.agent import Agent
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode import EpisodePlayer
from roll.rollout.episode_envs import RewardEnv
from roll.tracking.base import Sample
from roll.types.episode import Group, Task
from roll.types.metrics import Metrics
from roll.utils.importing import load_object

TasksByDomain = dict[str, list[Task]]


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

    def take_metrics(self) -> Metrics:
        return self._rewards.take_metrics()

    def validation_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        assert self._config.validation is not None
        return validation_metrics(groups, self._config.validation)

    def samples(self, step: int, groups: Sequence[Group]) -> list[Sample]:  # noqa: ARG002 - shown as they are
        return validation_samples(groups, self._tokenizer, self._config.log_val_generations)


def load_domains(
    config: RLVRConfig, data: DataArgs, *, split: str, exclude: Mapping[str, Collection[str]]
) -> TasksByDomain:
    """Return all tasks of `data` by domain.

    Args:
        split: names the generated tasks; another split, other tasks.
        exclude: questions that generated tasks must not repeat, by tag.
    """
    tags = {domain: config.tags_of(domain) for domain in config.rewards}
    domains: TasksByDomain = {domain: [] for domain in tags}
    for item in data.procedural:
        domain = config.domain_of(item.tag)
        assert domain is not None, "configuration checks make sure that every tag has a domain"
        seed = config.seed if item.seed is None else item.seed
        domains[domain] += procedural_tasks(
            item, seed=seed, split=split, domain=domain, exclude=exclude.get(item.tag, ())
        )
    if data.file_name:
        default = data.default_tag or (next(iter(tags.values()))[0] if len(tags) == 1 else None)
        tasks_of_files = load_tasks(data.file_name, columns=data, seed=config.seed, default_tag=default)
        for domain, tasks in route_by_tag(tasks_of_files, tags).items():
            domains[domain] += tasks
    return domains


def _encoded(config: RLVRConfig, data: DataArgs, domains: TasksByDomain, tokenizer: Any) -> PromptSet:
    template = config.global_template or data.template
    return encode_prompts(
        [task for tasks in domains.values() for task in tasks],
        PromptEncoder(tokenizer, template=template, tag_to_template=config.tag_to_template),
        prompt_length=config.prompt_length,
        truncation="filter" if data.filter_overlong_prompts else config.truncation,
        num_workers=data.preprocessing_num_workers,
    )


def training_data(config: RLVRConfig, tokenizer: Any) -> tuple[TaskSource, PromptSet]:
    """Return the endless (or `num_train_epochs` long) sequence of training tasks, and their prompts."""
    data = config.actor_train.data_args
    prompts = _encoded(config, data, load_domains(config, data, split="train", exclude={}), tokenizer)
    domains: TasksByDomain = {domain: [] for domain in config.rewards}
    for task in prompts.tasks:
        domains[task.domain].append(task)
    source = TaskSource(
        domains,
        seed=config.seed,
        probs=data.domain_interleave_probs or dict.fromkeys(domains, 1.0),
        shuffle=data.shuffle,
        num_train_epochs=config.num_train_epochs or None,
    )
    return source, prompts


def validation_data(config: RLVRConfig, tokenizer: Any, training: PromptSet | None) -> PromptSet:
    """Return held-out tasks in the order of their files; generated ones repeat no training question."""
    assert config.validation is not None
    exclude: dict[str, set[str]] = {}
    for task in training.tasks if training is not None else ():
        if "question" in task.payload:
            exclude.setdefault(task.tag, set()).update(questions_of([task]))
    data = config.validation.data_args
    return _encoded(config, data, load_domains(config, data, split="val", exclude=exclude), tokenizer)
