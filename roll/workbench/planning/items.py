"""The parts that a plan is made of: so many bytes of something, of a role, in a phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

PARTS = (
    "weights", "gradients", "optimizer", "activations", "logits", "KV cache", "gathered weights", "sync buffers",
    "weight copies", "routed experts", "process",
)  # fmt: skip
"""What memory is for, in the order of the report."""


@dataclass(frozen=True)
class Item:
    """Bytes of one rank of a role."""

    what: str
    nbytes: int
    lasting: bool = True
    """Whether they are there as long as the role is awake; else in the worst moment of a phase."""


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """One rank of a role: what it holds while it is awake or asleep, and what each of its phases adds."""

    role: str
    awake: tuple[Item, ...]
    asleep: tuple[Item, ...]
    """On its device while others work there."""
    phases: dict[str, tuple[Item, ...]]
    """`start`, `generate`, `score`, `train`, `sync` -> what the worst moment of it adds to `awake`."""
    host_awake: int = 0
    """Bytes on its host while it is awake, and while it sleeps."""
    host_asleep: int = 0
    host_start: int = 0
    """While it is built, instead."""
    host_phases: dict[str, int] = field(default_factory=dict)
    """On the host in a phase, on top of `host_awake`."""
    limit: int | None = None
    """Bytes that the role takes of its device at most, by its own options."""
    notes: tuple[str, ...] = ()
    """What it can do with its memory, or why it can't."""


def total(items: Iterable[Item]) -> int:
    """Return bytes of all of them."""
    return sum(item.nbytes for item in items)


def lasting(*items: tuple[str, int]) -> tuple[Item, ...]:
    """Return what lasts, without what is nothing."""
    return tuple(Item(what, size) for what, size in items if size)


def passing(*items: tuple[str, int]) -> tuple[Item, ...]:
    """Return what is there for a moment, without what is nothing."""
    return tuple(Item(what, size, lasting=False) for what, size in items if size)
