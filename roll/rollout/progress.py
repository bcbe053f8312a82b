"""How far the playing of groups is, for whoever shows a run under way."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from roll.types.trajectory import LEFT_OUT, Trajectory

_LONGEST_FAILURE = 300


@dataclass(slots=True)
class RolloutProgress:
    """Written by a scheduler while it plays, read by other threads at any time. Plain numbers, so writing is cheap."""

    step: int = 0
    """Of the groups that are collected."""
    groups_wanted: int = 0
    """0: nobody waits for groups."""
    groups_done: int = 0
    """Accepted so far; in asynchronous mode those that are ready."""
    groups_open: int = 0
    groups_dropped: int = 0
    """Since the collecting began."""
    episodes_running: int = 0
    episodes_ended: int = 0
    """Since the collecting began, failed ones included."""
    episodes_failed: int = 0
    last_failure: str = ""
    """Id, status and words of the latest one."""

    def begin(self, step: int, wanted: int) -> None:
        """Count from here: `wanted` groups are collected for a step."""
        self.step, self.groups_wanted, self.groups_dropped = step, wanted, 0
        self.episodes_ended = self.episodes_failed = 0
        self.last_failure = ""

    def note(self, *, done: int, open_groups: int, dropped: int) -> None:
        """Say how the groups stand."""
        self.groups_done, self.groups_open, self.groups_dropped = done, open_groups, dropped

    def ended(self, trajectory: Trajectory) -> None:
        """Count an episode that has ended by itself."""
        self.episodes_ended += 1
        if not trajectory.trainable and trajectory.status not in LEFT_OUT:
            self.episodes_failed += 1
            words = (trajectory.error or "").strip().partition("\n")[0]
            self.last_failure = f"{trajectory.id}, {trajectory.status}: {words}"[:_LONGEST_FAILURE]

    def shown(self) -> dict[str, Any]:
        """Return the numbers; nothing if nothing is played."""
        return asdict(self) if self.groups_wanted or self.episodes_running else {}
