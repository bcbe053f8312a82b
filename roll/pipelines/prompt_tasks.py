"""The configuration's prompts as tasks: from files and generators, by domain, tokenised and within the length limit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.worker_config import DataArgs
from roll.data.procedural import procedural_tasks, questions_of
from roll.data.prompts import PromptSet, encode_prompts
from roll.data.sampler import TaskSource
from roll.data.sources import load_tasks, route_by_tag
from roll.data.templates import PromptEncoder
from roll.types.episode import Task

TasksByDomain = dict[str, list[Task]]


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


def _encoder(config: RLVRConfig, data: DataArgs, tokenizer: Any) -> PromptEncoder:
    template = config.global_template or data.template
    return PromptEncoder(tokenizer, template=template, tag_to_template=config.tag_to_template)


def _encoded(config: RLVRConfig, data: DataArgs, domains: TasksByDomain, tokenizer: Any) -> PromptSet:
    return encode_prompts(
        [task for tasks in domains.values() for task in tasks],
        _encoder(config, data, tokenizer),
        prompt_length=config.prompt_length,
        truncation="filter" if data.filter_overlong_prompts else config.truncation,
        num_workers=data.preprocessing_num_workers,
    )


def _by_domain(config: RLVRConfig, prompts: PromptSet) -> TasksByDomain:
    domains: TasksByDomain = {domain: [] for domain in config.rewards}
    for task in prompts.tasks:
        domains[task.domain].append(task)
    return domains


def training_data(config: RLVRConfig, tokenizer: Any) -> tuple[TaskSource, PromptSet]:
    """Return the endless (or `num_train_epochs` long) sequence of training tasks, and their prompts."""
    data = config.actor_train.data_args
    prompts = _encoded(config, data, load_domains(config, data, split="train", exclude={}), tokenizer)
    domains = _by_domain(config, prompts)
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
