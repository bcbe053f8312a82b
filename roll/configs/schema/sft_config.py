"""The configuration of `pipeline: sft`: supervised fine-tuning on written responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll.configs.schema.acts_if import acting, unless
from roll.configs.schema.distill_args import TEACHES, RowDistillation, TeacherConfig
from roll.configs.schema.offline_config import (
    OfflineConfig,
    OfflineDataArgs,
    OfflineTrainConfig,
    OfflineTrainDataArgs,
    OfflineValidationConfig,
)

_SINGLE = unless("messages", why="it holds whole conversations")


@dataclass(frozen=True, kw_only=True)
class SFTDataArgs(OfflineDataArgs):
    """Rows to learn from: prompts with responses, or conversations."""

    messages: str | None = None
    """Column with a conversation that ends with the assistant, as a list of {role, content} or its JSON text. Either
    this, or `prompt` and `response`."""
    prompt: str | None = acting(None, _SINGLE)
    """Column with the prompt as text."""
    response: str | None = acting(None, _SINGLE)
    """Column with the response as text. Goes with `prompt`."""


@dataclass(frozen=True, kw_only=True)
class SFTTrainDataArgs(SFTDataArgs, OfflineTrainDataArgs):
    """Rows to learn from: prompts with responses, or conversations."""


@dataclass(frozen=True, kw_only=True)
class SFTTrainConfig(OfflineTrainConfig):
    """The model that learns."""

    data_args: SFTTrainDataArgs = field(default_factory=SFTTrainDataArgs)
    """Training rows."""


@dataclass(frozen=True, kw_only=True)
class SFTValidationConfig(OfflineValidationConfig):
    """Held-out rows."""

    data_args: SFTDataArgs = field(default_factory=SFTDataArgs)
    """Where they are."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflineConfig):
    """Everything a run of supervised fine-tuning is told. Inert and frozen; derived values are properties."""

    pipeline: Literal["sft"]
    exp_name: str = "sft"
    actor_train: SFTTrainConfig = field(default_factory=SFTTrainConfig)
    """The model that learns."""
    train_on: Literal["last", "all"] = "last"
    """Which messages of the assistant are learnt: the last one of each row, or all. `all` needs a chat template that
    leaves earlier messages as they are when others follow."""
    validation: SFTValidationConfig | None = None
    """Held-out rows, for loss, token accuracy and perplexity. null: `validation_share` decides."""

    teacher: TeacherConfig | None = None
    """A model whose distribution the student learns on the rows, token by token (docs/distillation.md). null: the
    rows alone teach."""
    distill: RowDistillation = field(default_factory=RowDistillation, metadata={"acts_if": (TEACHES,), "idle": ()})
    """How it teaches."""

    def default_model(self, role: str) -> str | None:
        return None if role == "teacher" else super().default_model(role)

    def columns_of(self, data: OfflineDataArgs) -> dict[str, str | tuple[str, ...]]:
        assert isinstance(data, SFTDataArgs)
        named = {"prompt": data.prompt, "messages": data.messages, "response": data.response}
        return {key: column for key, column in named.items() if column is not None}
