"""Ways of weights from the trainer to the engines: values of `weight_transport`, and who sends to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.configs.catalog.entries import Entry


@dataclass(frozen=True, kw_only=True)
class TransportEntry(Entry):
    """`path` is a class, a `Transport` of roll/distributed/transports."""

    configurable: bool = True
    """A configuration may choose it; else only `auto` does."""


TRANSPORTS: dict[str, TransportEntry] = {
    "in_process": TransportEntry(path="roll.distributed.transports.stored:InProcessTransport", configurable=False),
    "object_store": TransportEntry(path="roll.distributed.transports.stored:ObjectStoreTransport"),
    "file": TransportEntry(path="roll.distributed.transports.file_transport:FileTransport"),
    "shared_memory": TransportEntry(path="roll.distributed.transports.shared:SharedMemoryTransport"),
    "broadcast": TransportEntry(path="roll.distributed.transports.broadcast:BroadcastTransport"),
}

MAX_SENDERS = 8
"""Ranks of the trainer that send a share each; an engine keeps the buffers of all of them open."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Ranks of the trainer, and the engines that get everything from them."""

    senders: tuple[int, ...]
    """They send in turn, a bucket each."""
    engines: tuple[int, ...]
    on_device: bool = False
    """Whether they share an accelerator: `shared_memory` then stays on it."""


def lanes_between(
    transport: str,
    trainer: Mapping[int, tuple[int, ...]],
    engines: Sequence[tuple[int, ...]],
    *,
    on_accelerator: bool,
    most: int = MAX_SENDERS,
) -> tuple[Lane, ...]:
    """Return who sends to whom.

    On accelerators that both ends share, each rank of the trainer sends everything to the engines that begin on its
    own. Elsewhere all engines are in one lane: senders copy a part of the weights to the host each, by links of their
    own. Other transports than `shared_memory` have one sender.

    Args:
        transport: its name.
        trainer: rank -> its slots, of the ranks on the machine of rank 0 that have whole tensors; begins with rank 0.
        engines: slots of all engines.
        on_accelerator: whether the trainer's whole tensors are on accelerators.
        most: how many ranks may share the work.
    """
    everyone = tuple(range(len(engines)))
    if transport != "shared_memory":
        return (Lane((0,), everyone),)
    owners = {slots[0]: rank for rank, slots in trainer.items() if len(slots) == 1}
    sources = [owners.get(slots[0]) for slots in engines]
    if on_accelerator and None not in sources:
        return tuple(
            Lane((source,), tuple(engine for engine in everyone if sources[engine] == source), on_device=True)
            for source in dict.fromkeys(sources)
            if source is not None
        )
    return (Lane(tuple(trainer)[:: -(-len(trainer) // most)], everyone),)
