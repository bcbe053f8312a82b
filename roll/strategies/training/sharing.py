"""Whether a role computes tokens that rows have in common at their beginnings once: its key, and what rules it out."""

from __future__ import annotations

import logging
from collections.abc import Callable

from roll.configs.rules.layout_rules import sharing_obstacle
from roll.strategies.base import TrainSpec

logger = logging.getLogger(__name__)


def shares_prefixes(
    spec: TrainSpec, *, packed: bool, accelerated: bool, prepare: Callable[[], None] = lambda: None
) -> bool:
    """Return False if the role's `use_prefix_sharing` or something else rules it out, and log what.

    `packed`: the role lays rows end to end anyhow. `accelerated`: it computes on an accelerator. `prepare` makes the
    model ready, called unless the configuration rules it out; its `ValueError` says why the model can't. Raises
    `ValueError` if the key asks for what can't be.
    """
    wanted = spec.worker.use_prefix_sharing
    if wanted is False:
        return False
    why = sharing_obstacle(spec.worker)
    if spec.kind == "reward" and not spec.trains:
        why = "a reward model reads whole texts"
    if why is None and wanted is None and accelerated and not packed:
        why = "on an accelerator that is tried with use_sequence_packing: true only"
    if why is None:
        try:
            prepare()
        except ValueError as error:
            why = str(error)
    if why is not None and wanted:
        raise ValueError(f"{spec.role}.use_prefix_sharing: {why}. Remove it")
    if why is not None:
        logger.info("%s: beginnings that rows share are computed for each of them: %s", spec.role, why)
    return why is None
