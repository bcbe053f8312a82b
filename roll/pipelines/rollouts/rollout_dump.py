"""The files of rollouts that a run writes into `rollout_dump_dir`, and what it says about them."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.pipelines.rollouts.assemble import Rollouts
from roll.pipelines.rollouts.off_policy import old_logprobs_source
from roll.pipelines.rollouts.rollout_rows import Texts, column_notes, group_rows, played_rows, training_rows
from roll.tracking.rollouts import FILE_NAMES, delete_oldest, write_rollouts
from roll.types.trajectory import Group, Task, Trajectory

logger = logging.getLogger(__name__)

_MAX_DROPPED = 1024
"""Dropped episodes of one step whose rows are kept; the others are counted in the metrics alone."""


class RolloutDump:
    """One per run; does nothing without `rollout_dump_dir`."""

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        folder = config.extra_output_dirs.get("rollout_dump_dir")
        self._config = config
        self._folder = Path(folder) if folder else None
        pictures = config.extra_output_dirs.get("render_save_dir")
        self._pictures = Path(pictures) if pictures else None
        self._texts = Texts(tokenizer)
        self._dropped: list[dict[str, Any]] = []
        self._limit = getattr(config, "rollout_dump_gib", None) if self._folder else None
        self._reasons = _reasons(config) if self._folder and isinstance(config, RLConfig) else {}

    def set_earlier_aside(self) -> None:
        """Move what an earlier run has recorded here into a folder `earlier.<n>`, before this one starts over."""
        if self._folder is not None:
            names = [f"{name}-*.parquet" for name in FILE_NAMES.values()]
            _set_aside("the rollouts", self._folder, names)
        if self._pictures is not None:
            _set_aside("the pictures", self._pictures, ["step-*"])

    def about(self, total_steps: int) -> dict[str, Any]:
        """Return what `run.json` says of the run."""
        config, logs, pictures = self._config, self._config.logging_path.absolute(), self._pictures
        return {
            "exp_name": config.exp_name,
            "pipeline": config.pipeline,
            "total_steps": total_steps,
            "seed": config.seed,
            # Relative, so that a folder that is moved or copied is found again.
            "output_dir": os.path.relpath(config.output_path.absolute(), logs),
            "rollouts": os.path.relpath(self._folder.absolute(), logs) if self._folder else None,
            "pictures": os.path.relpath(pictures.absolute(), logs) if pictures else None,
        }

    def dropped(self, task: Task, trajectories: Iterable[Trajectory], reason: str = "") -> None:
        """Keep episodes that aren't trained on until the step's files are written."""
        if self._folder is not None and len(self._dropped) < _MAX_DROPPED:
            self._dropped += played_rows(task, trajectories, self._texts, reason)

    def step(self, step: int, rollouts: Rollouts) -> None:
        """Write what a step was trained on, and what was dropped since the last one."""
        if self._folder is None:
            return
        rows, notes = training_rows(rollouts, self._texts), column_notes(rollouts, self._reasons)
        write_rollouts(self._folder, step, rows, notes=notes, token_text=self._texts.of_tokens)
        dropped, self._dropped = self._dropped, []
        if dropped:
            write_rollouts(self._folder, step, dropped, kind="dropped", notes=_PLAYED, token_text=self._texts.of_tokens)
        if self._limit is not None:
            for old in delete_oldest(self._folder, int(self._limit * 2**30), keep=step):
                logger.info("rollout_dump_gib: deleted the rollouts of step %d", old)

    def validation(self, step: int, groups: Sequence[Group]) -> None:
        """Write the episodes of a validation."""
        if self._folder is not None:
            rows = group_rows(groups, self._texts)
            write_rollouts(self._folder, step, rows, kind="validation", notes=_PLAYED, token_text=self._texts.of_tokens)


_PLAYED = dict.fromkeys(
    ("loss_mask", "old_logprobs", "ref_logprobs", "entropies", "values", "token_rewards", "advantages", "returns"),
    "these episodes weren't trained on",
)


def _set_aside(what: str, folder: Path, names: Iterable[str]) -> None:
    there = [path for name in names for path in folder.glob(name)]
    if there:
        aside = next(path for n in itertools.count(1) if not (path := folder / f"earlier.{n}").exists())
        aside.mkdir()
        for path in there:
            path.rename(aside / path.name)
        logger.warning("%s of an earlier run were moved to %s", what, aside)


def _reasons(config: RLConfig) -> dict[str, str]:
    """Return why token columns may be empty, by their names."""
    source = old_logprobs_source(config)
    asked = "rollout_dump_outputs: [{}] computes them for this file"
    return {
        "old_logprobs": f"{source.reason}; {asked.format('old_logprobs')}",
        "ref_logprobs": "the run has no reference model",
        "entropies": asked.format("entropies"),
        "values": f"adv_estimator {config.adv_estimator} has no critic",
        "importance_weights": "train_infer_correction is off",
    }
