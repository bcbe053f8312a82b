"""The configuration of `pipeline: sft`: supervised fine-tuning on written responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from roll.configs.schema.acts_if import acting, unless
from roll.configs.schema.batch_plan import BatchPlan
from roll.configs.schema.fields import number, one_or_many
from roll.configs.schema.run_config import VALIDATES, RunConfig
from roll.configs.schema.worker_config import TrainConfig

_SINGLE = unless("messages", why="it holds whole conversations")


@dataclass(frozen=True, kw_only=True)
class SFTDataArgs:
    """Rows to learn from: prompts with responses, or conversations."""

    template: str | None = None
    """How a row becomes text: `native` (the tokenizer's own chat template), `plain` (prompt and response as they
    stand), `question_answer`, `step_by_step`, a text with `{prompt}`, or Jinja over `messages`. Chat templates say
    themselves how a response ends; after the others comes the end-of-sequence token. null: as in training, where it
    is `native`."""
    file_name: tuple[str, ...] = one_or_many()
    """json, jsonl, csv, tsv, parquet file, a glob, a folder of such files, a Hugging Face dataset folder or hub id; one
    or many. Relative to the working directory."""
    messages: str | None = None
    """Column with a conversation that ends with the assistant, as a list of {role, content} or its JSON text. Either
    this, or `prompt` and `response`."""
    prompt: str | None = acting(None, _SINGLE)
    """Column with the prompt as text."""
    response: str | None = acting(None, _SINGLE)
    """Column with the response as text. Goes with `prompt`."""
    preprocessing_num_workers: int = number(1, ge=1)
    """Threads that tokenise the rows."""


@dataclass(frozen=True, kw_only=True)
class SFTTrainDataArgs(SFTDataArgs):
    """Rows to learn from: prompts with responses, or conversations."""

    shuffle: bool = True
    """New order in every epoch, from the run's seed."""


@dataclass(frozen=True, kw_only=True)
class SFTTrainConfig(TrainConfig):
    """The model that learns."""

    data_args: SFTTrainDataArgs = field(default_factory=SFTTrainDataArgs)
    """Training rows."""


@dataclass(frozen=True, kw_only=True)
class SFTValidationConfig:
    """Held-out rows."""

    data_args: SFTDataArgs = field(default_factory=SFTDataArgs)
    """Where they are."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RunConfig):
    """Everything a run of supervised fine-tuning is told. Inert and frozen; derived values are properties."""

    validation_key: ClassVar[str] = "validation or validation_share"

    pipeline: Literal["sft"]
    exp_name: str = "sft"
    num_train_epochs: int | None = number(None, ge=0)
    """Passes over the training rows. 0 or null: `max_steps` decides."""
    actor_train: SFTTrainConfig = field(default_factory=SFTTrainConfig)
    """The model that learns."""
    truncation: Literal["error", "filter", "right"] = "error"
    """What happens to a row of more than `sequence_length` tokens: stop with an error, leave it out (counted), or cut
    its end (counted; how such a response ends is then never learnt)."""
    train_on: Literal["last", "all"] = "last"
    """Which messages of the assistant are learnt: the last one of each row, or all. `all` needs a chat template that
    leaves earlier messages as they are when others follow."""
    validation: SFTValidationConfig | None = None
    """Held-out rows, for loss, token accuracy and perplexity. null: `validation_share` decides."""
    validation_share: float = number(0.0, ge=0, lt=1, acts_if=(unless("validation"),))
    """Share of the training rows that is held out instead, drawn by the seed. 0: none."""
    val_before_train: bool = acting(False, VALIDATES)
    """Validate the starting model."""

    @property
    def max_sequence_length(self) -> int:
        return self.sequence_length or 1

    @property
    def validates(self) -> bool:
        return self.validation is not None or self.validation_share > 0

    @property
    def rows_per_step(self) -> int:
        """Rows of one step, which is one optimizer step: per device x accumulation x data-parallel ranks."""
        args = self.actor_train.training_args
        passes = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return passes * self.actor_train.data_parallel

    @property
    def batch(self) -> BatchPlan:
        return BatchPlan(roles=self.trained_roles, tasks=self.rows_per_step, group_size=1, words=("rows", "rows"))
