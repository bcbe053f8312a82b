"""Tensors side by side in flat buffers of bytes, and back; and the sender of what streams them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from roll.distributed.byte_account import count_copied
from roll.distributed.transports import NamedWeights
from roll.distributed.transports.rendezvous import TransferChannel
from roll.distributed.transports.shm_places import ShmRegion, by_columns
from roll.distributed.transports.shm_segments import Token

SLOTS = 2
"""Buffers of a sender."""
ALIGN = 64  # bytes; a multiple of every element's size, which a typed view needs

_FIRST = 2**20
_LARGEST = 16 * 2**20
"""Bytes of the first buffers, and of any on the host: fresh memory costs as much as several copies, so a small model
gets small buffers, and beyond the largest nothing is gained."""

Entry: TypeAlias = "list[Any]"
"""[name, dtype, shape, offset in bytes, whether a matrix lies by columns], as JSON has it."""


def buffer_size(index: int, bucket_bytes: int, device: torch.device) -> int:
    """Return the size of buffer `index`: a few small ones, then larger ones, never above `bucket_bytes`."""
    limit = min(bucket_bytes, _LARGEST) if device.type == "cpu" else bucket_bytes
    return min(limit, _FIRST << (2 * min(index // 2, 16)))


class Bucket:
    """Tensors side by side in one memory: copied into the buffer `flat`, or in shared memory where they lie already.

    Another rank's bucket has neither: only its size is counted, to know where the next one begins.
    """

    def __init__(self, capacity: int, flat: Tensor | None, token: Token | None) -> None:
        self._capacity = capacity
        self._flat = flat
        self.token = token
        """Of the shared memory; None: there is a buffer."""
        self.used = 0
        """Bytes from the memory's beginning to the end of the last tensor."""
        self.entries: list[Entry] = []

    @property
    def filled(self) -> Tensor:
        """Return the buffer as far as it is used, uint8."""
        assert self._flat is not None
        return self._flat[: self.used]

    def takes(self, tensor: Tensor, region: ShmRegion | None) -> bool:
        """Return whether this tensor can be the next one; `region`: where it lies in shared memory."""
        if region is not None:
            return self.token == region.token
        return self.token is None and self._free + tensor.nbytes <= self._capacity

    def add(self, name: str, tensor: Tensor, region: ShmRegion | None) -> None:
        """Take in a tensor that it `takes`, by a copy unless it lies in a region of shared memory."""
        start = self._free if region is None else region.start
        if self._flat is not None:
            entry = write_tensor(self._flat, name, tensor, start)
            if self._flat.device.type == "cpu":
                count_copied(tensor.nbytes)
        else:
            entry = entry_of(name, tensor, start)
        self.used = max(self.used, start + tensor.nbytes)
        self.entries.append(entry)

    @property
    def _free(self) -> int:
        """First byte for the next copy."""
        return -(-self.used // ALIGN) * ALIGN


def packed(
    stream: NamedWeights,
    take: Callable[[int, torch.device], tuple[int, Tensor | None]],
    shared_at: Callable[[Tensor], ShmRegion | None] = lambda _: None,
) -> Iterator[Bucket]:
    """Copy a stream into buckets, except for what lies in memory that the receivers can open (`shared_at`).

    `take(bytes, device)` gives what goes into the next bucket, which begins with a tensor of so many bytes, and its
    buffer; none for a bucket of another rank. No tensor of the stream is held longer than its copy takes.
    """
    bucket: Bucket | None = None
    for name, tensor in stream:
        region = shared_at(tensor)
        if bucket is not None and not bucket.takes(tensor, region):
            yield bucket
            bucket = None
        if bucket is None:
            capacity, flat = take(tensor.nbytes, tensor.device) if region is None else (0, None)
            bucket = Bucket(capacity, flat, None if region is None else region.token)
        bucket.add(name, tensor, region)
    if bucket is not None:
        yield bucket


def entry_of(name: str, tensor: Tensor, start: int) -> Entry:
    """Say what lies at `start` of a buffer, as the tensor itself lies."""
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start, by_columns(tensor)]


def write_tensor(flat: Tensor, name: str, tensor: Tensor, start: int) -> Entry:
    """Copy a tensor to `start` of a buffer, a matrix in the order in which it lies; return its entry."""
    entry = entry_of(name, tensor, start)
    _view(flat, entry).copy_(tensor.detach())
    return entry


def entry_bytes(entry: Entry) -> int:
    """Return the size of a tensor in a buffer."""
    _, type_name, shape, *_ = entry
    return int(torch.Size(shape).numel() * getattr(torch, type_name).itemsize)


def _view(flat: Tensor, entry: Entry) -> Tensor:
    _, type_name, shape, start, columns = entry
    numbers = flat[start : start + entry_bytes(entry)].view(getattr(torch, type_name))
    return numbers.view(shape[::-1]).t() if columns else numbers.view(shape)


def unpacked(flat: Tensor, entries: Sequence[Entry]) -> NamedWeights:
    """Yield the tensors of a bucket, as views of its buffer."""
    for entry in entries:
        yield entry[0], _view(flat, entry)


class Outbox(ABC):
    """A sender with two buffers: one is filled while the receivers have the other.

    Of several senders each has the whole stream and sends every nth bucket of it. How much goes into a bucket follows
    from the sizes of the tensors alone, so all agree on what is in each. The first sends all tensors that are larger
    than a bucket: the others' buffers don't grow.

    They can't wait for each other in a circle. Receivers read in order, and hold one bucket at most while they wait for
    the next, i. A sender waits for the last but one of its own buckets alone, so every sender gets to where i begins.

    Args:
        channel: to the receivers.
        bucket_bytes: most that goes into a bucket, unless a tensor is larger.
        senders: how many there are.
        mine: the place of this one among them.
    """

    def __init__(self, channel: TransferChannel, bucket_bytes: int, *, senders: int = 1, mine: int = 0) -> None:
        self.channel = channel
        self._bucket_bytes = bucket_bytes
        self._senders = senders
        self._mine = mine

    def send(self, stream: NamedWeights) -> None:
        """Send everything, or this sender's share; returns when every receiver has read it."""
        index = owner = 0  # of the bucket that is being filled: its number, and whose it is
        mine: list[int] = []  # numbers of this sender's buckets
        freed = 0  # how many of them have come back

        def free_up_to(count: int) -> None:
            nonlocal freed
            while freed < count:
                self.free(mine[freed], freed % SLOTS)
                freed += 1

        def take(size: int, device: torch.device) -> tuple[int, Tensor | None]:
            nonlocal owner
            owner = index % self._senders if size <= self._bucket_bytes else 0
            step = index // self._senders
            capacity = max(size, buffer_size(step, self._bucket_bytes, self.buffer_device(device)))
            if owner != self._mine:
                return capacity, None
            free_up_to(len(mine) - SLOTS + 1)
            flat = self.buffer(len(mine) % SLOTS, capacity, device)
            return (len(flat) if self._senders == 1 else capacity), flat

        for bucket in packed(stream, take, self.shared_at if self._senders == 1 else lambda _: None):
            if owner == self._mine:
                self.ship(index, len(mine) % SLOTS, bucket)
                mine.append(index)
            index += 1
        if self._mine == 0:
            self.channel.publish(f"bucket/{index}", None)
        free_up_to(len(mine))

    def shared_at(self, tensor: Tensor) -> ShmRegion | None:
        """Return where every receiver finds this tensor without a copy. Default: nowhere."""
        del tensor
        return None

    @abstractmethod
    def buffer_device(self, device: torch.device) -> torch.device:
        """Return where buffers for tensors of this device are."""

    @abstractmethod
    def buffer(self, slot: int, size: int, device: torch.device) -> Tensor:
        """Return the buffer in this slot, of at least this size, for tensors on this device."""

    @abstractmethod
    def ship(self, index: int, slot: int, bucket: Bucket) -> None:
        """Begin to send a bucket, which is in this slot, and publish what it holds."""

    @abstractmethod
    def free(self, index: int, slot: int) -> None:
        """Wait until no receiver needs the bucket."""
