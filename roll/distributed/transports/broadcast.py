"""`broadcast`: a torch.distributed group of the trainer and every engine, gloo on CPUs and nccl on accelerators.

The group lasts until its members change or a transfer fails; the trainer's default group isn't touched. nccl can't have
two members on one accelerator, so engines need devices of their own; that part was not run anywhere yet.
"""

from __future__ import annotations

import itertools
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from roll.distributed.handles import Handle
from roll.distributed.transports import NamedWeights
from roll.distributed.transports.bucket_layout import SLOTS, Bucket, Entry, Outbox, unpacked
from roll.distributed.transports.rendezvous import ABORT_POLL_SECONDS, StreamingTransport, TransferChannel
from roll.distributed.weights import WeightSyncError, tensor_of

_POLL_SECONDS = 0.0005
_GRACE = 5.0  # seconds for what is under way to break off, once its group is given up


@dataclass(frozen=True)
class BroadcastTransport(StreamingTransport):
    """From rank 0 to all engines, which are in one lane."""

    name: ClassVar[str] = "broadcast"

    group: str
    """Name of the process group, which lasts from one transfer to the next."""

    def send(self, stream: NamedWeights, rank: int) -> list[Handle]:
        """Stream to all engines; returns when they have everything."""
        del rank
        channel = TransferChannel(self, "the trainer", self.lanes[0])
        outbox = _Outbox(self, channel)
        try:
            outbox.send(stream)
            if outbox.member is None:
                channel.publish("device", None)
        except BaseException as error:
            channel.abort(error)
            _leave(0)
            raise
        return []

    def receive(self, handles: Sequence[Handle], rank: int) -> NamedWeights:
        del handles
        channel = TransferChannel(self, f"engine {rank}", self.lanes[0])
        try:
            kind = channel.wait("device", "the trainer to begin")
            if kind is None:
                return  # there is nothing to send
            device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.cuda.current_device())
            for flat, entries in _buckets(channel, _join(self, channel, rank + 1, device)):
                for name, tensor in unpacked(flat, entries):
                    yield name, tensor
                    del tensor
                del flat
        except BaseException as error:
            channel.abort(error)
            _leave(rank + 1)
            raise


class _Member:
    """This process in a group, as one of its ranks."""

    def __init__(
        self, transport: BroadcastTransport, channel: TransferChannel, rank: int, device: torch.device
    ) -> None:
        self.name = transport.group
        self.device = device
        self._works: dict[int, dist.Work] = {}
        """Under way, by number. They and the group live here alone: connections close when the last reference goes, and
        a traceback may hold the variables of a function for long."""
        self._numbers = itertools.count()
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.timeout = timedelta(seconds=transport.transfer.timeout)
        self._timeout = transport.transfer.timeout
        store = dist.PrefixStore(f"{transport.group}-{device.type}", channel.store)
        size = len(transport.lanes[0].engines) + 1
        # Whoever is missing is noticed here, in time and by name, and not in a library's rendezvous.
        channel.publish(f"here/{rank}", None)
        for other in range(size):
            channel.wait(f"here/{other}", f"engine {other - 1} to join" if other else "the trainer to join")
        try:
            self._group: Any = (_gloo if device.type == "cpu" else _nccl)(transport, store, rank, size)
        except RuntimeError as error:
            raise WeightSyncError(f"member {rank} of {size} couldn't join the broadcast group: {error}") from error

    def broadcast(self, flat: Tensor) -> int:
        """Begin to send (rank 0) or receive; a number to `finish` with."""
        number = next(self._numbers)
        self._works[number] = self._group.broadcast([flat], self._options)
        return number

    def finish(self, number: int, channel: TransferChannel, what: str) -> None:
        """Wait for it; raises `WeightSyncError` when an end gives up, breaks off or is late."""
        look = time.monotonic()
        deadline = look + self._timeout
        while not self._works[number].is_completed():
            if time.monotonic() > look:
                look = time.monotonic() + ABORT_POLL_SECONDS
                channel.check(deadline, what)
            time.sleep(_POLL_SECONDS)
        try:
            self._works.pop(number).wait()
        except RuntimeError as error:
            # Who gives up says so before its connections close.
            channel.check(deadline, what)
            raise WeightSyncError(f"the broadcast broke off at {what}: {error}") from error

    def drop(self) -> None:
        """Close the connections, so that nobody waits for this end any more."""
        end = time.monotonic() + _GRACE
        while not self._is_idle() and time.monotonic() < end:
            time.sleep(0.01)
        if not self._is_idle():
            _stuck.append((self._group, self._works))
        self._group, self._works = None, {}

    def _is_idle(self) -> bool:
        return all(work.is_completed() for work in self._works.values())


_members: dict[int, _Member] = {}  # this process's membership by rank; more than one where ends share a process
_stuck: list[Any] = []  # groups whose end would block this process, because something is still under way in them


class _Outbox(Outbox):
    """Joins the group once it knows the device."""

    def __init__(self, transport: BroadcastTransport, channel: TransferChannel) -> None:
        super().__init__(channel, transport.transfer.bucket_bytes)
        self._transport = transport
        self.member: _Member | None = None
        self._flats: list[Tensor | None] = [None] * SLOTS
        self._numbers = [0] * SLOTS

    def buffer_device(self, device: torch.device) -> torch.device:
        return device

    def buffer(self, slot: int, size: int, device: torch.device) -> Tensor:
        if self.member is None:
            self.channel.publish("device", device.type)
            self.member = _join(self._transport, self.channel, 0, device)
        flat = self._flats[slot]
        if flat is None or flat.numel() < size:
            flat = torch.empty(size, dtype=torch.uint8, device=self.member.device)
            self._flats[slot] = flat
        return flat

    def ship(self, index: int, slot: int, bucket: Bucket) -> None:
        assert self.member is not None
        self.channel.publish(f"bucket/{index}", {"used": bucket.used, "entries": bucket.entries})
        self._numbers[slot] = self.member.broadcast(bucket.filled)

    def free(self, index: int, slot: int) -> None:
        assert self.member is not None
        self.member.finish(self._numbers[slot], self.channel, "the engines")
        self.channel.wait_until_free(index)


def _buckets(channel: TransferChannel, member: _Member) -> Iterator[tuple[Tensor, list[Entry]]]:
    """Receive (buffer, entries); the next bucket is on its way already while an engine reads this one."""
    buffers = _Buffers(member.device)

    def begin(index: int) -> tuple[Tensor, list[Entry], int] | None:
        notice = channel.wait(f"bucket/{index}", f"bucket {index} from the trainer")
        if notice is None:
            return None
        flat = buffers.take(notice["used"])
        return flat, notice["entries"], member.broadcast(flat)

    index, ahead = 0, None
    while (begun := ahead or begin(index)) is not None:
        flat, entries, number = begun
        member.finish(number, channel, f"bucket {index} from the trainer")
        channel.done(index)
        index += 1
        ahead = begin(index) if channel.has(f"bucket/{index}") else None
        del begun
        yield flat, entries
        del flat


class _Buffers:
    """Memory of the host is used again when nobody looks at it; an accelerator's allocator does that itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[tuple[np.ndarray, Callable[[], object]]] = []

    def take(self, size: int) -> Tensor:
        """Return a uint8 tensor of this size."""
        if self._device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        idle = [slot for slot in self._slots if slot[1]() is None]
        fitting = next((base for base, _ in idle if base.size >= size), None)
        busy = [slot for slot in self._slots if slot[1]() is not None]
        base = np.empty(size, dtype=np.uint8) if fitting is None else fitting
        view = base[:size]
        spare = [slot for slot in idle if slot[0] is not base]
        self._slots = [*busy, *spare[: max(0, SLOTS - 1 - len(busy))], (base, weakref.ref(view))]
        return tensor_of(view)


def _join(transport: BroadcastTransport, channel: TransferChannel, rank: int, device: torch.device) -> _Member:
    member = _members.get(rank)
    if member is None or member.name != transport.group or member.device.type != device.type:
        _leave(rank)
        member = _members[rank] = _Member(transport, channel, rank, device)
    return member


def _leave(rank: int) -> None:
    member = _members.pop(rank, None)
    if member is not None:
        member.drop()


def _gloo(transport: BroadcastTransport, store: dist.Store, rank: int, size: int) -> Any:
    group: Any = dist.ProcessGroupGloo
    options = group._Options()
    options._timeout = timedelta(seconds=transport.transfer.timeout)
    options._devices = [group.create_device(hostname=_own_address(transport))]
    return group(store, rank, size, options)


def _nccl(transport: BroadcastTransport, store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=transport.transfer.timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _own_address(transport: BroadcastTransport) -> str:
    """Return the address of this machine that the controller's machine can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(transport.rendezvous)  # sends nothing
        return str(probe.getsockname()[0])
