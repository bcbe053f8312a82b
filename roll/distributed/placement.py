"""Where the ranks of a role run: plain data between the configuration and the executors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """Device slots and environment of every rank of one role.

    A slot is a global device number: an accelerator where the cluster has any, else a share of the CPU. Roles that name
    the same slots are colocated. A rank without slots runs on the CPU and shares no device with anybody.
    """

    role: str
    ranks: tuple[tuple[int, ...], ...]
    """Slots of each rank; one entry per rank."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set before the worker's process imports anything."""
    max_concurrency: int = 1
    """Calls one rank may run at the same time; with 1 they run in the order they were made."""

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError(f"{self.role}: a role needs at least one rank, got none; check its device_mapping")
        slots = [slot for rank in self.ranks for slot in rank]
        if any(slot < 0 for slot in slots):
            raise ValueError(f"{self.role}: device slots count from 0, got {sorted(slots)}")
        if len(set(slots)) != len(slots):
            twice = sorted({slot for slot in slots if slots.count(slot) > 1})
            raise ValueError(f"{self.role}: two ranks of one role can't share a slot, got {twice} more than once")
        if self.max_concurrency < 1:
            raise ValueError(f"{self.role}.max_concurrency must be >= 1, got {self.max_concurrency}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def num_slots(placements: Iterable[RolePlacement]) -> int:
    """Return how many slots the cluster must offer: one more than the largest slot named by any role."""
    return max((slot + 1 for p in placements for rank in p.ranks for slot in rank), default=0)
