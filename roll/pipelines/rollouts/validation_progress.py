"""What is said and kept of a validation while it runs."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from roll.configs.schema.rl_config import RLConfig
from roll.pipelines.rollouts.eval_table import UNFINISHED, append_episodes
from roll.types.trajectory import Group

logger = logging.getLogger(__name__)

_SECONDS = 10.0
_RECENT = 64
"""Tasks whose pace an estimate goes by: the first to end say little, because all begin together."""
_SHARE = 0.1
"""Of the tasks that have to be through before there is an estimate."""


class ValidationProgress:
    """Logs how far a validation is, every ten seconds; a mere validation (`val_only`) also keeps what is finished."""

    def __init__(self, config: RLConfig, tokenizer: Any, tasks: int) -> None:
        self._folder = config.output_path if config.val_only else None
        self._tokenizer = tokenizer
        self._tasks = tasks
        self.begin()

    def begin(self) -> None:
        """Start from the first task."""
        self._done = 0
        self._shown = time.monotonic()
        self._ends: deque[float] = deque(maxlen=_RECENT)
        if self._folder is not None:
            (self._folder / UNFINISHED).unlink(missing_ok=True)

    def add(self, group: Group) -> None:
        """Note that a task is through."""
        self._done += 1
        if self._folder is not None:
            append_episodes(self._folder, group, self._tokenizer)
        now = time.monotonic()
        self._ends.append(now)
        if now - self._shown >= _SECONDS and self._done < self._tasks:
            self._shown = now
            logger.info("validation: %d of %d tasks%s", self._done, self._tasks, self._estimate())

    def _estimate(self) -> str:
        """Return how long the rest takes at the pace of the last tasks; nothing while too few have ended."""
        if len(self._ends) < 2 or self._done < _SHARE * self._tasks:
            return ""
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f", about {pace * (self._tasks - self._done):.0f} s to go"
