"""Where tensors lie in memory that other processes of the machine can open, and how to bring them there.

A trainer on the host that holds the whole model keeps its weights in such memory (`share`), so that `shared_memory`
sends them as they lie: the engines read them where the trainer trains them. It waits for the engines meanwhile, so
nobody sees a weight that is half updated.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roll.distributed.transports.shm_segments import Bytes, Token

_ALIGN = 64  # bytes, as torch's own allocator aligns tensors


@dataclass(frozen=True, slots=True)
class ShmRegion:
    """Where a tensor lies in shared memory of the host."""

    token: Token
    """What other processes open the memory by."""
    start: int
    """The tensor's first byte."""
    is_last: bool
    """Whether the memory ends with it."""

    @property
    def path(self) -> str:
        """Path of the memory for other processes."""
        return str(self.token["path"])

    @property
    def stays(self) -> bool:
        """Return whether nobody writes there before the whole transfer is over."""
        return "stays" in self.token


_regions: dict[int, tuple[Token, weakref.ref[Bytes]]] = {}
"""Memory in which tensors of this process lie: those of `share`, and the buckets that are read at the moment."""


def register(token: Token, memory: Bytes) -> None:
    """Let `locate` find the tensors in `memory` for as long as one of them lives."""
    key = id(memory)
    _regions[key] = token, weakref.ref(memory, lambda _: _regions.pop(key, None))


def locate(tensor: Tensor) -> ShmRegion | None:
    """Return where other processes of the machine find this tensor; None if it lies in no registered memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.nbytes:
        return None
    for token, ref in list(_regions.values()):
        memory = ref()
        if memory is None:
            continue
        start = tensor.data_ptr() - memory.ctypes.data
        if start >= 0 and start + tensor.nbytes <= memory.nbytes:
            return ShmRegion(token, start, start + tensor.nbytes == memory.nbytes)
    return None


@torch.no_grad()
def share(tensors: Iterable[Tensor]) -> int:
    """Move tensors of the host into memory that other processes of the machine can open; returns the bytes moved.

    Each stays the object that it is and keeps its values, so optimizers and modules go on with it. What lies there
    already stays; so does what isn't contiguous. The memory is freed when the last of the tensors is.
    """
    moved = [t for t in tensors if t.device.type == "cpu" and t.is_contiguous() and t.nbytes and locate(t) is None]
    starts, size = [], 0
    for tensor in moved:
        starts.append(size)
        size = -(-(size + tensor.nbytes) // _ALIGN) * _ALIGN
    if not moved:
        return 0
    fd = os.memfd_create("weights")
    # Not reserved at once: page by page it takes over what each tensor gives back, and never holds the model twice.
    os.ftruncate(fd, size)
    memory = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    weakref.finalize(memory, os.close, fd)
    register({"path": f"/proc/{os.getpid()}/fd/{fd}", "size": size, "name": _name(fd), "stays": True}, memory)
    for tensor, start in zip(moved, starts, strict=True):
        # A storage of its own for each: what looks at storages (checkpoints, sizes) finds them apart.
        target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        tensor.data = target.copy_(tensor)
    return sum(tensor.nbytes for tensor in moved)


def _name(fd: int) -> str:
    """Return what no other memory of the machine has, as long as somebody holds this one."""
    status = os.fstat(fd)
    return f"{status.st_dev}-{status.st_ino}"
