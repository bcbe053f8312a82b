"""Reinforcement learning with verifiable rewards: dataset rows as tasks, one turn, a reward function per domain."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from roll.configs.schema.reward_config import ANY_TAG, RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.worker_config import DataArgs
from roll.data.curriculum import difficulty_of
from roll.data.procedural import procedural_tasks, questions_of
from roll.data.prompts import LengthRule, PromptSet, Truncation, encode_prompts
from roll.data.quarantine import BAD_ROWS, Quarantine
from roll.data.sampler import TaskSource
from roll.data.sources import load_tasks, route_by_tag
from roll.data.streaming import StreamedPrompts, Streamer
from roll.data.templates import PromptEncoder, TemplateError
from roll.envs.base import Observation
from roll.envs.tools.interactions import Interactions
from roll.envs.tools.tool_rows import row_tools
from roll.envs.tools.toolbox import Toolbox
from roll.pipelines.credit.model_outputs import smallest_embedding
from roll.pipelines.rollouts.reward_router import RewardRouter
from roll.pipelines.rollouts.validation import validation_metrics, validation_samples
from roll.pipelines.rollouts.workload import Split, TrainingSource, Workload, query_filter, response_filter
from roll.rollout.agent import Agent
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode import Rollout
from roll.rollout.episode_envs import RewardEnv, row_messages
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.tool_rollout import ToolRollout
from roll.rollout.tool_turns import tool_turns
from roll.tracking.base import Sample
from roll.types.metrics import Metrics
from roll.types.trajectory import Group, Task, Trajectory
from roll.utils.importing import load_object
from roll.utils.rows import DataError
from roll.utils.seeding import keyed_shuffle

logger = logging.getLogger(__name__)

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
        training: tuple[TaskSource, PromptSet | StreamedPrompts] | None,
        validation: PromptSet | None,
        rewards: RewardRouter,
        toolbox: Toolbox | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prompts: dict[Split, PromptSet | StreamedPrompts | None] = {
            "val": validation,
            "train": None if training is None else training[1],
        }
        self._toolbox = toolbox
        self._interactions = Interactions(config.interactions) if config.interactions else None
        self._solved_above = config.actor_train.data_args.curriculum.success_threshold
        self._rewards = rewards
        self._tasks = None if training is None else training[0]
        self.source: TrainingSource | None = self._tasks
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

        def agent_with(variables: Mapping[str, Any]) -> Agent:
            keeps = args.include_stop_str_in_output
            return Agent(self._tokenizer, first_prompt, keep_stop_string=keeps, variables=variables)

        agent = agent_with(config.chat_template_kwargs)
        return EpisodePlayer(
            driver,
            agent,
            lambda task, name: RewardEnv(self._rewards.submit, task, name),
            max_sequence_length=config.max_sequence_length,
            rollouts={
                domain: rollout
                for domain, reward in config.rewards.items()
                if (rollout := self._rollout(domain, reward, agent_with)) is not None
            },
            keep=self._keep_response if split == "train" else None,
            traced_share=config.tracing.episode_share,
        )

    def _rollout(
        self, domain: str, reward: RewardConfig, agent_with: Callable[[Mapping[str, Any]], Agent]
    ) -> Rollout | None:
        """Return what plays a domain's episodes; None: one prompt, one response."""
        if reward.rollout is not None:
            made: Rollout = load_object(reward.rollout, key=f"rewards.{domain}.rollout")()
            return made
        if not reward.tools and self._interactions is None:
            return None
        agent = agent_with(self._config.template_variables(domain))
        turns = tool_turns(self._config, agent, self._tokenizer, self._toolbox, reward.tools)
        return ToolRollout(agent, turns, self._interactions, reward.interaction)

    def close(self) -> None:
        if self._interactions is not None:
            self._interactions.close()

    def _keep_response(self, task: Task, trajectory: Trajectory) -> str | None:
        return response_filter(trajectory, self._config.rewards[task.domain].response_filter_config)

    def keep(self, group: Group) -> str | None:
        if self._tasks is not None and group.survivors:
            solved = sum(trajectory.reward > self._solved_above for trajectory in group.survivors)
            self._tasks.observe(group.task.id, solved / len(group.survivors))
        return query_filter(group, self._config.rewards[group.task.domain].query_filter_config)

    def first_metrics(self) -> Metrics:
        prompts, metrics = self._prompts["train"], Metrics()
        assert prompts is not None
        metrics.update(prompts.metrics)
        return metrics

    def take_metrics(self) -> Metrics:
        metrics = self._rewards.take_metrics()
        if self._tasks is not None:
            metrics.update(self._tasks.apply_observed())
        return metrics

    def validation_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        assert self._config.validation is not None
        return validation_metrics(groups, self._config.validation)

    def samples(self, step: int, groups: Sequence[Group]) -> list[Sample]:  # noqa: ARG002 - shown as they are
        return validation_samples(groups, self._tokenizer, self._config.log_val_generations)


def load_domains(
    config: RLVRConfig,
    data: DataArgs,
    *,
    split: str,
    exclude: Mapping[str, Collection[str]],
    quarantine: Quarantine | None = None,
) -> TasksByDomain:
    """Return all tasks of `data` by domain.

    Args:
        split: names the generated tasks; another split, other tasks.
        exclude: questions that generated tasks must not repeat, by tag.
        quarantine: takes bad rows; None: the first one raises.
    """
    domains = generated_tasks(config, data, split=split, exclude=exclude)
    if data.file_name or data.dataset:
        tasks_of_files = load_tasks(
            data.file_name, columns=data, seed=config.seed, default_tag=default_tag(config, data), quarantine=quarantine
        )
        for domain, tasks in route_by_tag(tasks_of_files, {name: config.tags_of(name) for name in domains}).items():
            domains[domain] += tasks
    return domains


def generated_tasks(
    config: RLVRConfig, data: DataArgs, *, split: str, exclude: Mapping[str, Collection[str]]
) -> TasksByDomain:
    """Return the procedural tasks of `data` by domain; every domain is there."""
    domains: TasksByDomain = {domain: [] for domain in config.rewards}
    for item in data.procedural:
        domain = config.domain_of(item.tag)
        assert domain is not None, "configuration checks make sure that every tag has a domain"
        seed = config.seed if item.seed is None else item.seed
        domains[domain] += procedural_tasks(
            item, seed=seed, split=split, domain=domain, exclude=exclude.get(item.tag, ())
        )
    return domains


def default_tag(config: RLVRConfig, data: DataArgs) -> str | None:
    """Return the tag of rows without a tag column; None for that of verl's `data_source`, or the file's name."""
    only = next(iter(config.rewards)) if len(config.rewards) == 1 else None
    tags = config.tags_of(only) if only is not None else ()
    return data.default_tag or (only if ANY_TAG in tags else next(iter(tags), None))


def prompt_encoder(config: RLVRConfig, data: DataArgs, tokenizer: Any, toolbox: Toolbox | None = None) -> PromptEncoder:
    """Return the encoder of the prompts of `data`; those that may call tools are told of them."""
    template = config.global_template or data.template
    with_tools = None
    if toolbox is not None:
        chats = {domain: ChatTemplate(tokenizer, config.template_variables(domain)) for domain in config.rewards}
        specs = {d: toolbox.specs(reward.tools) for d, reward in config.rewards.items()}

        def with_tools(task: Task) -> str | None:
            try:
                called = row_tools(task.payload, config.rewards[task.domain].tools)
            except ValueError as error:
                raise TemplateError(f"task {task.id!r}: {error}") from error
            return chats[task.domain].text(row_messages(task), specs[task.domain]) if called else None

    make: Callable[..., PromptEncoder] = PromptEncoder
    if data.images is not None:
        from roll.data.picture_chat import PicturePromptEncoder
        from roll.utils.picture_tokens import PictureTokens

        trusted = config.actor_train.model_args.trust_remote_code
        tokens = PictureTokens.load(config.model_path("actor_train"), trust_remote_code=trusted)
        make = functools.partial(PicturePromptEncoder, picture_tokens=tokens)
    return make(
        tokenizer,
        template=template,
        tag_to_template=config.tag_to_template,
        with_tools=with_tools,
        variables=config.chat_template_kwargs,
        domain_variables={domain: config.template_variables(domain) for domain in config.rewards},
        embedding=smallest_embedding(config, pictures=data.images is not None),
    )


def _truncation(config: RLVRConfig, data: DataArgs) -> Truncation:
    return "filter" if data.filter_overlong_prompts else config.truncation


def _encoded(
    config: RLVRConfig,
    data: DataArgs,
    *,
    split: Split,
    exclude: Mapping[str, Collection[str]],
    tokenizer: Any,
    toolbox: Toolbox | None,
) -> PromptSet:
    quarantine = Quarantine(data.max_bad_rows, config.logging_path / BAD_ROWS[split])
    domains = load_domains(config, data, split=split, exclude=exclude, quarantine=quarantine)
    prompts = encode_prompts(
        [task for tasks in domains.values() for task in tasks],
        prompt_encoder(config, data, tokenizer, toolbox),
        prompt_length=config.prompt_length,
        truncation=_truncation(config, data),
        num_workers=data.preprocessing_num_workers,
        quarantine=quarantine,
    )
    prompts.metrics = {**prompts.metrics, **quarantine.metrics()}
    return prompts


def training_data(
    config: RLVRConfig, tokenizer: Any, toolbox: Toolbox | None = None
) -> tuple[TaskSource, PromptSet | StreamedPrompts]:
    """Return the endless (or `num_train_epochs` long) sequence of training tasks, and their prompts."""
    data = config.actor_train.data_args
    if data.streaming:
        return _streamed(config, data, tokenizer, toolbox)
    prompts = _encoded(config, data, split="train", exclude={}, tokenizer=tokenizer, toolbox=toolbox)
    if config.validation_share:
        prompts.hold_out(config.validation_share, config.seed)
        held, left = len(prompts.held_out or ()), len(prompts)
        logger.info("validation_share %g: %d prompts are held out, drawn by the seed, and %d trained on",
                    config.validation_share, held, left)  # fmt: skip
    domains: TasksByDomain = {domain: [] for domain in config.rewards}
    for task in prompts.tasks:
        domains[task.domain].append(task)
    difficulty: dict[str, Sequence[float]] = {}
    if data.curriculum.by == "column":
        column = data.curriculum.column or ""
        difficulty = {name: [difficulty_of(task.payload, column) for task in of] for name, of in domains.items()}
    return _source(config, data, domains, difficulty), prompts


def _streamed(
    config: RLVRConfig, data: DataArgs, tokenizer: Any, toolbox: Toolbox | None
) -> tuple[TaskSource, StreamedPrompts]:
    quarantine = Quarantine(data.max_bad_rows, config.logging_path / BAD_ROWS["train"])
    streamer = Streamer(
        data,
        prompt_encoder(config, data, tokenizer, toolbox),
        LengthRule(config.prompt_length, _truncation(config, data)),
        tags={domain: config.tags_of(domain) for domain in config.rewards},
        seed=config.seed,
        default_tag=default_tag(config, data),
        prompt_length=config.prompt_length,
        quarantine=quarantine,
        folder=config.output_path,
    )
    streamed = streamer.scan(generated_tasks(config, data, split="train", exclude={}))
    streamed.prompts.metrics = {**streamed.prompts.metrics, **quarantine.metrics()}
    return _source(config, data, streamed.tables, streamed.difficulty), streamed.prompts


def _source(
    config: RLVRConfig, data: DataArgs, domains: Mapping[str, Sequence[Task]], difficulty: Mapping[str, Sequence[float]]
) -> TaskSource:
    probs = data.domain_interleave_probs or dict.fromkeys(domains, 1.0)
    if left := [name for name, tasks in domains.items() if name not in probs and len(tasks)]:
        raise DataError(
            f"training rows of domain {left[0]!r}, which domain_interleave_probs leaves out for validation alone: give "
            "it a share, or leave its rows out (tag_included)"
        )
    return TaskSource(
        {name: domains[name] for name in probs},
        seed=config.seed,
        probs=probs,
        shuffle=data.shuffle,
        num_train_epochs=config.num_train_epochs or None,
        curriculum=data.curriculum,
        difficulty={name: of for name, of in difficulty.items() if name in probs},
    )


def validation_data(
    config: RLVRConfig, tokenizer: Any, training: PromptSet | StreamedPrompts | None, toolbox: Toolbox | None = None
) -> PromptSet:
    """Return held-out tasks in the order of their files, or shuffled; generated ones repeat no training question."""
    assert config.validation is not None
    if config.validation_share:
        assert isinstance(training, PromptSet) and training.held_out is not None, "training data are read before"
        return _ordered(config, training.held_out)
    exclude: dict[str, set[str]] = {}
    for task in training.tasks if training is not None else ():
        if "question" in task.payload:
            exclude.setdefault(task.tag, set()).update(questions_of([task]))
    data = config.validation.data_args
    prompts = _encoded(config, data, split="val", exclude=exclude, tokenizer=tokenizer, toolbox=toolbox)
    return _ordered(config, prompts)


def _ordered(config: RLVRConfig, prompts: PromptSet) -> PromptSet:
    """Return held-out prompts in the order in which they are played."""
    if config.validation is not None and config.validation.shuffle:
        prompts.tasks = keyed_shuffle(prompts.tasks, config.seed, "validation")
    return prompts
