"""Tensors side by side in flat buffers of bytes, and back; and the sender of what streams them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from roll.distributed.byte_account import count_copied
from roll.distributed.transports import NamedWeights, Route
from roll.distributed.transports.rendezvous import TransferChannel

SLOTS = 2
"""Buffers of a sender."""
ALIGN = 64  # bytes; a multiple of every element's size, which a typed view needs

_FIRST = 2**20
_LARGEST = 16 * 2**20
"""Bytes of the first buffers, and of any on the host: fresh memory costs as much as several copies, so a small model
gets small buffers, and beyond the largest nothing is gained."""

Entry: TypeAlias = "list[Any]"
"""[name, dtype, shape, offset in bytes], as JSON has it."""


def buffer_size(index: int, bucket_bytes: int, device: torch.device) -> int:
    """Return the size of buffer `index`: a few small ones, then larger ones, never above `bucket_bytes`."""
    limit = min(bucket_bytes, _LARGEST) if device.type == "cpu" else bucket_bytes
    return min(limit, _FIRST << (2 * min(index // 2, 16)))


def packed(
    stream: NamedWeights, take: Callable[[int, torch.device], Tensor]
) -> Iterator[tuple[Tensor, int, list[Entry]]]:
    """Copy a stream into buckets: (flat uint8 buffer, bytes used, what lies where).

    `take(bytes, device)` gives the buffer for the next bucket, which begins with a tensor of so many bytes; it is
    filled as far as it goes. No tensor of the stream is held longer than its copy takes.
    """
    flat: Tensor | None = None
    entries: list[Entry] = []
    used = 0
    for name, tensor in stream:
        start = -(-used // ALIGN) * ALIGN
        if flat is not None and start + tensor.nbytes > flat.numel():
            yield flat, used, entries
            flat = None
        if flat is None:
            flat, entries, start = take(tensor.nbytes, tensor.device), [], 0
        used = start + tensor.nbytes
        flat[start:used].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        if flat.device.type == "cpu":
            count_copied(tensor.nbytes)
        entries.append(entry_of(name, tensor, start))
    if flat is not None:
        yield flat, used, entries


def entry_of(name: str, tensor: Tensor, start: int) -> Entry:
    """Say what lies at `start` of a buffer."""
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start]


def entry_bytes(entry: Entry) -> int:
    """Return the size of a tensor in a buffer."""
    _, type_name, shape, _ = entry
    return int(torch.Size(shape).numel() * getattr(torch, type_name).itemsize)


def unpacked(flat: Tensor, entries: Sequence[Entry]) -> NamedWeights:
    """Return the tensors of a bucket, as views of its buffer."""
    for entry in entries:
        name, type_name, shape, start = entry
        yield name, flat[start : start + entry_bytes(entry)].view(getattr(torch, type_name)).view(shape)


class Outbox(ABC):
    """A sender with two buffers: one is filled while the receivers have the other."""

    def __init__(self, route: Route, channel: TransferChannel) -> None:
        self.route = route
        self.channel = channel
        self._index = -1

    def send(self, stream: NamedWeights) -> None:
        """Send everything; returns when every receiver has read it."""
        for flat, used, entries in packed(stream, self._take):
            self.ship(self._index, flat[:used], entries)
        self.channel.publish(f"bucket/{self._index + 1}", None)
        for index in range(max(0, self._index + 1 - SLOTS), self._index + 1):
            self.free(index)

    def _take(self, size: int, device: torch.device) -> Tensor:
        self._index += 1
        if self._index >= SLOTS:
            self.free(self._index - SLOTS)
        return self.buffer(self._index, size, device)

    @abstractmethod
    def buffer(self, index: int, size: int, device: torch.device) -> Tensor:
        """Return a buffer for bucket `index`, which begins with a tensor of so many bytes on this device."""

    @abstractmethod
    def ship(self, index: int, filled: Tensor, entries: list[Entry]) -> None:
        """Begin to send a bucket, and publish what it holds."""

    @abstractmethod
    def free(self, index: int) -> None:
        """Wait until no receiver needs the bucket."""
