"""Weights from an engine's owner to the engine's worker processes on the same machine, through shared memory.

What lies in shared memory already (`weight_transport: shared_memory`) the workers read where it is. The rest is copied
into one bucket first, in memory without a name (`memfd`): it is gone with the processes, however they end. What lies on
an accelerator is copied into a bucket there, which workers open by CUDA's inter-process handles (never run on a GPU);
where they can't, it goes through memory of the host. The owner always waits for the answer of the workers before the
memory is written again.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from roll.configs.catalog.transport_table import MAX_SENDERS
from roll.distributed.byte_account import count_copied
from roll.distributed.transports.bucket_layout import ALIGN, SLOTS, Entry, entry_of, unpacked, write_tensor
from roll.distributed.transports.shm_places import ShmRegion, locate
from roll.distributed.transports.shm_segments import DeviceSegment, attach
from roll.distributed.weights import tensor_of

logger = logging.getLogger(__name__)

Opens: TypeAlias = Callable[[str], Awaitable[bool]]
"""Asks an engine whether all its workers can `open_device` this path."""


class WeightBatch(NamedTuple):
    """What the workers are to read next."""

    path: str
    """Of the memory; on an accelerator its handle, as JSON."""
    entries: list[Entry]
    """What lies where in it."""
    stays: bool
    """Whether nobody writes there before the whole update is over."""


_MAPS = SLOTS * MAX_SENDERS + 1  # memory that a reader keeps open: what senders fill in turn, and the owner's bucket
_DEVICE_MAPS = SLOTS + 1  # the same on an accelerator, where one rank sends, and what is closed can be opened again


class SharedBucket:
    """Tells the workers where tensors are; has memory of `size` bytes, or of a larger tensor, from when it needs it.

    Args:
        opens: asked before the first tensor on an accelerator. None, or False as its answer: such tensors go through
            memory of the host.
    """

    def __init__(self, size: int, opens: Opens | None = None) -> None:
        self._size = size
        self._opens = opens
        self._on_device: bool | None = None if opens is not None else False  # None: not asked yet
        self._device = torch.device("cpu")  # of the bucket
        self._fds: list[int] = []
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._own_path = ""
        self._clear()

    def _clear(self) -> None:
        self._path = ""
        self._stays = False
        self._entries: list[Entry] = []
        self._used = 0
        self._held: list[Tensor] = []  # tensors that lie elsewhere: while they live, nobody writes there

    async def fill(self, weights: AsyncIterator[tuple[str, Tensor]]) -> AsyncIterator[WeightBatch]:
        """Yield what the workers are to read next: whenever a bucket is full or complete, and at the end.

        After each yield the memory may be written again, unless it `stays`.
        """
        async for name, tensor in weights:
            location = locate(tensor)
            if tensor.is_cuda and self._on_device is None:
                if self._entries:
                    yield self._batch()
                    self._clear()
                await self._try_device(tensor.device)
            if self._entries and not self._takes(tensor, location):
                yield self._batch()
                self._clear()
            self._add(name, tensor, location)
            if location is not None and location.is_last:
                yield self._batch()
                self._clear()
            del tensor  # it would keep the trainer's bucket in use while the next one is waited for
        if self._entries:
            yield self._batch()
            self._clear()

    async def _try_device(self, device: torch.device) -> None:
        """Make a bucket there, and find out whether workers can open it: containers and drivers differ."""
        assert self._opens is not None
        self._on_device = True
        self._grow(max(self._size, len(_MARK)), device)
        if not self._on_device:
            return
        self._flat[: len(_MARK)].copy_(torch.tensor(list(_MARK), dtype=torch.uint8))
        settle(device)
        if not await self._opens(self._own_path):
            logger.warning("weights go to the engine through host memory: its workers can't open memory of %s", device)
            self._on_device, self._device = False, torch.device("cpu")
            self._flat, self._own_path = torch.empty(0, dtype=torch.uint8), ""

    def _wanted(self, tensor: Tensor) -> torch.device:
        """Return where the bucket for this tensor is to be."""
        return tensor.device if tensor.is_cuda and self._on_device else torch.device("cpu")

    def _batch(self) -> WeightBatch:
        settle(self._device)
        return WeightBatch(self._path, self._entries, self._stays)

    def _takes(self, tensor: Tensor, location: ShmRegion | None) -> bool:
        if location is not None:
            return self._path == location.path
        fits = self._device == self._wanted(tensor) and self._used + tensor.nbytes <= len(self._flat)
        return self._path == self._own_path and fits

    def _add(self, name: str, tensor: Tensor, location: ShmRegion | None) -> None:
        if location is not None:
            self._path, self._stays = location.path, location.stays
            self._held.append(tensor)
            entry = entry_of(name, tensor, location.start)
        else:
            if len(self._flat) < max(self._size, tensor.nbytes) or self._device != self._wanted(tensor):
                self._grow(max(self._size, tensor.nbytes), self._wanted(tensor))
            self._path, start = self._own_path, self._used
            entry = write_tensor(self._flat, name, tensor, start)
            if self._device.type == "cpu":
                count_copied(tensor.nbytes)
            self._used = -(-(start + tensor.nbytes) // ALIGN) * ALIGN
        self._entries.append(entry)

    def _grow(self, size: int, device: torch.device) -> None:
        self._device = device
        if device.type != "cpu":
            self._flat = self._flat.new_empty(0)  # given back before there is a larger one
            try:
                segment = DeviceSegment(size, device)
            except RuntimeError as error:  # it can't be shared, or has no room
                logger.warning("weights go to the engine through host memory: %s has no bucket: %s", device, error)
                self._on_device = False
                self._grow(size, torch.device("cpu"))
                return
            self._flat, self._own_path = segment.flat, json.dumps(segment.token)
            return
        if self._fds:
            os.ftruncate(self._fds[-1], 0)  # given back, but not its path, which readers know
        fd = os.memfd_create("weights")
        self._fds.append(fd)
        # Reserved now: memory that turns out to be missing later would end the process without a message.
        os.posix_fallocate(fd, 0, size)
        self._flat = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        self._own_path = f"/proc/{os.getpid()}/fd/{fd}"

    def close(self) -> None:
        """Give the memory back."""
        self._clear()
        self._flat, self._own_path = self._flat.new_empty(0), ""
        while self._fds:
            os.close(self._fds.pop())


_MARK = b"roll can read this"


def open_device(path: str) -> bool:
    """Return whether this process, a worker's, can read memory of an accelerator that another process shares."""
    try:
        marker = _memory(path)[: len(_MARK)].tolist()
    except (RuntimeError, OSError) as error:  # of the driver
        logger.warning("memory of an accelerator can't be opened: %s", error)
        return False
    return bytes(marker) == _MARK


def on_device(path: str) -> bool:
    """Return whether a batch's path is memory of an accelerator."""
    return path.startswith("{")


def settle(device: torch.device) -> None:
    """Wait until copies to and from memory there are done, for this process's stream and thus for other processes."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


_lasting: dict[tuple[int, int], Tensor] = {}
"""Memory that stays, read last: device and inode -> all of it. To map a whole model costs as much as a copy."""


class BucketReader:
    """A worker's side: tensors out of shared memory. Lives for one update, whose paths never change their meaning."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, Tensor] = OrderedDict()

    def read(self, path: str, entries: Sequence[Entry], *, stays: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors, which lie in the shared memory: copy them before the next bucket is asked for.

        Where it `stays`, before the update is over. It can't be written to.
        """
        # Kept open: the trainer takes the name of a segment away once everybody has had it, and uses it on.
        if path not in self._maps:
            self._maps[path] = _lasting_memory(path) if stays else _memory(path)
        self._maps.move_to_end(path)
        if len(self._maps) > (_DEVICE_MAPS if on_device(path) else _MAPS):
            self._maps.popitem(last=False)
        return unpacked(self._maps[path], entries)


def _memory(path: str) -> Tensor:
    memory = attach(json.loads(path) if on_device(path) else {"path": path, "size": 0})
    return memory if isinstance(memory, Tensor) else tensor_of(memory)


def _lasting_memory(path: str) -> Tensor:
    status = os.stat(path)
    key = status.st_dev, status.st_ino  # a path comes again with another meaning, an inode that is open doesn't
    if key not in _lasting:
        _lasting.clear()
        _lasting[key] = _memory(path)
    return _lasting[key]
