"""Weights from one process to several on the same machine, through a piece of shared memory of bounded size.

One process writes a bucket and tells the others what is in it; they copy it out and answer; it writes the next one.
The memory has no name (`memfd`): it is gone with the processes, however they end, and no small `/dev/shm` limits it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Piece = list[Any]
"""[name, dtype's name, shape, first byte inside the tensor, first byte inside the bucket, number of bytes]: a tensor or
a part of one. A list, because it travels as a message."""


class SharedBucket:
    """Shared memory of `size` bytes, and what writes tensors into it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._fd = os.memfd_create("weights")
        try:
            # Reserved now: memory that turns out to be missing later would end the process without a message.
            os.posix_fallocate(self._fd, 0, size)
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """Where other processes of this machine and user open it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    async def fill(self, weights: AsyncIterator[tuple[str, Tensor]]) -> AsyncIterator[list[Piece]]:
        """Write tensors one after the other; yields what the bucket holds whenever it is full, and at the end.

        After each yield the memory is overwritten.
        """
        pieces: list[Piece] = []
        used = 0
        async for name, tensor in weights:
            data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            done = 0
            while done < len(data) or not len(data):
                if used == self.size:
                    yield pieces
                    pieces, used = [], 0
                count = min(len(data) - done, self.size - used)
                self._bytes[used : used + count] = data[done : done + count]
                dtype = str(tensor.dtype).removeprefix("torch.")
                pieces.append([name, dtype, list(tensor.shape), done, used, count])
                done, used = done + count, used + count
                if not len(data):
                    break
        if pieces:
            yield pieces

    def close(self) -> None:
        """Give the memory back."""
        if self._fd >= 0:
            del self._bytes
            self._map.close()
            os.close(self._fd)
            self._fd = -1


class BucketReader:
    """The other side: tensors out of buckets. Remembers the beginning of a tensor that spans two of them."""

    def __init__(self) -> None:
        self._name = ""
        self._begun: Tensor | None = None
        self._bytes_done = 0

    def read(self, path: str, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are complete with this bucket, as copies."""
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            for name, dtype, shape, done, start, count in pieces:
                if done == 0:
                    self._begun, self._name = torch.empty(shape, dtype=getattr(torch, dtype)), name
                if self._begun is None or name != self._name or done != self._bytes_done * (done > 0):
                    raise RuntimeError(f"a part of weight {name!r} came without the part before it")
                if count:
                    with memoryview(memory)[start : start + count] as view:
                        flat = self._begun.reshape(-1).view(torch.uint8)
                        flat[done : done + count] = torch.frombuffer(bytearray(view), dtype=torch.uint8)
                self._bytes_done = done + count
                if self._bytes_done == self._begun.nbytes:
                    tensor, self._begun = self._begun, None
                    yield name, tensor

    def finish(self) -> None:
        """Raise if a tensor is incomplete."""
        if self._begun is not None:
            raise RuntimeError(f"weight {self._name!r} is incomplete at the end of the update")
