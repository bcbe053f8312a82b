"""Rules of `pipeline: sft`: what is probably not meant. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.rules import offline_rules as offline
from roll.configs.schema.sft_config import SFTConfig


def sft_warnings(config: SFTConfig) -> Iterator[str]:
    """What is allowed but probably not meant."""
    yield from offline.warnings(config)
    data = config.actor_train.data_args
    if config.train_on == "all" and data.prompt is not None and data.response is not None:
        yield "train_on: all is for conversations; a prompt with a response has one message of the assistant"


RULES = offline.RULES
