"""Transports for the tests, by name; each test says what is unusual of its own."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from roll.configs.catalog.transport_table import TRANSPORTS, Lane
from roll.distributed.transports import Transfer, Transport
from roll.distributed.transports.rendezvous import RendezvousStore
from roll.utils.importing import load_object

STREAMING = ("broadcast", "shared_memory")
_COMMON = {field.name for field in fields(Transfer)}


def made(transport: str, store: RendezvousStore | None = None, *, receivers: int = 1, **changes: Any) -> Transport:
    """Return a transport to the engines 0, 1, ... from rank 0, unless there are `lanes` among the changes."""
    name = uuid.uuid4().hex
    settings = {"version": 3, "name": name, "bucket_bytes": 1000, "timeout": 30.0, "checksum": True}
    transfer = Transfer(**{**settings, **{key: changes[key] for key in changes.keys() & _COMMON}})
    plan = {
        "rendezvous": store and store.address,
        "lanes": (Lane((0,), tuple(range(receivers))),),
        "group": f"group-{name}",
        "folder": "",
        **{key: changes[key] for key in changes.keys() - _COMMON},
    }
    return load_object(TRANSPORTS[transport].path).build(transfer, SimpleNamespace(**plan))


def changed(transport: Transport, **changes: Any) -> Transport:
    """Return the same with another transfer."""
    return replace(transport, transfer=replace(transport.transfer, **changes))


def num_engines(transport: Transport) -> int:
    """Return how many engines a transport has in its lanes; 1 if it has none."""
    lanes: Sequence[Lane] = getattr(transport, "lanes", (Lane((0,), (0,)),))
    return sum(len(lane.engines) for lane in lanes)
