"""The configurations of `pipeline: dpo` and `pipeline: reward_model`: learning from what people prefer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.catalog.preference_table import PREFERENCE_LOSSES, PreferenceLoss, preference_loss_of
from roll.configs.schema.acts_if import ActsIf, acting, needs, unless
from roll.configs.schema.fields import args_of, named, number
from roll.configs.schema.offline_config import (
    SINGLE_COLUMNS,
    OfflineConfig,
    OfflineDataArgs,
    OfflineTrainConfig,
    OfflineTrainDataArgs,
    OfflineValidationConfig,
)
from roll.configs.schema.worker_config import ReferenceConfig, WorkerConfig

_PAIRED = needs("^pairs", words="where rows are pairs", why="rows are single responses with this loss_type")
_SINGLE = unless("^pairs", words="where rows are single responses", why="rows are pairs with this loss_type")
_REFERRED = needs("uses_reference", words="with a `loss_type` that has a reference", why="this loss_type has none")


LABEL_COLUMNS = ("label", "kto_tag")
"""Likewise its label."""


def _of_losses(option: str) -> ActsIf:
    return needs("loss_type", *(name for name, entry in PREFERENCE_LOSSES.items() if option in entry.options))


@dataclass(frozen=True, kw_only=True)
class PreferenceDataArgs(OfflineDataArgs):
    """Rows to learn from: a prompt with a chosen and a rejected response, or with a single one."""

    prompt: str | None = None
    """Column with the prompt: a text, a list of messages ({role, content}, or ShareGPT's {from, value}).
    null: `prompt`, `conversations`, `messages` or Alpaca's `instruction` (with `input` and `history`), whichever there
    is; without one, responses are whole conversations."""
    chosen_key: str = acting("chosen", _PAIRED)
    """Column with the response that is preferred: a text, a message, or a list of messages that ends with the
    assistant's (with the prompt's before it, where there is no prompt column)."""
    rejected_key: str = acting("rejected", _PAIRED)
    """Column with the other one."""
    response: str | None = acting(None, _SINGLE)
    """Column with the response, where rows have a single one. null: `completion`, `output` or `response`, else
    `messages` or `conversations`, which end with it."""


@dataclass(frozen=True, kw_only=True)
class DPODataArgs(PreferenceDataArgs):
    """Rows to learn from: pairs, or with `loss_type: kto` single responses with a label."""

    label: str | None = acting(None, _SINGLE)
    """Column that says whether the response is desirable: true or false, 1 or 0. null: `label` or `kto_tag`."""


@dataclass(frozen=True, kw_only=True)
class DPOTrainDataArgs(DPODataArgs, OfflineTrainDataArgs):
    """Rows to learn from: pairs, or with `loss_type: kto` single responses with a label."""


@dataclass(frozen=True, kw_only=True)
class DPOTrainConfig(OfflineTrainConfig):
    """The model that learns."""

    data_args: DPOTrainDataArgs = field(default_factory=DPOTrainDataArgs)
    """Training rows."""


@dataclass(frozen=True, kw_only=True)
class DPOValidationConfig(OfflineValidationConfig):
    """Held-out rows."""

    data_args: DPODataArgs = field(default_factory=DPODataArgs)
    """Where they are."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(OfflineConfig):
    """Keys that learning from preferences has, whatever learns."""

    @property
    def pairs(self) -> bool:
        """Return whether rows are pairs."""
        raise NotImplementedError

    @property
    def sequences_per_row(self) -> int:
        return 2 if self.pairs else 1

    @property
    def row_words(self) -> str:
        return "pairs" if self.pairs else "rows"

    def columns_of(self, data: OfflineDataArgs) -> dict[str, str | tuple[str, ...]]:
        assert isinstance(data, PreferenceDataArgs)
        columns: dict[str, str | tuple[str, ...]] = {"chosen_key": data.chosen_key, "rejected_key": data.rejected_key}
        columns = columns if self.pairs else {"response": data.response or SINGLE_COLUMNS}
        return columns if data.prompt is None else {"prompt": data.prompt, **columns}


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PreferenceConfig):
    """Everything a run of preference training is told. Inert and frozen; derived values are properties."""

    pipeline: Literal["dpo"]
    exp_name: str = "dpo"
    actor_train: DPOTrainConfig = field(default_factory=DPOTrainConfig)
    """The policy that learns. `per_device_train_batch_size` counts sequences, of which a pair has two."""
    reference: ReferenceConfig | None = acting(None, _REFERRED)
    """The frozen policy that log-probs are compared with. null: with LoRA, `actor_train` without its adapters; else
    only a `loss_type` without a reference can do without it."""
    precompute_ref_log_probs: bool = acting(False, _REFERRED)
    """Compute the reference's log-probs of all training rows before the first step, once for all epochs; they take 4
    bytes per token of memory. false: in every step, for its rows."""
    validation: DPOValidationConfig | None = None
    """Held-out rows, for loss, accuracy and margin. null: `validation_share` decides."""
    loss_type: str = named("sigmoid", args="loss_type_args")
    """sigmoid (DPO), sigmoid_norm (means per token), robust, hinge, ipo, kto (labelled rows, no pairs), orpo, simpo; or
    a function of your own of (chosen, rejected) as `package.module:name` or `path/to/file.py:name`. With options:
    `{name: simpo, beta: 2.0}`."""
    loss_type_args: dict[str, Any] = args_of("loss_type", PREFERENCE_LOSSES)
    """Options of the loss, see below; `loss_type: {name: ..., option: ...}` is short for both keys. One of your own
    gets them as keyword arguments."""
    beta: float = number(0.1, gt=0)
    """How strongly the policy is held to the reference; with `orpo` the weight of the odds ratio, with `simpo` the
    scale of the margin (published with 2.0 to 2.5)."""
    label_smoothing: float = number(0.0, ge=0, lt=0.5, acts_if=(_of_losses("label_smoothing"),))
    """Share of labels that are taken to be wrong: conservative DPO, with `robust` its unbiased form."""
    simpo_gamma: float = number(0.5, ge=0, acts_if=(_of_losses("simpo_gamma"),))
    """Margin that `simpo` asks for."""
    desirable_weight: float = number(1.0, ge=0, acts_if=(_of_losses("desirable_weight"),))
    """`kto`: weight of desirable rows, to make up for unequal numbers."""
    undesirable_weight: float = number(1.0, ge=0, acts_if=(_of_losses("undesirable_weight"),))
    """`kto`: weight of the others."""

    @property
    def loss(self) -> PreferenceLoss:
        """Return what the catalog says of `loss_type`."""
        return preference_loss_of(self.loss_type)

    @property
    def loss_options(self) -> dict[str, Any]:
        """Return the options in force: those written in `loss_type_args`, and those that keys of their own give."""
        return {
            **{name: getattr(self, option.key) for name, option in self.loss.options.items()},
            **self.loss_type_args,
        }

    @property
    def pairs(self) -> bool:
        return self.loss.pairs

    @property
    def uses_reference(self) -> bool:
        """Return whether the loss compares with a reference."""
        return self.loss.reference

    @property
    def reference_is_actor(self) -> bool:
        """Return whether the reference is the actor without its adapters."""
        return self.uses_reference and self.reference is None and self.actor_train.model_args.uses_lora

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        return {role: worker for role, worker in self.sections.items() if role != "reference" or self.uses_reference}

    def columns_of(self, data: OfflineDataArgs) -> dict[str, str | tuple[str, ...]]:
        assert isinstance(data, DPODataArgs)
        return {**super().columns_of(data), **({} if self.pairs else {"label": data.label or LABEL_COLUMNS})}


@dataclass(frozen=True, kw_only=True)
class RewardDataArgs(PreferenceDataArgs):
    """Rows to learn from: pairs, or single responses with a score."""

    margin: str | None = acting(None, _PAIRED)
    """Column with how much better the chosen response is, a number: its score shall be higher by more than that. null:
    none."""
    score: str = acting("score", _SINGLE)
    """Column with the number that the model learns to give."""


@dataclass(frozen=True, kw_only=True)
class RewardTrainDataArgs(RewardDataArgs, OfflineTrainDataArgs):
    """Rows to learn from: pairs, or single responses with a score."""


@dataclass(frozen=True, kw_only=True)
class RewardTrainConfig(OfflineTrainConfig):
    """The model that learns."""

    data_args: RewardTrainDataArgs = field(default_factory=RewardTrainDataArgs)
    """Training rows."""


@dataclass(frozen=True, kw_only=True)
class RewardValidationConfig(OfflineValidationConfig):
    """Held-out rows."""

    data_args: RewardDataArgs = field(default_factory=RewardDataArgs)
    """Where they are."""


@dataclass(frozen=True, kw_only=True)
class RewardTrainingConfig(PreferenceConfig):
    """Everything the training of a reward model is told. Inert and frozen; derived values are properties."""

    pipeline: Literal["reward_model"]
    exp_name: str = "reward_model"
    actor_train: RewardTrainConfig = field(default_factory=RewardTrainConfig)
    """The classifier that learns: a language model gets a head that starts at 0, a classifier with one output keeps its
    own. `per_device_train_batch_size` counts sequences, of which a pair has two."""
    validation: RewardValidationConfig | None = None
    """Held-out rows, for loss, accuracy and margin. null: `validation_share` decides."""
    loss_type: Literal["bradley_terry", "regression"] = "bradley_terry"
    """`bradley_terry`: the chosen response of a pair scores higher. `regression`: the score is that of a column."""
    center_rewards_coefficient: float = number(0.0, ge=0, acts_if=(needs("loss_type", "bradley_terry"),))
    """Weight of (sum of a pair's scores)^2, which keeps scores around 0. 0: off."""

    def kind_of(self, role: str) -> Literal["policy", "value", "reward"]:
        return "reward" if role == "actor_train" else super().kind_of(role)

    @property
    def pairs(self) -> bool:
        return self.loss_type == "bradley_terry"

    def columns_of(self, data: OfflineDataArgs) -> dict[str, str | tuple[str, ...]]:
        assert isinstance(data, RewardDataArgs)
        more = {"score": data.score} if not self.pairs else {"margin": data.margin} if data.margin is not None else {}
        return {**super().columns_of(data), **more}
