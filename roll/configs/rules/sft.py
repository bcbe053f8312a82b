"""Rules of `pipeline: sft`: the columns of its rows. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation
from roll.configs.rules import offline
from roll.configs.schema.sft_config import SFTConfig, SFTDataArgs


def column_rules(config: SFTConfig) -> Iterator[Violation]:
    """What the columns of the rows are."""
    for path, data in offline.sections_of(config).items():
        assert isinstance(data, SFTDataArgs)
        there = [column for column in (data.prompt, data.response) if column is not None]
        if data.messages is None and not there:
            expected = "a column with conversations, or columns with prompt and response"
            fix = f"{path}.messages=messages, or {path}.prompt=question {path}.response=answer"
            yield Violation(f"{path}.messages", expected, fix, None)
        elif data.messages is None and len(there) == 1:
            missing = "prompt" if data.prompt is None else "response"
            key, expected = f"{path}.{missing}", f"a column that goes with {there[0]!r}"
            yield Violation(key, expected, f"{key}={missing}", None)


def sft_warnings(config: SFTConfig) -> Iterator[str]:
    """What is allowed but probably not meant."""
    yield from offline.warnings(config)
    if config.train_on == "all" and config.actor_train.data_args.messages is None:
        yield "train_on: all is for conversations; a prompt with a response has one message of the assistant"


RULES = (*offline.RULES, column_rules)
