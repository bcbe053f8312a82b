"""`shared_memory`: two segments that the sender fills in turn while every engine of the machine reads the other one."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from roll.distributed.handles import Handle
from roll.distributed.transports import NamedWeights, Route
from roll.distributed.transports.bucket_layout import buffer_size, packed, tensor_of, unpacked
from roll.distributed.transports.rendezvous import TransferChannel
from roll.distributed.transports.shm_segments import Bytes, DeviceSegment, ShmSegment, Token, attach, make, register
from roll.distributed.weights import WeightSyncError

_SLOTS = 2


def send(route: Route, stream: NamedWeights) -> list[Handle]:
    """Stream to all receivers; returns when they have read everything. Nothing is left behind, even on failure."""
    channel = TransferChannel(route, "the trainer")
    ring = _Ring(route, channel)
    try:
        for flat, used, entries in packed(stream, ring.take):
            if flat.is_cuda:
                torch.cuda.current_stream().synchronize()
            ring.publish({"used": used, "entries": entries})
        ring.finish()
    except BaseException as error:
        channel.abort(error)
        raise
    finally:
        ring.close()
    return []


class _Ring:
    """The sender's segments. A slot is written again when every receiver is done with it."""

    def __init__(self, route: Route, channel: TransferChannel) -> None:
        self._route = route
        self._channel = channel
        self._slots: list[ShmSegment | DeviceSegment | None] = [None] * _SLOTS
        self._index = -1

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return the next bucket's buffer."""
        self._index += 1
        if self._index >= _SLOTS:
            self._free(self._index - _SLOTS)
        place = device if self._route.on_device else torch.device("cpu")
        size = max(size, buffer_size(self._index, self._route.bucket_bytes, place))
        slot = self._slots[self._index % _SLOTS]
        if slot is None or slot.flat.numel() < size:
            if slot is not None:
                slot.close()
                self._slots[self._index % _SLOTS] = None
            slot = make(self._route.transfer, size, device, on_device=self._route.on_device)
            self._slots[self._index % _SLOTS] = slot
        return slot.flat

    def publish(self, content: dict[str, Any]) -> None:
        """Tell the receivers that the bucket is there."""
        slot = self._slots[self._index % _SLOTS]
        assert slot is not None
        self._channel.publish(f"bucket/{self._index}", {**content, "segment": slot.token})

    def finish(self) -> None:
        """Say that this was all, and wait until it has been read."""
        self._channel.publish(f"bucket/{self._index + 1}", None)
        for index in range(max(0, self._index + 1 - _SLOTS), self._index + 1):
            self._free(index)

    def _free(self, index: int) -> None:
        self._channel.wait_until_free(index)
        slot = self._slots[index % _SLOTS]
        if slot is not None:
            slot.forget()  # all receivers have opened it

    def close(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.close()


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
                        f"the engine still holds tensors of bucket {index} when it asks for bucket {index + _SLOTS}; "
                        "it must copy what it wants to keep"
                    )
            self._channel.done(index)
            self._open.popleft()

    def close(self) -> None:
        """Report the rest: nothing will be written there any more."""
        for index, _ in self._open:
            self._channel.done(index)
        self._open.clear()


def receive(route: Route, handles: Sequence[Handle], rank: int) -> Iterator[tuple[str, Tensor]]:
    """See `roll.distributed.transports.receive`."""
    del handles
    channel = TransferChannel(route, f"engine {rank}")
    leases = BucketLeases(channel)
    attached: OrderedDict[str, Bytes | Tensor] = OrderedDict()
    index = 0
    try:
        while (notice := channel.wait(f"bucket/{index}", f"bucket {index} from the trainer")) is not None:
            base = _opened(attached, notice["segment"])
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


def _opened(attached: OrderedDict[str, Bytes | Tensor], token: Token) -> Bytes | Tensor:
    key = str(token)
    if key not in attached:
        attached[key] = attach(token)
    attached.move_to_end(key)
    if len(attached) > _SLOTS:
        attached.popitem(last=False)  # its slot has a larger one now
    return attached[key]


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
