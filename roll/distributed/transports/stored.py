"""`in_process` and `object_store`: buckets behind handles, read after all of them were written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from roll.distributed.handles import Handle
from roll.distributed.transports import NamedWeights, Route, Weights
from roll.distributed.weights import BucketWriter, WeightMismatch, receive_weights


@dataclass(frozen=True, slots=True)
class _WeightsRef:
    """The trainer's own weights, as they are when somebody reads them."""

    version: int
    begin: Weights


def hand_to_engine(route: Route, weights: Weights) -> list[Handle]:
    """Return a handle to the trainer's weights themselves: valid until its next step, and in this process alone."""
    return [_WeightsRef(route.version, weights)]


def send(route: Route, stream: NamedWeights) -> list[Handle]:
    """Return handles of buckets; in one process they lead to copies."""
    writer = BucketWriter(route.bucket_bytes, route.version)
    for name, tensor in stream:
        writer.add(name, tensor)
    return writer.finish()


def receive(route: Route, handles: Sequence[Handle], rank: int) -> Iterator[tuple[str, Tensor]]:
    """See `roll.distributed.transports.receive`."""
    del rank
    if len(handles) == 1 and isinstance(handles[0], _WeightsRef):
        ref = handles[0]
        if ref.version != route.version:
            raise WeightMismatch(f"expected weights of version {route.version}, the trainer's are {ref.version}")
        yield from ref.begin()
        return
    yield from receive_weights(handles, route.version, timeout=route.timeout)
