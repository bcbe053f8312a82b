"""Reinforcement learning from the episodes that another run has recorded (`replay_from`).

Scoring, credit and update are those of any run; nothing plays, so there is no engine, no weight sync and no validation.
Steps keep their numbers: the draws of a step, the age of its tokens and the schedules go by them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.model_shape import read_shape
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.pipelines.rl.engine_pipeline import REPLAYED
from roll.pipelines.rl.rl_pipeline import RLPipeline
from roll.pipelines.rollouts.assemble import Rollouts
from roll.pipelines.rollouts.recorded_rollouts import RecordingError, read_step, token_texts
from roll.pipelines.rollouts.rollout_metrics import rollout_metrics
from roll.pipelines.rollouts.rollout_rows import Texts
from roll.pipelines.run.clusters import Clusters
from roll.tracking.replay_check import Recording
from roll.tracking.rollouts import clean, file_of
from roll.types.metrics import Metrics

logger = logging.getLogger(__name__)


def shown_steps(steps: range) -> str:
    """Return a span of steps in words."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


class ReplayPipeline(RLPipeline):
    """Trains on the steps of a recording."""

    def __init__(self, config: RLConfig, clusters: Clusters, tokenizer: Any, recording: Recording) -> None:
        super().__init__(config, clusters, tokenizer, total_steps=recording.steps[-1])
        self._recording = recording
        self._texts = Texts(tokenizer)
        model = config.roles["actor_train"].model_args.model_config_kwargs
        shape = read_shape(config.model_path("actor_train"), model)
        self._vocabulary = shape.vocab if shape is not None and shape.vocab else len(tokenizer)

    def train(self) -> None:
        steps, left = self._recording.steps, self._recording.left
        if self.start_step < steps[0] - 1:
            whose = f"after step {self.start_step}" if self.start_step else "that training starts with"
            logger.warning(
                "step %d was played with the weights after step %d, and is replayed with those %s; "
                "to have the same, resume_from_checkpoint=<the run's checkpoint-%d>",
                steps[0], steps[0] - 1, whose, steps[0] - 1,
            )  # fmt: skip
        if left:
            logger.warning("not replayed: %s, because max_steps is %d", shown_steps(left), self.total_steps)
        if self._recording.run_schedule != self._recording.schedule:
            logger.warning(
                "schedules are made for %d steps, and those of the run were for %d; to have the same, max_steps=%d",
                self._recording.schedule,
                self._recording.run_schedule,
                self._recording.run_schedule,
            )
        super().train()

    def steps_left(self) -> range:
        steps = self._recording.steps
        return range(max(steps[0], self.start_step + 1), steps[-1] + 1)

    def rollouts(self, step: int) -> tuple[Rollouts, Metrics]:
        files = self._recording.files
        with self.timers.span("read_rollouts"):
            rollouts = read_step(files, step)
            try:
                self._require_same_tokens(token_texts(files, step))
                require_fitting(self.config, rollouts, step)
            except RecordingError:
                raise
            except ValueError as error:
                raise RecordingError(
                    f"{file_of(files.folder, step)} can't be replayed with this file: {error}"
                ) from error
        return rollouts, rollout_metrics(rollouts)

    def _require_same_tokens(self, recorded: dict[int, str]) -> None:
        """Raise `ValueError` unless every token is the one that the run's tokenizer meant by its number."""
        model = self.config.model_path("actor_train")
        if outside := [token for token in recorded if not 0 <= token < self._vocabulary]:
            raise ValueError(
                f"it has the token {outside[0]}, and {model} has {self._vocabulary} tokens: it was recorded with "
                "another model"
            )
        for token, text in recorded.items():
            (mine,) = self._texts.of_tokens([token])
            if clean(mine) != text:
                raise ValueError(
                    f"token {token} was {text!r}, and is {mine!r} for the tokenizer of {model}: it was recorded with "
                    "another tokenizer"
                )

    # --- what a replay hasn't -------------------------------------------------------------------------------------

    @property
    def validates_first(self) -> bool:
        return False

    @property
    def validation_period(self) -> int | None:
        return None

    def evaluate(self, step: int) -> dict[str, float]:
        raise AssertionError(f"validation after step {step} of a replay, which has no engine")

    def save_state(self, folder: Path) -> dict[str, Any]:
        return {REPLAYED: str(self._recording.run), **super().save_state(folder)}


def require_fitting(config: RLConfig, rollouts: Rollouts, step: int) -> None:
    """Raise `ValueError` unless a step's rollouts are what this configuration trains on."""
    batch = rollouts.batch
    if "greedy_rewards" in config.estimator.needs and rollouts.greedy_scores is None:
        raise ValueError(
            f"adv_estimator {config.adv_estimator} compares an episode with a greedy one, which only runs with that "
            "estimator play and record"
        )
    known = _domains(config)
    if other := next((task.domain for task in rollouts.tasks if task.domain not in known), None):
        raise ValueError(f"it has the domain {other!r}, and this file has {', '.join(known)}")
    _require_groups(config, rollouts)
    longest = int(batch.lengths.max())
    if longest > config.max_sequence_length:
        name = batch.row_ids[int(batch.lengths.argmax())]
        raise ValueError(
            f"row {name!r} has {longest} tokens, more than sequence_length ({config.max_sequence_length}) permits"
        )
    ages = step - 1 - rollouts.batch.require("versions")[batch.action_mask]
    oldest, newest, most = int(ages.max()), int(ages.min()), math.ceil(config.async_generation_ratio)
    if newest < 0:
        raise ValueError(
            f"it has tokens of weight version {step - 1 - newest}, and step {step} trains version {step - 1}"
        )
    if oldest > most:
        raise ValueError(
            f"it has tokens that are {oldest} weight versions old, and async_generation_ratio "
            f"({config.async_generation_ratio:g}) permits {most}: set it as in the run that recorded them"
        )


def _domains(config: RLConfig) -> tuple[str, ...]:
    if isinstance(config, RLVRConfig):
        return tuple(config.rewards)
    assert isinstance(config, AgenticConfig), "pipelines with rollouts are these two and their kinds"
    return tuple(config.custom_envs)


def _require_groups(config: RLConfig, rollouts: Rollouts) -> None:
    """Raise `ValueError` unless there are as many groups as a step has, none of them too large."""
    members = Counter(unit.rpartition("#")[0] for unit in dict.fromkeys(rollouts.batch.unit_ids))
    if len(members) != config.groups_per_step:
        size = len(members) * (config.rollout_batch_size // config.groups_per_step)
        raise ValueError(
            f"it has {len(members)} groups, and a step has {config.groups_per_step}: set rollout_batch_size={size}"
        )
    largest = max(members.values())
    if largest > config.group_size:
        raise ValueError(
            f"it has a group of {largest}, and {config.group_size_key} is {config.group_size}: "
            f"set {config.group_size_key}={largest}"
        )
