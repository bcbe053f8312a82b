"""Rules of every pipeline over finished rows: length, files, what is held out. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from roll.configs.catalog.preference_table import PREFERENCE_LOSSES
from roll.configs.errors import NO_VALUE, Violation
from roll.configs.rules.data_rules import template_rules
from roll.configs.rules.picture_rules import offline_picture_rules
from roll.configs.rules.policy_rules import duplicate_options, named_rules
from roll.configs.schema.offline_config import OfflineConfig, OfflineDataArgs
from roll.configs.schema.preference_config import DPOConfig, PreferenceConfig
from roll.configs.schema.sft_config import SFTConfig


def length_rules(config: OfflineConfig) -> Iterator[Violation]:
    """Longest row."""
    if config.sequence_length is None or config.sequence_length < 2:
        expected = "the longest row in tokens, at least 2: one that is read and one that is learnt"
        yield Violation("sequence_length", expected, "sequence_length=2048", config.sequence_length)


def file_rules(config: OfflineConfig) -> Iterator[Violation]:
    """Check where rows come from."""
    for path, data in sections_of(config).items():
        if not data.file_name:
            yield Violation(f"{path}.file_name", "a file", f"{path}.file_name=data.jsonl", NO_VALUE)
        for name in sorted({name for name in data.file_name if data.file_name.count(name) > 1}):
            yield Violation(f"{path}.file_name", "each file once", "remove one", name)
        yield from template_rules({f"{path}.template": data.template})
    if config.validation is not None:
        held = set(config.validation.data_args.file_name).intersection(config.actor_train.data_args.file_name)
        for name in sorted(held):
            expected = "a file that isn't trained on: it wouldn't tell what the model does with new rows"
            yield Violation("validation.data_args.file_name", expected, "validation_share=0.05 instead", name)


def sections_of(config: OfflineConfig) -> dict[str, OfflineDataArgs]:
    """Return the sections that name rows, by path."""
    sections: dict[str, OfflineDataArgs] = {"actor_train.data_args": config.actor_train.data_args}
    if config.validation is not None:
        sections["validation.data_args"] = config.validation.data_args
    return sections


def warnings(config: OfflineConfig) -> Iterator[str]:
    """Yield what is allowed but probably not meant."""
    if config.validates and not (config.eval_steps or config.val_before_train):
        yield "rows are held out, but eval_steps and val_before_train are off: validation won't run"


RULES = (length_rules, file_rules, offline_picture_rules)


def sft_warnings(config: SFTConfig) -> Iterator[str]:
    """Yield what is allowed but probably not meant."""
    yield from warnings(config)
    data = config.actor_train.data_args
    if config.train_on == "all" and data.prompt is not None and data.response is not None:
        yield "train_on: all is for conversations; a prompt with a response has one message of the assistant"


_SIMPO_BETA = 1.0


def pair_rules(config: PreferenceConfig) -> Iterator[Violation]:
    """Check that a pass consists of whole pairs."""
    args, key = config.actor_train.training_args, "actor_train.training_args.per_device_train_batch_size"
    size = args.per_device_train_batch_size
    if config.pairs and size % 2:
        expected = "an even number: it counts sequences, of which a pair has two"
        yield Violation(key, expected, f"{key}={size + 1}", size)


def loss_rules(config: DPOConfig) -> Iterator[Violation]:
    """Check the loss, its options, and what it compares with."""
    yield from named_rules(config.loss_type, "loss_type", tuple(PREFERENCE_LOSSES))
    defaults = {spec.name: spec.default for spec in fields(config)}
    yield from duplicate_options(config, "loss_type_args", config.loss, defaults.get)
    if config.uses_reference and config.reference is None and not config.reference_is_actor:
        free = ", ".join(name for name, loss in PREFERENCE_LOSSES.items() if not loss.reference)
        expected = f"a reference, because loss_type {config.loss_type} compares with one"
        fix = f"reference={{}} (the starting model), or LoRA, or a loss_type without one ({free})"
        yield Violation("reference", expected, fix, None)
    if config.loss_type == "robust" and not config.loss_options["label_smoothing"]:
        expected = "more than 0: with no wrong labels, robust is sigmoid"
        yield Violation("label_smoothing", expected, "label_smoothing=0.1, or loss_type=sigmoid", 0.0)
    if not config.pairs and config.rows_per_step < 2:
        key = "actor_train.training_args.per_device_train_batch_size"
        expected = "at least 2 rows per step: the KL of kto is measured with the responses of other rows"
        yield Violation(key, expected, f"{key}=16", config.actor_train.training_args.per_device_train_batch_size)


def dpo_warnings(config: DPOConfig) -> Iterator[str]:
    """Yield what is allowed but probably not meant."""
    yield from warnings(config)
    if config.loss_type == "simpo" and config.loss_options["beta"] < _SIMPO_BETA:
        yield f"simpo was published with beta 2.0 to 2.5; it is {config.loss_options['beta']:g}"
    if config.reference_is_actor and config.actor_train.model_args.adapter_name_or_path is not None:
        yield (
            "the reference is the base model without the adapters that training starts from; to stay near those, merge "
            "them into a folder and name it in a reference section"
        )


DPO_RULES = (*RULES, pair_rules, loss_rules)
REWARD_MODEL_RULES = (*RULES, pair_rules)
