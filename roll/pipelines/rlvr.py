"""Reinforcement learning with verifiable rewards: dataset rows as tasks, one turn, a reward function per domain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from roll.configs.base import GeneratingArgs
from roll.configs.rewards import QueryFilterConfig
from roll.configs.rlvr import RLVRConfig
from roll.data.prompts import PromptSet
from roll.data.sampler import TaskSource
from roll.distributed.errors import WorkerFailed
from roll.envs.base import Observation
from roll.pipelines.assemble import Rollouts
from roll.pipelines.base import OutOfTasks, Pipeline
from roll.pipelines.clusters import Clusters
from roll.pipelines.generation import Ahead, drive, engine_metrics, put_back_ready_groups
from roll.pipelines.scoring import Scorers
from roll.pipelines.validation import validation_metrics, validation_samples
from roll.rollout.agent import Agent
from roll.rollout.continuous import ContinuousEngines
from roll.rollout.episode import EpisodePlayer
from roll.rollout.rewards import RewardEnv
from roll.rollout.scheduler import Collected, CollectPlan, RolloutScheduler
from roll.strategies.base import SamplingParams
from roll.types.episode import Group, Task
from roll.utils.importing import load_object
from roll.workers.infer import engine_died


def sampling_params(args: GeneratingArgs, response_length: int) -> SamplingParams:
    """The engine's form of `generating_args`."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens or response_length,
        temperature=args.temperature if args.do_sample else 0.0,
        top_p=args.top_p,
        top_k=args.top_k or -1,
        repetition_penalty=args.repetition_penalty,
        stop_strings=args.stop_strings,
        ignore_eos=args.ignore_eos,
    )


class FixedTasks:
    """A finite list of tasks, in order; what is put back is played again."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = list(tasks)

    def take(self, n: int) -> list[Task]:
        """The next `n`, or what is left."""
        taken, self._tasks = self._tasks[:n], self._tasks[n:]
        return taken

    def put_back(self, tasks: Sequence[Task]) -> None:
        """To the front."""
        self._tasks = [*tasks, *self._tasks]


class RLVRPipeline(Pipeline):
    """See the module docstring."""

    def __init__(
        self,
        config: RLVRConfig,
        clusters: Clusters,
        tokenizer: Any,
        *,
        training: tuple[TaskSource, PromptSet] | None,
        validation: PromptSet | None,
        rewards: Scorers,
        total_steps: int,
    ) -> None:
        super().__init__(config, clusters, tokenizer, total_steps=total_steps)
        self._validation = validation
        self._rewards = rewards
        self._engines = drive(config, clusters.actor_infer, self.resend_weights)
        self._source: TaskSource | None = None
        self._ahead: Ahead | None = None
        if training is not None:
            self._source, self._training = training
            args = config.actor_infer.generating_args
            self._training_scheduler = self._scheduler(self._training, args)
            if config.async_generation_ratio > 0:
                self._ahead = Ahead(
                    config,
                    self._engines,
                    self._player(self._training, args),
                    self._source,
                    sampling_params(args, config.response_length),
                    total_steps=total_steps,
                    keep=self._keep,
                    on_drop=self._drop,
                )
        if validation is not None and config.validation is not None:
            args = config.validation.generating_args
            self._validation_scheduler = self._scheduler(validation, args)

    def _scheduler(self, prompts: PromptSet, args: GeneratingArgs) -> RolloutScheduler:
        """A scheduler for one set of prompts."""
        player = self._player(prompts, args)
        return RolloutScheduler(
            self._engines, player, seed=self.config.seed, keep=self._keep, on_drop=self._drop
        )

    def _player(self, prompts: PromptSet, args: GeneratingArgs) -> EpisodePlayer:
        """Plays the tasks of one set of prompts."""

        def first_prompt(task: Task, _observation: Observation) -> tuple[int, ...]:
            return prompts.prompt_ids(task)

        agent = Agent(
            self.tokenizer,
            first_prompt,
            chat=bool(getattr(self.tokenizer, "chat_template", None)),
            keep_stop_string=args.include_stop_str_in_output,
        )
        return EpisodePlayer(
            self._engines,
            agent,
            lambda task, name: RewardEnv(self._rewards.submit, task, name),
            max_sequence_length=self.config.max_sequence_length,
            rollouts={
                domain: load_object(reward.rollout, key=f"rewards.{domain}.rollout")()
                for domain, reward in self.config.rewards.items()
                if reward.rollout is not None
            },
        )

    # --- training -------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> Collected:
        """See the base class."""
        collected = self._collect_now(step) if self._ahead is None else self._ahead.collect(step)
        if len(collected.groups) < self.config.rollout_batch_size:
            raise OutOfTasks(
                f"num_train_epochs are over; {len(collected.groups)} last groups don't fill a batch of "
                f"{self.config.rollout_batch_size}"
            )
        if isinstance(self._engines, ContinuousEngines):
            collected.metrics.merge(engine_metrics(self._engines, self.clusters.actor_infer))
        for group in collected.groups:
            self.report.failed(group)
        if step == 1:
            collected.metrics.update(self._training.report.metrics())
        return collected

    def _collect_now(self, step: int) -> Collected:
        config = self.config
        plan = CollectPlan(
            step=step,
            purpose="train",
            groups=config.rollout_batch_size,
            group_size=config.num_return_sequences_in_group,
            params=sampling_params(config.actor_infer.generating_args, config.response_length),
            extra_prompts=config.max_additional_running_prompts if config.is_use_additional_prompts else 0,
            max_prompts=config.prompt_budget,
            min_survivors=config.min_survivors,
        )
        assert self._source is not None, "only val_only does without training data"
        return self._training_scheduler.collect(self._source, plan)

    def greedy_scores(self, step: int, rollouts: Rollouts) -> torch.Tensor:
        """See the base class."""
        args = self.config.actor_infer.generating_args
        tasks = list({task.id: task for task in rollouts.tasks}.values())
        plan = CollectPlan(
            step=step,
            purpose="greedy",
            groups=len(tasks),
            group_size=1,
            params=sampling_params(replace(args, do_sample=False), self.config.response_length),
            max_prompts=len(tasks),
            min_survivors=0,
        )
        with self.timers.span("generate_greedy", waits=True):
            groups = self._training_scheduler.collect(FixedTasks(tasks), plan).groups
        scores = {group.task.id: t.reward if t.trainable else math.nan for group in groups for t in group.trajectories}
        return torch.tensor([scores[task.id] for task in rollouts.tasks], dtype=torch.float32)

    def sync_weights(self, version: int) -> None:
        """See the base class; groups that are started from now on carry the new version."""
        while True:
            try:
                if isinstance(self._engines, ContinuousEngines):
                    self._engines.run(self._engines.whole())
                super().sync_weights(version)
                break
            except WorkerFailed as error:
                # An engine that died before or during the sync is replaced as often as engine_restarts allows, then
                # all engines get the weights again.
                if not isinstance(self._engines, ContinuousEngines) or not engine_died(error):
                    raise
                self._engines.run(self._engines.died(error.rank, error))
        if self._ahead is not None:
            self._ahead.set_version(version)

    def _drop(self, group: Group, reason: str) -> None:
        self.report.dropped(group, reason)

    def _keep(self, group: Group) -> str | None:
        return query_filter(group, self.config.rewards[group.task.domain].query_filter_config)

    # --- validation -----------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, float]:
        """See the base class."""
        assert self._validation is not None, "configuration checks refuse validation without data"
        assert self.config.validation is not None
        validation = self.config.validation
        n = validation.generating_args.num_return_sequences or 1
        chunk = self.config.val_batch_size or len(self._validation)
        groups: list[Group] = []
        for start in range(0, len(self._validation), chunk):
            tasks = self._validation.tasks[start : start + chunk]
            plan = CollectPlan(
                step=step,
                purpose="val",
                groups=len(tasks),
                group_size=n,
                params=sampling_params(validation.generating_args, self.config.response_length),
                max_prompts=len(tasks),
                min_survivors=0,
            )
            groups += self._validation_scheduler.collect(FixedTasks(tasks), plan).groups
        self.report.samples(step, validation_samples(groups, self.tokenizer, self.config.log_val_generations))
        return validation_metrics(groups, validation)

    # --- state ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the event loop that episodes were played on."""
        self._engines.close()

    def save_state(self, folder: Path) -> dict[str, Any]:
        """The cursor of the training tasks, and groups that are ready ahead of training."""
        assert self._source is not None, "a run without training data saves no checkpoint"
        return {"tasks": self._source.state_dict()} if self._ahead is None else self._ahead.save(folder)

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """See the base class."""
        if self.config.val_only:
            return
        assert self._source is not None
        if self._ahead is not None:
            self._ahead.load(state, folder)
        else:
            self._source.load_state_dict(state["tasks"])
            put_back_ready_groups(self._source, folder)


def query_filter(group: Group, rule: QueryFilterConfig) -> str | None:
    """Why a domain's filter drops this group; None to keep it."""
    scores = torch.tensor([t.reward for t in group.survivors], dtype=torch.float64)
    args = rule.filter_args
    if rule.type == "mean_filter":
        mean = float(scores.mean())
        if not args.threshold_down < mean < args.threshold_up:
            return f"filtered: mean score outside ({args.threshold_down:g}, {args.threshold_up:g})"
    if rule.type == "std_filter":
        spread = float(scores.std()) if len(scores) > 1 else 0.0
        if spread <= args.std_threshold:
            return f"filtered: standard deviation of scores not above {args.std_threshold:g}"
    return None
