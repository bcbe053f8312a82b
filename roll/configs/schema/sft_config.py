"""The configuration of `pipeline: sft`: supervised fine-tuning on written responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll.configs.schema.acts_if import acting, unless
from roll.configs.schema.distill_args import TEACHES, RowDistillation, TeacherConfig
from roll.configs.schema.offline_config import (
    SINGLE_COLUMNS,
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
    """Column with a conversation that ends with the assistant: a list of {role, content} or of ShareGPT's {from,
    value}, or its JSON text. null: `prompt` and `response` say where it is."""
    prompt: str | None = acting(None, _SINGLE)
    """Column with the prompt: a text or a list of messages. null: `prompt`, `conversations`, `messages` or Alpaca's
    `instruction` (with `input` and `history`), whichever there is; without one, the response is a whole
    conversation."""
    response: str | None = acting(None, _SINGLE)
    """Column with the response: a text, or messages that end with the assistant's. null: `completion`, `output` or
    `response`, else `messages` or `conversations`, which end with it."""


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
        if data.messages is not None:
            return {"messages": data.messages}
        response: dict[str, str | tuple[str, ...]] = {"response": data.response or SINGLE_COLUMNS}
        return response if data.prompt is None else {"prompt": data.prompt, **response}
