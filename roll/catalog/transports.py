"""Ways of weights from the trainer to the engines: values of `weight_transport`, and what `auto` may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll.catalog.entries import Entry


@dataclass(frozen=True, kw_only=True)
class Transport(Entry):
    """`path` is a module with `send(route, stream) -> handles` and `receive(route, handles, rank) -> stream`."""

    configurable: bool = True
    """A configuration may choose it; else only `auto` does."""
    streams: bool = False
    """Both ends are at work at the same time; the handles of the others stay what they are."""


TRANSPORTS: dict[str, Transport] = {
    "in_process": Transport(path="roll.distributed.transports.stored", configurable=False),
    "object_store": Transport(path="roll.distributed.transports.stored"),
    "file": Transport(path="roll.distributed.transports.files"),
    "shared_memory": Transport(path="roll.distributed.transports.shared", streams=True),
    "broadcast": Transport(path="roll.distributed.transports.broadcast", streams=True),
}

MOST_SENDERS = 8
"""Ranks of the trainer that send a share each; an engine keeps the buffers of all of them open."""


def who_sends(
    transport: str, trainer: Sequence[tuple[int, ...]], engines: Sequence[tuple[int, ...]], *, on_accelerator: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the trainer that share the work, and for each engine the one that sends it everything.

    `trainer` and `engines`: the slots of the ranks that have whole tensors, and of all engines. On accelerators that
    both ends share, each rank sends to the engines that begin on its own. Elsewhere the second answer is empty, and
    ranks copy a part of the weights to the host each, by links of their own. Other transports than `shared_memory` have
    one sender.
    """
    if transport != "shared_memory":
        return (0,), ()
    owners = {slots[0]: rank for rank, slots in enumerate(trainer) if len(slots) == 1}
    sources = tuple(owners[slots[0]] for slots in engines if slots[0] in owners)
    if on_accelerator and len(sources) == len(engines):
        return (0,), sources
    return tuple(range(0, len(trainer), -(-len(trainer) // MOST_SENDERS))), ()
