"""Rules of every pipeline over finished rows: length, files, what is held out. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import NO_VALUE, Violation
from roll.configs.rules.data_rules import template_rules
from roll.configs.schema.offline_config import OfflineConfig, OfflineDataArgs


def length_rules(config: OfflineConfig) -> Iterator[Violation]:
    """Longest row."""
    if config.sequence_length is None or config.sequence_length < 2:
        expected = "the longest row in tokens, at least 2: one that is read and one that is learnt"
        yield Violation("sequence_length", expected, "sequence_length=2048", config.sequence_length)


def file_rules(config: OfflineConfig) -> Iterator[Violation]:
    """Where rows come from."""
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
    """The sections that name rows, by path."""
    found: dict[str, OfflineDataArgs] = {"actor_train.data_args": config.actor_train.data_args}
    if config.validation is not None:
        found["validation.data_args"] = config.validation.data_args
    return found


def warnings(config: OfflineConfig) -> Iterator[str]:
    """What is allowed but probably not meant."""
    if config.validates and not (config.eval_steps or config.val_before_train):
        yield "rows are held out, but eval_steps and val_before_train are off: validation won't run"


RULES = (length_rules, file_rules)
