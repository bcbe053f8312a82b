"""Rules about runs that train on recorded episodes (`replay_from`). What is recorded, roll/tracking/replay_check.py
looks at."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation, problem
from roll.configs.schema.replay_source import parse_replay_from
from roll.configs.schema.rl_config import RLConfig


def replay_rules(config: RLConfig) -> Iterator[Violation]:
    """A run and its steps are named, and something is trained."""
    if config.replay_from is None:
        return
    try:
        parse_replay_from(config.replay_from)
    except ValueError as error:
        expected = f"a run's folder, with steps as RUN:5 or RUN:5-8; {error}"
        yield Violation("replay_from", expected, "replay_from=<output_dir of a run>", config.replay_from)
    if config.val_only:
        why = "a replay has no engine that could play the validation, so nothing would be left to do"
        yield problem("val_only", why, "remove it, or replay_from", True)


def replay_warnings(config: RLConfig) -> Iterator[str]:
    """Say what a replay leaves out of what the file asks for."""
    if config.replays and config.validates and (config.eval_steps or config.val_before_train):
        yield "replay_from: nothing is validated, because a replay has no engine"
