"""What a weight transport has to say, and what works on its stream without its help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest
import torch
from transfers import made

from roll.configs.catalog.transport_table import TRANSPORTS
from roll.distributed.handles import Handle
from roll.distributed.transports import NamedWeights, Transfer, Transport, receive, send
from roll.distributed.transports.delta import Delta, WeightCopy
from roll.distributed.transports.rendezvous import RendezvousStore
from roll.distributed.weights import weights_checksum
from roll.pipelines.rl.sync_plan import SyncPlan

OWN_FIELDS = {
    "in_process": set(),
    "object_store": set(),
    "file": {"folder"},
    "shared_memory": {"rendezvous", "lanes"},
    "broadcast": {"rendezvous", "lanes", "group"},
}


@dataclass(frozen=True)
class ShelfTransport(Transport):
    """Puts a version on a shelf of this process: all that a transport has to say is `send` and `receive`."""

    name: ClassVar[str] = "shelf"

    shelf: list[list[tuple[str, torch.Tensor]]]

    def send(self, stream: NamedWeights, rank: int) -> list[Handle]:
        self.shelf.append([(name, tensor.clone()) for name, tensor in stream])
        return [len(self.shelf) - 1]

    def receive(self, handles: Sequence[Handle], rank: int) -> NamedWeights:
        yield from self.shelf[handles[0]]


def shelved(version: int, shelf: list[Any], **keys: Any) -> ShelfTransport:
    transfer = Transfer(version=version, name=f"t{version}", bucket_bytes=1000, checksum=True, **keys)
    return ShelfTransport(transfer, shelf)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_class_has_the_fields_that_it_alone_needs_and_they_are_in_the_plan_of_a_sync(name: str) -> None:
    transport = made(name, RendezvousStore("127.0.0.1"))
    assert transport.name == name
    own = {field.name for field in fields(transport)} - {"transfer"}
    assert own == OWN_FIELDS[name]
    assert own <= {field.name for field in fields(SyncPlan)} | {"rendezvous"}
    assert len(fields(Transfer)) == 8


def test_what_passes_is_counted_hashed_and_kept_whatever_the_transport() -> None:
    weights = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    transport = shelved(4, [], keep=True)
    sent = send(transport, lambda: iter(weights.items()))
    with receive(transport, sent.handles, 0) as incoming:
        got = [(name, tensor.clone()) for name, tensor in incoming]
    assert incoming.summary() == sent.summary
    assert (sent.summary.tensors, sent.summary.bytes) == (2, 48)  # (6 + 6) numbers of 4 bytes
    assert sent.summary.checksum == weights_checksum(got) == weights_checksum(weights.items())
    assert sent.retained == sent.handles == [0], "what is stored is what is kept"


def test_changes_alone_travel_by_any_transport_and_what_is_kept_is_whole() -> None:
    weights, shelf = {"a": torch.zeros(100), "b": torch.zeros(100)}, []
    copies = WeightCopy(), WeightCopy()
    for version, base in ((1, ""), (2, "v1")):
        weights["b"][:] = torch.cat([torch.full((3,), float(version)), torch.zeros(97)])
        transport, delta = shelved(version, shelf, keep=True), Delta(f"v{version}", base)
        sent = send(transport, lambda: iter(weights.items()), delta=delta, copy=copies[0])
        with receive(transport, sent.handles, 0, delta=delta, copy=copies[1]) as incoming:
            got = [(name, tensor.clone()) for name, tensor in incoming]
        assert weights_checksum(got) == weights_checksum(weights.items())
    assert [name for name, _ in shelf[1]] == ["b@index", "b@values"]
    assert incoming.summary().moved == 3 * (4 + 4)  # positions of 4 bytes and numbers of 4
    with receive(made("object_store", version=2), sent.retained, 0) as incoming:
        assert weights_checksum(incoming) == weights_checksum(weights.items())


def test_a_rank_that_sends_nothing_goes_through_the_stream_for_the_others() -> None:
    gathered: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b", "c"):
            gathered.append(name)
            yield name, torch.zeros(1)

    shelf: list[Any] = []
    sent = send(shelved(1, shelf), weights, rank=1)
    assert (sent.handles, sent.summary, sent.retained, shelf) == ([], None, [], [])
    assert gathered == ["a", "b", "c"]
