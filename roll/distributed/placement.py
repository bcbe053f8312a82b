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
    """Slots of each rank; one entry per rank. No slot twice, which the configuration sees to."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set before the worker's process imports anything."""
    max_concurrency: int = 1
    """Calls one rank may run at the same time; with 1 they run in the order they were made."""
    nsight: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Options of Nsight Systems, by rank, for those whose process is started under it."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def num_slots(placements: Iterable[RolePlacement]) -> int:
    """Return how many slots the cluster must offer: one more than the largest slot named by any role."""
    return max((slot + 1 for p in placements for rank in p.ranks for slot in rank), default=0)
