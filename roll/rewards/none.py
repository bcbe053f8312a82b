"""`name: none`: no score, for domains that a teacher alone teaches."""

from __future__ import annotations

from roll.types.trajectory import Task


def none(response: str, task: Task) -> float:
    """Return 0 for every response."""
    del response, task
    return 0.0
