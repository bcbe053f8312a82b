"""Stand-ins for an accelerator and its shared memory, which are memory of the host."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from roll.distributed.transports.shm_segments import ShmSegment
from roll.strategies.engines import buckets

CUDA = torch.device("cuda", 0)


class OnDevice(torch.Tensor):
    """A tensor of the host that says it is on an accelerator."""

    is_cuda = True
    device = CUDA

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


class Segment(ShmSegment):
    """Memory of the device."""

    def __init__(self, size, device):
        assert device == CUDA
        super().__init__("stand-in", size)


def install(monkeypatch):
    """Put the stand-ins in place; the list of events that they will write to."""
    found = []
    stream = SimpleNamespace(synchronize=lambda: found.append("settled"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(buckets, "DeviceSegment", Segment)
    return found
