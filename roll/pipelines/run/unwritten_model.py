"""A trained model that its ranks couldn't write at the end of a run: a checkpoint, and the model written from that.

The weights are in the memory of processes that end with the run. A checkpoint takes another way to the disk (each rank
its own part, to the folder of checkpoints), and what `roll export` does with one needs no ranks at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from roll.checkpoint.files import Checkpoint, CheckpointWriteError
from roll.configs.catalog.entries import OWN_PATH
from roll.configs.schema.checkpoint_config import STATE_CONTENTS, CheckpointContent
from roll.configs.schema.run_config import RunConfig
from roll.pipelines.run.exporting import ROLE, export_checkpoint
from roll.strategies.merging import Merge
from roll.utils.disk import first_line

logger = logging.getLogger(__name__)


def write_from_checkpoint(
    config: RunConfig,
    error: CheckpointWriteError,
    *,
    save: Callable[[Sequence[CheckpointContent]], None],
    saved: Callable[[], Checkpoint | None],
    latest: Callable[[], Path | None],
) -> None:
    """Write the model of the last step to `export_path` from its checkpoint, which is saved if there is none.

    `save` saves these contents of the last step, `saved` returns its checkpoint, `latest` the newest one at all. Raises
    `CheckpointWriteError` that goes on from `error` with where the weights are and how to export them.
    """
    checkpoint = saved()
    reason = "" if checkpoint is not None else _saved(save)
    checkpoint = saved()
    if checkpoint is None:
        newest = latest()
        rest = "no checkpoint was kept"
        if newest is not None:
            rest = f"{newest} is intact: resume_from_checkpoint=auto does what is left and writes the model again"
        raise CheckpointWriteError(f"{error}; its checkpoint couldn't be saved either: {reason}; {rest}") from error
    way = f"the trained weights are in {checkpoint.path}: roll export {checkpoint.path} -o DIR writes the model"
    if OWN_PATH.match(config.roles[ROLE].strategy_args.strategy_name):  # a backend that would have to start once more
        raise CheckpointWriteError(f"{error}; {way}") from error
    try:
        export_checkpoint(checkpoint, config.export_path, Merge(), config=config)
    except (CheckpointWriteError, ValueError, OSError) as again:
        second_reason = first_line(again)
        more = "" if second_reason in str(error) else f"; from its checkpoint neither: {second_reason}"
        raise CheckpointWriteError(f"{error}{more}; {way}, to a disk with room") from error
    logger.warning("the model was written to %s from %s", config.export_path, checkpoint.path)


def _saved(save: Callable[[Sequence[CheckpointContent]], None]) -> str:
    """Save a checkpoint, without the optimizer where the disk has no room for it; return why it can't be."""
    reason = ""
    for contents in (STATE_CONTENTS, ("model",)):
        try:
            save(contents)  # type: ignore[arg-type]
        except Exception as failure:  # noqa: BLE001 - the model is what the caller has to hear of
            reason = first_line(failure)
            logger.error("%s", failure)
        else:
            return ""
    return reason
