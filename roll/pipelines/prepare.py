"""What a run makes before it reads anything: data or a starting model, by a function of the user's own."""

from __future__ import annotations

import logging

from roll.configs.schema.run_config import RunConfig
from roll.utils.importing import load_object

logger = logging.getLogger(__name__)


def prepare(config: RunConfig) -> None:
    """Call the function that `prepare` names, with the configuration. It does nothing for what is there already."""
    if config.prepare is None:
        return
    make = load_object(config.prepare, key="prepare")
    if not callable(make):
        raise ValueError(f"prepare: {config.prepare!r} is {type(make).__name__}, expected a function")
    logger.info("preparing with %s", config.prepare)
    make(config)
