"""Pictures and texts of validation episodes, below `render_save_dir`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from roll.envs.env_registry import EnvSpec
from roll.envs.replay import save_replay
from roll.types.episode import Group, Task

logger = logging.getLogger(__name__)


class Renderer:
    """Plays episodes again, in processes of their own, and draws them.

    Args:
        folder: gets `step-<n>/<task>/` with `episode.png`, `first.png` and `episode.txt`.
        timeout_s: for a whole episode; one that takes longer has no picture.
    """

    def __init__(self, folder: Path, specs: Mapping[str, EnvSpec], timeout_s: float) -> None:
        self._folder = folder
        self._specs = dict(specs)
        self._timeout_s = timeout_s

    def save(self, step: int, groups: Sequence[Group], said: Callable[[Task, Sequence[int]], str]) -> None:
        """Draw the first member of every group that was played to its end, as `validation_samples` shows it.

        What can't be drawn is logged: a picture never ends a run.

        Args:
            said: tokens of a response to a task, as the text that the environment got.
        """
        for group in groups:
            if not group.survivors:
                continue
            task, played = group.task, group.survivors[0]
            responses = [said(task, turn.response_ids) for turn in played.turns]
            folder = self._folder / f"step-{step:06d}" / task.id
            try:
                save_replay(
                    self._specs[task.tag], task.seed, task.payload, responses, folder, timeout_s=self._timeout_s
                )
            except (RuntimeError, OSError) as error:
                logger.warning("no picture of %s: %s", task.id, error)
