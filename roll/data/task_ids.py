"""Ids of tasks that are played in more than one epoch: `gsm8k:12` first, then `gsm8k:12@e1`, `gsm8k:12@e2`."""

from __future__ import annotations

import re

_SUFFIX = re.compile(r"@e(\d+)$")


def with_epoch(task_id: str, epoch: int) -> str:
    """Return the id of a task in an epoch, counted from 0."""
    return f"{task_id}@e{epoch}" if epoch else task_id


def base_id(task_id: str) -> str:
    """Return the id without its epoch: the same for every repeat of a task."""
    return _SUFFIX.sub("", task_id)


def epoch_of(task_id: str) -> int:
    """Return the epoch in an id, 0 without one."""
    match = _SUFFIX.search(task_id)
    return int(match.group(1)) if match else 0
