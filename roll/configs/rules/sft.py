"""Rules of `pipeline: sft`: its rows, their length, what is held out. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import NO_VALUE, Violation
from roll.configs.rules.data import template_rules
from roll.configs.schema.sft_config import SFTConfig, SFTDataArgs


def length_rules(config: SFTConfig) -> Iterator[Violation]:
    """Longest row."""
    if config.sequence_length is None or config.sequence_length < 2:
        expected = "the longest row in tokens, at least 2: one that is read and one that is learnt"
        yield Violation("sequence_length", expected, "sequence_length=2048", config.sequence_length)


def data_rules(config: SFTConfig) -> Iterator[Violation]:
    """Where rows come from, and what their columns are."""
    yield from _source_rules("actor_train.data_args", config.actor_train.data_args)
    if config.validation is not None:
        yield from _source_rules("validation.data_args", config.validation.data_args)
        held = set(config.validation.data_args.file_name).intersection(config.actor_train.data_args.file_name)
        for name in sorted(held):
            expected = "a file that isn't trained on: it wouldn't tell what the model does with new rows"
            yield Violation("validation.data_args.file_name", expected, "validation_share=0.05 instead", name)


def sft_warnings(config: SFTConfig) -> Iterator[str]:
    """What is allowed but probably not meant."""
    if config.validates and not (config.eval_steps or config.val_before_train):
        yield "rows are held out, but eval_steps and val_before_train are off: validation won't run"
    if config.train_on == "all" and config.actor_train.data_args.messages is None:
        yield "train_on: all is for conversations; a prompt with a response has one message of the assistant"


def _source_rules(path: str, data: SFTDataArgs) -> Iterator[Violation]:
    if not data.file_name:
        yield Violation(f"{path}.file_name", "a file", f"{path}.file_name=data.jsonl", NO_VALUE)
    for name in sorted({name for name in data.file_name if data.file_name.count(name) > 1}):
        yield Violation(f"{path}.file_name", "each file once", "remove one", name)
    there = [column for column in (data.prompt, data.response) if column is not None]
    if data.messages is None and not there:
        expected = "a column with conversations, or columns with prompt and response"
        fix = f"{path}.messages=messages, or {path}.prompt=question {path}.response=answer"
        yield Violation(f"{path}.messages", expected, fix, None)
    elif data.messages is None and len(there) == 1:
        missing = "prompt" if data.prompt is None else "response"
        key, expected = f"{path}.{missing}", f"a column that goes with {there[0]!r}"
        yield Violation(key, expected, f"{key}={missing}", None)
    yield from template_rules({f"{path}.template": data.template})


RULES = (length_rules, data_rules)
