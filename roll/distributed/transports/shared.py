"""`shared_memory`: two segments that a sender fills in turn while every engine of the machine reads the other one.

What lies in shared memory already (`shm_places.share`) isn't copied: the engines are told where, and read it there.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from roll.configs.catalog.transport_table import Lane
from roll.distributed.handles import Handle
from roll.distributed.transports import NamedWeights, Transfer
from roll.distributed.transports.bucket_layout import SLOTS, Bucket, Outbox, unpacked
from roll.distributed.transports.rendezvous import StreamingTransport, TransferChannel, sender_name
from roll.distributed.transports.shm_places import ShmRegion, locate, register
from roll.distributed.transports.shm_segments import (
    REUSABLE_SIZES,
    Bytes,
    DeviceSegment,
    ShmSegment,
    Token,
    attach,
    discard,
    keep,
    make,
)
from roll.distributed.weights import WeightSyncError, tensor_of


class SharedMemoryTransport(StreamingTransport):
    """Memory that both ends open; several ranks may send."""

    name: ClassVar[str] = "shared_memory"
    reads_in_place: ClassVar[bool] = True

    def send(self, stream: NamedWeights, rank: int) -> list[Handle]:
        """Stream to all engines; returns when they have read everything. Nothing is left behind, even on failure."""
        lane = self.lane_from(rank)
        channel = TransferChannel(self, sender_name(lane, rank), lane)
        outbox = _Outbox(self.transfer, channel, lane, rank)
        try:
            outbox.send(stream)
        except BaseException as error:
            channel.abort(error)
            for slot in outbox.slots:
                if slot is not None:
                    slot.close()
            raise
        for slot in outbox.slots:
            if slot is not None:
                keep(slot)
        return []

    def receive(self, handles: Sequence[Handle], rank: int) -> NamedWeights:
        del handles
        lane = self.lane_to(rank)
        channel = TransferChannel(self, f"engine {rank}", lane)
        leases = BucketLeases(channel)
        attached: OrderedDict[str, Bytes | Tensor] = OrderedDict()
        most_open = SLOTS * len(lane.senders) + 1  # what senders fill in turn, and the memory that one's weights are in
        index = 0
        try:
            while (notice := channel.wait(f"bucket/{index}", f"bucket {index} from {_whose(lane, index)}")) is not None:
                try:
                    base = _opened(attached, notice["segment"], most_open)
                except FileNotFoundError:
                    channel.check(time.monotonic() + 1, "the trainer")  # one that gives up takes its segments away
                    raise
                view = base[: notice["used"]]
                leases.lend(index, _released(view))
                on_host = not isinstance(view, torch.Tensor)
                if isinstance(view, torch.Tensor):
                    flat = view
                else:
                    register(notice["segment"], view)
                    flat = tensor_of(view)
                del view
                for name, tensor in unpacked(flat, notice["entries"]):
                    yield name, tensor
                    del tensor
                    leases.settle(below=index, required=index - 1)
                del flat
                index += 1
                # On the host it is known whether the bucket just read is still in use; on a device it may be.
                leases.settle(below=index if on_host else index - 1, required=index - 1)
            leases.close()
        except BaseException as error:
            channel.abort(error)
            raise

    def close(self) -> None:
        discard(self.transfer.name)


class _Outbox(Outbox):
    """The sender's segments."""

    def __init__(self, transfer: Transfer, channel: TransferChannel, lane: Lane, rank: int) -> None:
        mine = lane.senders.index(rank)
        super().__init__(channel, transfer.bucket_bytes, senders=len(lane.senders), mine=mine)
        self._transfer = transfer.name
        self._on_device = lane.on_device
        self.slots: list[ShmSegment | DeviceSegment | None] = [None] * SLOTS

    def buffer_device(self, device: torch.device) -> torch.device:
        return device if self._on_device else torch.device("cpu")

    def buffer(self, slot: int, size: int, device: torch.device) -> Tensor:
        segment = self.slots[slot]
        if segment is None or segment.flat.numel() < size:
            if segment is not None:
                segment.close()
                self.slots[slot] = None
            segment = make(self._transfer, size, device, on_device=self._on_device)
            self.slots[slot] = segment
        return segment.flat

    def shared_at(self, tensor: Tensor) -> ShmRegion | None:
        region = locate(tensor)
        return region if region is not None and region.stays else None

    def ship(self, index: int, slot: int, bucket: Bucket) -> None:
        token, segment = bucket.token, self.slots[slot]
        if token is None:
            assert segment is not None
            token = segment.token
            if bucket.filled.is_cuda:
                torch.cuda.current_stream().synchronize()
        self.channel.publish(f"bucket/{index}", {"used": bucket.used, "entries": bucket.entries, "segment": token})

    def free(self, index: int, slot: int) -> None:
        self.channel.wait_until_free(index)
        segment = self.slots[slot]
        if segment is not None:
            segment.forget()  # all receivers have opened it


class BucketLeases:
    """Buckets that were handed out, until nobody looks at them any more."""

    def __init__(self, channel: TransferChannel) -> None:
        self._channel = channel
        self._open: deque[tuple[int, Callable[[], bool]]] = deque()

    def lend(self, index: int, is_free: Callable[[], bool]) -> None:
        """Note that bucket `index` is about to be handed out."""
        self._open.append((index, is_free))

    def settle(self, *, below: int, required: int) -> None:
        """Report buckets below `below` that are free; raises `WeightSyncError` unless all below `required` are."""
        while self._open and self._open[0][0] < below:
            index, is_free = self._open[0]
            if not is_free():
                if index >= required:
                    return
                gc.collect()
                if not is_free():
                    raise WeightSyncError(
                        f"the engine still holds tensors of bucket {index} when it asks for bucket {index + SLOTS}; "
                        "it must copy what it wants to keep"
                    )
            self._channel.done(index)
            self._open.popleft()

    def close(self) -> None:
        """Report the rest: nothing will be written there any more."""
        for index, _ in self._open:
            self._channel.done(index)
        self._open.clear()


def _whose(lane: Lane, index: int) -> str:
    """Return who sends a bucket, for messages: whose turn it is or, if it begins with a large tensor, the first."""
    turn, first = lane.senders[index % len(lane.senders)], lane.senders[0]
    return sender_name(lane, turn) + (f" or {first}" if turn != first else "")


_still_open: OrderedDict[str, Bytes | Tensor] = OrderedDict()
"""Memory of the host that this process has seen last, by name: its sender keeps it for its next transfer, too."""
_still_open_lock = threading.Lock()


def _opened(attached: OrderedDict[str, Bytes | Tensor], token: Token, most: int) -> Bytes | Tensor:
    """Return a segment; those of this transfer are in `attached`."""
    key = str(token)
    if key not in attached:
        attached[key] = attach(token) if "cuda" in token else _opened_once(token, most)
    attached.move_to_end(key)
    if len(attached) > most:
        attached.popitem(last=False)  # its slot has a larger one now
    return attached[key]


def _opened_once(token: Token, most: int) -> Bytes | Tensor:
    with _still_open_lock:
        segment = _still_open.pop(token["name"], None)
        segment = attach(token) if segment is None else segment
        if token["size"] in REUSABLE_SIZES or "stays" in token:
            _still_open[token["name"]] = segment
            while len(_still_open) > most:
                _still_open.popitem(last=False)
        return segment


def _released(view: Bytes | Tensor) -> Callable[[], bool]:
    """Return a function that tells whether a bucket is out of use: its tensors keep the array `view` alive."""
    if isinstance(view, torch.Tensor):  # on a device: all that was queued before has to be through
        device = view.device

        def through() -> bool:
            torch.cuda.synchronize(device)
            return True

        return through
    alive = weakref.ref(view)
    return lambda: alive() is None
