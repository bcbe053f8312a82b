"""What every pipeline that learns from finished rows is told: fine-tuning, preferences, reward models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from roll.configs.schema.acts_if import acting, unless
from roll.configs.schema.batch_plan import BatchPlan
from roll.configs.schema.fields import number, one_or_many
from roll.configs.schema.run_config import VALIDATES, RunConfig
from roll.configs.schema.worker_config import TrainConfig

SINGLE_COLUMNS = ("completion", "output", "response", "messages", "conversations")
"""Where a single response may stand that no key names; the last two end with it."""


@dataclass(frozen=True, kw_only=True)
class OfflineDataArgs:
    """Rows to learn from."""

    template: str | None = None
    """How a row becomes text: `native` (the tokenizer's own chat template), `plain` (prompt and response as they
    stand), `question_answer`, `step_by_step`, a text with `{prompt}`, or Jinja over `messages`. Chat templates say
    themselves how a response ends; after the others comes the end-of-sequence token. null: as in training, where it
    is `native`."""
    file_name: tuple[str, ...] = one_or_many()
    """json, jsonl, csv, tsv, parquet file, a glob, a folder of such files, a Hugging Face dataset folder or hub id; one
    or many. Relative to the working directory."""
    images: str | None = None
    """Column with the pictures of a row, for models that read them (docs/images.md): one, or a list of files (relative
    to the data file), data URLs, {bytes, path} or decoded pictures. Texts have `<image>` where each stands. Where
    messages have pictures in their parts, the column of the messages. null: as in training, where it is none, and rows
    with pictures are refused."""
    preprocessing_num_workers: int = number(1, ge=1)
    """Threads that tokenise the rows."""


@dataclass(frozen=True, kw_only=True)
class OfflineTrainDataArgs(OfflineDataArgs):
    """Rows to learn from."""

    shuffle: bool = True
    """New order in every epoch, from the run's seed."""


@dataclass(frozen=True, kw_only=True)
class OfflineTrainConfig(TrainConfig):
    """The model that learns."""

    data_args: OfflineTrainDataArgs = field(default_factory=OfflineTrainDataArgs)
    """Training rows."""


@dataclass(frozen=True, kw_only=True)
class OfflineValidationConfig:
    """Held-out rows."""

    data_args: OfflineDataArgs = field(default_factory=OfflineDataArgs)
    """Where they are."""


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(RunConfig):
    """Keys of every run over finished rows. Inert and frozen; derived values are properties."""

    validation_key: ClassVar[str] = "validation or validation_share"

    num_train_epochs: int | None = number(None, ge=0)
    """Passes over the training rows. 0 or null: `max_steps` decides."""
    actor_train: OfflineTrainConfig = field(default_factory=OfflineTrainConfig)
    """The model that learns."""
    truncation: Literal["error", "filter", "right"] = "error"
    """What happens to a row of more than `sequence_length` tokens: stop with an error, leave it out (counted), or cut
    its end (counted; how such a response ends is then never learnt)."""
    validation: OfflineValidationConfig | None = None
    """Held-out rows. null: `validation_share` decides."""
    validation_share: float = number(0.0, ge=0, lt=1, acts_if=(unless("validation"),))
    """Share of the training rows that is held out instead, drawn by the seed. 0: none."""
    val_before_train: bool = acting(False, VALIDATES)
    """Validate the starting model."""

    @property
    def max_sequence_length(self) -> int:
        return self.sequence_length or 1

    @property
    def prompt_templates(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        return ((self.actor_train.data_args.template or "native", self.chat_template_kwargs),)

    @property
    def validates(self) -> bool:
        return self.validation is not None or self.validation_share > 0

    @property
    def sequences_per_row(self) -> int:
        """Sequences that one row of a file becomes."""
        return 1

    @property
    def row_words(self) -> str:
        """Return what users call the rows of a step."""
        return "rows"

    def data_args_of(self, data: OfflineDataArgs) -> OfflineDataArgs:
        """Return data_args with what a section of validation leaves to that of training."""
        train = self.actor_train.data_args
        return replace(data, template=data.template or train.template or "native", images=data.images or train.images)

    def columns_of(self, data: OfflineDataArgs) -> dict[str, str | tuple[str, ...]]:  # noqa: ARG002 - for subclasses
        """Columns that every row must have, by the keys of `data_args` that name them."""
        return {}

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step: per device x accumulation x data-parallel ranks."""
        args = self.actor_train.training_args
        passes = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return passes * self.actor_train.data_parallel

    @property
    def rows_per_step(self) -> int:
        """Rows of one step, which is one optimizer step."""
        return self.sequences_per_step // self.sequences_per_row

    @property
    def batch(self) -> BatchPlan:
        words = (self.row_words, "sequences" if self.sequences_per_row > 1 else self.row_words)
        size = self.sequences_per_row
        return BatchPlan(roles=self.trained_roles, tasks=self.rows_per_step, group_size=size, words=words)
