"""The best checkpoint of a folder: what every manifest says of it, and a link called `best` that leads to it.

The manifest of a checkpoint names the best one as of its step, so both become true in one rename; the link is a
convenience that follows, and is set right when a run goes on.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

LINK = "best"
_KEY = "best"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best validation so far."""

    metric: str
    better: Literal["higher", "lower"]
    value: float
    step: int
    """Of its checkpoint."""

    def as_meta(self) -> dict[str, Any]:
        """Return the entry of a manifest's `meta`."""
        return {_KEY: asdict(self)}


def best_of(meta: Mapping[str, Any]) -> Best | None:
    """Return what a manifest says; None where it says nothing that can be read."""
    entry = meta.get(_KEY)
    if not isinstance(entry, Mapping):
        return None
    try:
        best = Best(**entry)
        return Best(metric=str(best.metric), better=best.better, value=float(best.value), step=int(best.step))
    except (TypeError, ValueError, OverflowError):
        return None


def link_best(root: Path, step: int) -> None:
    """Make `best` lead to the checkpoint of a step, in one rename; warn where that can't be."""
    link, target = root / LINK, f"checkpoint-{step}"
    if not (root / target).is_dir() or (link.is_symlink() and os.readlink(link) == target):
        return
    if link.exists() and not link.is_symlink():
        logger.warning("%s is in the way of a link to the best checkpoint, %s", link, target)
        return
    fresh = root / f".{LINK}.{secrets.token_hex(4)}.new"
    try:
        os.symlink(target, fresh, target_is_directory=True)
        os.replace(fresh, link)
    except OSError as error:  # a disk without links
        fresh.unlink(missing_ok=True)
        logger.warning("there is no link %s to the best checkpoint, %s: %s", link, target, error)


def remove_dead_link(root: Path) -> None:
    """Remove `best` where what it leads to is gone."""
    link = root / LINK
    if link.is_symlink() and not link.exists():
        link.unlink(missing_ok=True)


def remove_unfinished_links(root: Path) -> None:
    """Remove what killed writers left of links."""
    for path in root.glob(f".{LINK}.*.new"):
        path.unlink(missing_ok=True)
