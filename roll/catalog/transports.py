"""Ways of weights from the trainer to the engines: values of `weight_transport`, and what `auto` may choose."""

from __future__ import annotations

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
