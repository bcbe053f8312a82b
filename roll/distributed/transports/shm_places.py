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
    if not _is_plain(tensor):
        return None
    for token, ref in list(_regions.values()):
        memory = ref()
        if memory is None:
            continue
        start = tensor.data_ptr() - memory.ctypes.data
        if start >= 0 and start + tensor.nbytes <= memory.nbytes:
            return ShmRegion(token, start, start + tensor.nbytes == memory.nbytes)
    return None


def by_columns(tensor: Tensor) -> bool:
    """Return whether the numbers of a matrix lie one column after the other, as those of a transposed one do."""
    return tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether it is on the host and its bytes lie without gaps."""
    lies = tensor.is_contiguous() or by_columns(tensor)
    return tensor.device.type == "cpu" and lies and tensor.nbytes > 0


@torch.no_grad()
def share(tensors: Iterable[Tensor]) -> int:
    """Move tensors of the host into memory that other processes of the machine can open; returns the bytes moved.

    Each stays the object that it is and keeps its values, so optimizers and modules go on with it. What lies there
    already stays; so does what lies otherwise than by rows or, a matrix, by columns. The memory is freed when the last
    of the tensors is.
    """
    moved = [tensor for tensor in tensors if _is_plain(tensor) and locate(tensor) is None]
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
        target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        tensor.data = target.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
    return sum(tensor.nbytes for tensor in moved)


def _name(fd: int) -> str:
    """Return what no other memory of the machine has, as long as somebody holds this one."""
    status = os.fstat(fd)
    return f"{status.st_dev}-{status.st_ino}"
