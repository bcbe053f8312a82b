"""`activation_offload`: what autograd saves waits in host memory between the forward and the backward pass.

On an accelerator copies run on a stream of their own, beside the one that computes:

    forward     computing   layer 1 | layer 2 | layer 3 | head     backward    computing   layer 3 | layer 2 | layer 1
                copying               1 out   | 2 out   | 3 out                copying     2 back  | 1 back  |

A copy begins when the computing stream has done all it was asked for before, so the tensor is there, or nobody uses the
memory any more that was taken for it. The computing stream waits for the end of a copy before it reads what came back,
and before it may use the memory of what went out for something else. That it waits, and not the host (which is ahead of
both), keeps the memory bounded: with `record_stream` the allocator would hold each block until the host asks again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from roll.strategies.training.state_offload import host_bytes

IN_FLIGHT = 1 << 28
"""Bytes of the device that may be on their way to the host, or back before their use; one tensor may be larger."""
_SMALLEST = 1024  # bytes; what is smaller isn't worth a transfer


class CopyStream:
    """The copying stream of a device; without an accelerator copies are made where they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.asynchronous = device.type == "cuda"
        if self.asynchronous:
            self._copying = torch.cuda.Stream(device)
            self._computing = torch.cuda.current_stream(device)

    @contextlib.contextmanager
    def after_computing(self) -> Iterator[None]:
        """Inside, operators go to the copying stream, after all that the computing one was asked for so far."""
        if not self.asynchronous:
            yield
            return
        self._copying.wait_stream(self._computing)
        with torch.cuda.stream(self._copying):
            yield

    def end_of_copies(self) -> torch.cuda.Event | None:
        """Return the point at which the copies are done that were asked for so far."""
        return self._copying.record_event() if self.asynchronous else None

    def compute_after(self, point: torch.cuda.Event | None) -> None:
        """Let whatever the computing stream is asked for from here on wait for that point."""
        if point is not None:
            self._computing.wait_event(point)


class OnHost:
    """A tensor that waits in host memory for the backward pass.

    It is on the device, too, while it goes to the host, and from the beginning of its way back on. Compiled code
    insists on the strides it knew: the copy is contiguous, and one element long where a dimension was expanded.
    """

    _on_device: Tensor | None = None  # of the class, too: `__del__` also comes where there is no room on the host

    def __init__(self, tensor: Tensor, index: int, streams: CopyStream) -> None:
        self.place = index
        """Number of tensors that were saved before it."""
        self._streams = streams
        self._size, self._stride, self._device = tensor.size(), tensor.stride(), tensor.device
        distinct = tensor[tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())]
        # torch keeps freed pinned memory for the next pass, and gives it away only after the copies that use it.
        room = host_bytes(distinct.numel() * tensor.element_size(), pinned=streams.asynchronous)
        self.copy = room.view(tensor.dtype).view(distinct.shape)
        with streams.after_computing():
            self.copy.copy_(distinct, non_blocking=streams.asynchronous)
        self._copied = streams.end_of_copies()
        self._on_device = tensor
        self._came_back = self.taken = False

    @property
    def on_device(self) -> bool:
        """Return whether it takes memory of the device."""
        return self._on_device is not None

    @property
    def nbytes(self) -> int:
        """Return bytes that are copied."""
        return self.copy.nbytes

    def leave(self) -> None:
        """Give up the memory on the device, which may be used again once the copy is made."""
        if self._on_device is not None:
            self._streams.compute_after(self._copied)
            self._on_device = None

    __del__ = leave

    def fetch(self) -> None:
        """Begin to bring it back, unless it is on the device."""
        if self._on_device is None:
            tensor = torch.empty_strided(self.copy.shape, self._stride, dtype=self.copy.dtype, device=self._device)
            with self._streams.after_computing():
                tensor.copy_(self.copy, non_blocking=self._streams.asynchronous)
            self._copied = self._streams.end_of_copies()
            self._on_device, self._came_back = tensor.expand(self._size), True

    def take(self) -> Tensor:
        """Return the tensor on its device."""
        self.fetch()
        if self._came_back:
            self._streams.compute_after(self._copied)
        self.taken = True
        assert self._on_device is not None
        return self._on_device


class ActivationOffload:
    """Sends what autograd saves to host memory, and brings it back a layer before the backward pass wants it."""

    def __init__(self, device: torch.device, in_flight: int = IN_FLIGHT) -> None:
        self._streams = CopyStream(device)
        self._in_flight = in_flight if self._streams.asynchronous else 0
        self._begin()

    def _begin(self) -> None:
        """Forget the pass before. Only the graph holds what was saved: dropped with it, it is gone here, too."""
        self._saved: list[weakref.ref[OnHost]] = []
        self._leaving: deque[tuple[weakref.ref[OnHost], int]] = deque()
        self._leaving_bytes = 0
        self._coming: list[weakref.ref[OnHost]] = []
        """What the backward pass will find on the device."""
        self._same: dict[tuple[Any, ...], weakref.ref[OnHost]] = {}
        self._next = -1
        """Place of the latest tensor that may have to be brought back."""

    def saving(self) -> saved_tensors_hooks:
        """Return a context: inside, tensors that autograd saves for the backward pass wait in host memory.

        Weights stay: they take no memory of their own, and those that FSDP gathers are freed by FSDP.
        """
        self._begin()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | OnHost:
        owner = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        if isinstance(owner, torch.nn.Parameter) or tensor.numel() * tensor.element_size() < _SMALLEST:
            return tensor
        # Several operators save the same tensor: the projections of a layer its input.
        memory = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype
        key = (*memory, tensor.size(), tensor.stride(), tensor._version)
        known = self._same.get(key, lambda: None)()
        if known is not None and known.on_device:
            return known
        saved = OnHost(tensor, len(self._saved), self._streams)
        reference = self._same[key] = weakref.ref(saved)
        self._saved.append(reference)
        self._leaving.append((reference, saved.nbytes))
        self._leaving_bytes += saved.nbytes
        while self._leaving_bytes > self._in_flight:
            oldest, size = self._leaving.popleft()
            self._leaving_bytes -= size
            if (gone := oldest()) is not None:
                gone.leave()
        self._next = saved.place
        return saved

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, OnHost):
            return packed
        tensor = packed.take()
        self._fetch_ahead()
        return tensor

    def _fetch_ahead(self) -> None:
        """Begin to bring back what the backward pass wants next: it goes from the last layer to the first."""
        if self._next < 0:
            return
        self._coming = [there for there in self._coming if (saved := there()) is not None and not saved.taken]
        size = sum(saved.nbytes for there in self._coming if (saved := there()) is not None)
        while self._next >= 0:
            saved = self._saved[self._next]()
            if saved is not None and not saved.taken:
                if self._coming and not saved.on_device and size + saved.nbytes > self._in_flight:
                    return
                saved.fetch()
                size += saved.nbytes
                self._coming.append(self._saved[self._next])
            self._next -= 1
