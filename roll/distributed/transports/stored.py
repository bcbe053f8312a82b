"""`in_process` and `object_store`: buckets behind handles, read after all of them were written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from roll.distributed.handles import Handle
from roll.distributed.transports import NamedWeights, Transport, Weights
from roll.distributed.weights import BucketWriter, WeightMismatch, receive_weights


class ObjectStoreTransport(Transport):
    """Buckets in Ray's object store; in one process handles lead to copies."""

    name: ClassVar[str] = "object_store"

    def send(self, stream: NamedWeights, rank: int) -> list[Handle]:
        del rank
        writer = BucketWriter(self.transfer.bucket_bytes, self.transfer.version)
        for name, tensor in stream:
            writer.add(name, tensor)
        return writer.finish()

    def receive(self, handles: Sequence[Handle], rank: int) -> NamedWeights:
        del rank
        yield from receive_weights(handles, self.transfer.version, timeout=self.transfer.timeout)


@dataclass(frozen=True, slots=True)
class _WeightsRef:
    """The trainer's own weights, as they are when somebody reads them: until its next step, in this process alone."""

    version: int
    begin: Weights


class InProcessTransport(ObjectStoreTransport):
    """Engines read the trainer's own weights, where both are in one process; a version that is kept is a copy."""

    name: ClassVar[str] = "in_process"

    def hand_to_engine(self, weights: Weights) -> list[Handle] | None:
        return None if self.transfer.keep else [_WeightsRef(self.transfer.version, weights)]

    def receive(self, handles: Sequence[Handle], rank: int) -> NamedWeights:
        if len(handles) != 1 or not isinstance(handles[0], _WeightsRef):
            yield from super().receive(handles, rank)
            return
        ref = handles[0]
        if ref.version != self.transfer.version:
            message = f"expected weights of version {self.transfer.version}, the trainer's are {ref.version}"
            raise WeightMismatch(message)
        yield from ref.begin()
