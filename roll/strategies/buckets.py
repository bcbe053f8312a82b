"""Weights from an engine's owner to the engine's worker processes on the same machine, through shared memory.

What lies in shared memory already (`weight_transport: shared_memory`) the workers read where it is. The rest is written
into one bucket of bounded size first, in memory without a name (`memfd`): it is gone with the processes, however they
end. In both cases the owner waits for the workers' answer before the memory is written again.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from roll.distributed.transports.bucket_layout import tensor_of
from roll.distributed.transports.shm_segments import attach, locate

Piece: TypeAlias = list[Any]
"""[name, dtype's name, shape, first byte inside the tensor, first byte inside the memory, number of bytes]: a tensor or
a part of one. A list, because it travels as a message."""

Batch: TypeAlias = tuple[str, list[Piece]]
"""Path of the memory, and what is in it."""

_ALIGN = 64  # bytes; a multiple of every element's size, which a typed view needs
_MAPS = 3  # memory that a reader keeps open: the two segments that the trainer fills in turn, and the owner's bucket


class SharedBucket:
    """Tells the workers where tensors are; has shared memory of `size` bytes from when it is needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._fd = -1
        self._reset("")

    def _own_path(self) -> str:
        if self._fd < 0:
            self._fd = os.memfd_create("weights")
            # Reserved now: memory that turns out to be missing later would end the process without a message.
            os.posix_fallocate(self._fd, 0, self.size)
            self._map = mmap.mmap(self._fd, self.size)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def _reset(self, path: str) -> None:
        self._path = path
        self._pieces: list[Piece] = []
        self._used = 0
        self._held: list[Tensor] = []  # tensors that lie elsewhere: while they live, nobody writes there

    async def fill(self, weights: AsyncIterator[tuple[str, Tensor]]) -> AsyncIterator[Batch]:
        """Yield what the workers are to read next: whenever a bucket is full or complete, and at the end.

        After each yield the memory may be written again.
        """
        async for name, tensor in weights:
            for batch in self._add(name, tensor):
                yield batch
            del tensor  # it would keep the trainer's bucket in use while the next one is waited for
        if self._pieces:
            yield self._path, self._pieces
            self._reset("")

    def _add(self, name: str, tensor: Tensor) -> Iterator[Batch]:
        place = locate(tensor)
        path = self._own_path() if place is None else place.path
        if path != self._path:
            if self._pieces:
                yield self._path, self._pieces
            self._reset(path)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if place is None:
            yield from self._copy(name, dtype, shape, tensor)
            return
        self._pieces.append([name, dtype, shape, 0, place.start, tensor.nbytes])
        self._held.append(tensor)
        if place.is_last:
            yield path, self._pieces
            self._reset("")

    def _copy(self, name: str, dtype: str, shape: list[int], tensor: Tensor) -> Iterator[Batch]:
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        self._used = -(-self._used // _ALIGN) * _ALIGN
        done = 0
        while done < len(data) or not len(data):
            if self._used >= self.size:
                yield self._path, self._pieces
                self._reset(self._path)
            count = min(len(data) - done, self.size - self._used)
            self._bytes[self._used : self._used + count] = data[done : done + count]
            self._pieces.append([name, dtype, shape, done, self._used, count])
            done, self._used = done + count, self._used + count
            if not len(data):
                break

    def close(self) -> None:
        """Give the memory back."""
        self._reset("")
        if self._fd >= 0:
            self._bytes = self._map = None  # type: ignore[assignment]
            os.close(self._fd)
            self._fd = -1


class BucketReader:
    """A worker's side: tensors out of shared memory. Lives for one update, whose paths never change their meaning."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, Tensor] = OrderedDict()
        self._name = ""
        self._begun: Tensor | None = None  # a tensor that spans several buckets, filled up to `_bytes_done`
        self._bytes_done = 0

    def read(self, path: str, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are complete with these pieces.

        They may lie in the shared memory: copy them before the next bucket is asked for, and never write to them.
        """
        memory = self._open(path)
        for name, dtype, shape, done, start, count in pieces:
            kind = getattr(torch, dtype)
            part = memory[start : start + count]
            if done == 0 and self._begun is not None:
                raise RuntimeError(f"weight {self._name!r} is incomplete where {name!r} begins")
            if done == 0 and count == torch.Size(shape).numel() * kind.itemsize:
                yield name, part.view(kind).view(shape)
                continue
            if done == 0:
                self._begun, self._name, self._bytes_done = torch.empty(shape, dtype=kind), name, 0
            if self._begun is None or name != self._name or done != self._bytes_done:
                raise RuntimeError(f"a part of weight {name!r} came without the part before it")
            self._begun.reshape(-1).view(torch.uint8)[done : done + count] = part
            self._bytes_done = done + count
            if self._bytes_done == self._begun.nbytes:
                tensor, self._begun = self._begun, None
                yield name, tensor

    def _open(self, path: str) -> Tensor:
        # Kept open: the trainer takes the name of a segment away once everybody has had it, and uses it on.
        if path not in self._maps:
            self._maps[path] = tensor_of(attach({"path": path, "size": 0}))
        self._maps.move_to_end(path)
        if len(self._maps) > _MAPS:
            self._maps.popitem(last=False)
        return self._maps[path]

    def finish(self) -> None:
        """Let go of the memory; raises if a tensor is incomplete."""
        self._maps.clear()
        if self._begun is not None:
            raise RuntimeError(f"weight {self._name!r} is incomplete at the end of the update")
