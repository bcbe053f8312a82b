"""Ways of weights from the trainer to the engines: values of `weight_transport`, and what `auto` may choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.configs.catalog.entries import Entry


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
    "file": Transport(path="roll.distributed.transports.file_transport"),
    "shared_memory": Transport(path="roll.distributed.transports.shared", streams=True),
    "broadcast": Transport(path="roll.distributed.transports.broadcast", streams=True),
}

MAX_SENDERS = 8
"""Ranks of the trainer that send a share each; an engine keeps the buffers of all of them open."""


def who_sends(
    transport: str,
    trainer: Mapping[int, tuple[int, ...]],
    engines: Sequence[tuple[int, ...]],
    *,
    on_accelerator: bool,
    most: int = MAX_SENDERS,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `senders` and `sources` of a route (roll/distributed/transports).

    On accelerators that both ends share, each rank of the trainer is the source of the engines that begin on its own.
    Elsewhere there are no sources: senders copy a part of the weights to the host each, by links of their own. Other
    transports than `shared_memory` have one sender.

    Args:
        transport: its name.
        trainer: rank -> its slots, of the ranks on the machine of rank 0 that have whole tensors; begins with rank 0.
        engines: slots of all engines.
        on_accelerator: whether the trainer's whole tensors are on accelerators.
        most: how many ranks may share the work.
    """
    if transport != "shared_memory":
        return (0,), ()
    owners = {slots[0]: rank for rank, slots in trainer.items() if len(slots) == 1}
    sources = tuple(owners[slots[0]] for slots in engines if slots[0] in owners)
    if on_accelerator and len(sources) == len(engines):
        return (0,), sources
    return tuple(trainer)[:: -(-len(trainer) // most)], ()
