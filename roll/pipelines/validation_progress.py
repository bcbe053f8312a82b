"""What is said and kept of a validation while it runs."""

from __future__ import annotations

import logging
import time
from typing import Any

from roll.configs.schema.rl_config import RLConfig
from roll.pipelines.eval_table import UNFINISHED, append_episodes
from roll.types.episode import Group

logger = logging.getLogger(__name__)

_SECONDS = 10.0


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
        self._begun = self._shown = time.monotonic()
        if self._folder is not None:
            (self._folder / UNFINISHED).unlink(missing_ok=True)

    def add(self, group: Group) -> None:
        """Note that a task is through."""
        self._done += 1
        if self._folder is not None:
            append_episodes(self._folder, group, self._tokenizer)
        now = time.monotonic()
        if now - self._shown >= _SECONDS and self._done < self._tasks:
            self._shown = now
            left = (now - self._begun) / self._done * (self._tasks - self._done)
            logger.info("validation: %d of %d tasks, about %.0f s to go", self._done, self._tasks, left)
