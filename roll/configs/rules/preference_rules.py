"""Rules of `pipeline: dpo` and `pipeline: reward_model`. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from roll.configs.catalog.preference_table import PREFERENCE_LOSSES
from roll.configs.errors import Violation
from roll.configs.rules import offline_rules as offline
from roll.configs.rules.options_rules import given_twice, named_rules
from roll.configs.schema.preference_config import DPOConfig, PreferenceConfig

_SIMPO_BETA = 1.0


def pair_rules(config: PreferenceConfig) -> Iterator[Violation]:
    """Passes of whole pairs."""
    args, key = config.actor_train.training_args, "actor_train.training_args.per_device_train_batch_size"
    size = args.per_device_train_batch_size
    if config.pairs and size % 2:
        expected = "an even number: it counts sequences, of which a pair has two"
        yield Violation(key, expected, f"{key}={size + 1}", size)


def loss_rules(config: DPOConfig) -> Iterator[Violation]:
    """The loss, its options, and what it compares with."""
    yield from named_rules(config.loss_type, "loss_type", tuple(PREFERENCE_LOSSES))
    defaults = {spec.name: spec.default for spec in fields(config)}
    yield from given_twice(config, "loss_type_args", config.loss, defaults.get)
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
    """What is allowed but probably not meant."""
    yield from offline.warnings(config)
    if config.loss_type == "simpo" and config.loss_options["beta"] < _SIMPO_BETA:
        yield f"simpo was published with beta 2.0 to 2.5; it is {config.loss_options['beta']:g}"
    if config.reference_is_actor and config.actor_train.model_args.adapter_name_or_path is not None:
        yield (
            "the reference is the base model without the adapters that training starts from; to stay near those, merge "
            "them into a folder and name it in a reference section"
        )


DPO_RULES = (*offline.RULES, pair_rules, loss_rules)
REWARD_MODEL_RULES = (*offline.RULES, pair_rules)
