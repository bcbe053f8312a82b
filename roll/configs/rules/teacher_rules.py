"""Rules about a teacher. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.catalog.divergence_table import DIVERGENCES
from roll.configs.errors import Violation
from roll.configs.rules.options_rules import named_rules
from roll.configs.schema.distill_config import DistillConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.sft_config import SFTConfig


def teacher_rules(config: RLConfig | SFTConfig) -> Iterator[Violation]:
    """The teacher, and what its weight leaves to rewards."""
    yield from named_rules(config.distill.divergence, "distill.divergence", tuple(DIVERGENCES))
    if isinstance(config, RLConfig):
        yield from _tags(config)
    elif config.teacher is not None and config.teacher.tags:
        yield Violation("teacher.tags", "none: it teaches all rows", "remove it", list(config.teacher.tags))
    if isinstance(config, DistillConfig):
        if config.teacher is None and not config.val_only:
            fix = "teacher={model_args: {model_name_or_path: <folder or hub id>}}"
            yield Violation("teacher", "the model that teaches", fix, None)
        scored = [domain for domain, reward in config.rewards.items() if reward.name != "none"]
        if config.distill.reward_coef and not scored:
            expected = "0, because no domain of rewards gives a score"
            yield Violation("distill.reward_coef", expected, "rewards.<domain>.name=...", config.distill.reward_coef)


def _tags(config: RLConfig) -> Iterator[Violation]:
    """Every tag has one teacher."""
    if config.teacher is not None and config.teacher.tags:
        expected = "none: it teaches all tasks that none of teachers teaches"
        yield Violation("teacher.tags", expected, "teachers={<name>: {tags: ...}}", list(config.teacher.tags))
    seen: set[str] = set()
    for name, model in config.teachers.items():
        for tag in model.tags or (name,):
            if tag in seen:
                yield Violation(f"teachers.{name}.tags", "each tag at one teacher", "remove it from one of them", tag)
            seen.add(tag)
