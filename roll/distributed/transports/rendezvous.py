"""Where the ends of a streaming transfer meet: a small key-value store in the controller's process.

Notices of buckets go through it, the data doesn't. Whoever fails says so here, and everybody who waits learns it within
`ABORT_POLL_SECONDS`. When the controller is gone so is the store, and every wait ends with an error.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from roll.configs.catalog.transport_table import Lane
from roll.distributed.transports import Transport
from roll.distributed.weights import WeightMismatch, WeightSyncError

ABORT_POLL_SECONDS = 0.25
"""Seconds between two looks at whether somebody gave up."""
_MIN_PAUSE, _MAX_PAUSE = 0.0002, 0.01
"""Seconds between two looks for what is waited for: at first, and after a while."""
_PAUSE_SHARE = 0.1
"""Of what was waited so far: how late it may be noticed that a wait is over."""
_ABORTED = "aborted"
_CONNECT_SECONDS = 60.0


class RendezvousStore:
    """The controller's end: holds the store for a whole run."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host`; the store takes the open socket over, so no one else can have the port."""
        server = socket.create_server((host, 0), backlog=2048)
        port: int = server.getsockname()[1]
        self.address = (host, port)
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_SECONDS),
            master_listen_fd=server.detach(),
        )

    def abort(self, transfer: str, reason: str) -> None:
        """Make every end of a transfer give up."""
        self._store.set(f"{transfer}/{_ABORTED}", reason)


@dataclass(frozen=True)
class StreamingTransport(Transport):
    """A transport whose ends are at work at the same time, and tell each other how far they are."""

    streams: ClassVar[bool] = True

    rendezvous: tuple[str, int]
    """Host and port where the ends meet: the controller's."""
    lanes: tuple[Lane, ...]
    """Who sends to whom; an engine is in one lane at most, and so is a rank of the trainer."""

    def sends(self, rank: int) -> bool:
        return any(rank in lane.senders for lane in self.lanes)

    def lane_from(self, rank: int) -> Lane:
        """Return the lane in which this rank of the trainer sends."""
        return next(lane for lane in self.lanes if rank in lane.senders)

    def lane_to(self, engine: int) -> Lane:
        """Return the lane in which this engine receives."""
        lanes = [lane for lane in self.lanes if engine in lane.engines]
        assert lanes, "this engine takes no part in the transfer"
        return lanes[0]


def sender_name(lane: Lane, rank: int) -> str:
    """Return what messages call a sender."""
    alone = lane.senders == (0,) and not lane.on_device
    return "the trainer" if alone else f"the trainer's rank {rank}"


class TransferChannel:
    """A worker's end of one transfer; `who` names it in messages to the others.

    The keys of lanes are apart, where there may be several. Only an end of the whole is common.
    """

    def __init__(self, transport: StreamingTransport, who: str, lane: Lane) -> None:
        host, port = transport.rendezvous
        transfer = transport.transfer
        self._transfer = transfer
        self._transport_name = transport.name
        self._who = who
        self._num_engines = len(lane.engines)
        try:
            self.store: dist.Store = dist.TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=min(transfer.timeout, _CONNECT_SECONDS))
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise WeightSyncError(f"{who} couldn't reach the controller at {host}:{port}: {error}") from error
        own = f"{transfer.name}/from-{lane.senders[0]}" if lane.on_device else transfer.name
        self._all = dist.PrefixStore(transfer.name, self.store)
        self._own = dist.PrefixStore(own, self.store)

    def publish(self, key: str, content: Any) -> None:
        """Say something to the others, as JSON: anybody who reaches the port can write to the store."""
        self._own.set(key, json.dumps([self._transfer.version, content]))

    def has(self, key: str) -> bool:
        """Return whether something was published under `key` already."""
        return bool(self._own.check([key]))

    def wait(self, key: str, whom: str) -> Any:
        """Wait for what is published under `key`; raises `WeightSyncError` if somebody gives up, is gone or late."""
        start = look = time.monotonic()
        deadline = start + self._transfer.timeout
        try:
            # The store's own wait writes a warning to the terminal each time it ends without a result.
            while not self._own.check([key]):
                if time.monotonic() > look:
                    look = time.monotonic() + ABORT_POLL_SECONDS
                    self.check(deadline, whom)
                waited = time.monotonic() - start
                time.sleep(min(_MAX_PAUSE, max(_MIN_PAUSE, _PAUSE_SHARE * waited)))
            version, content = json.loads(self._own.get(key))
        except dist.DistNetworkError as error:
            raise WeightSyncError(f"{self._who} lost the controller while it waited for {whom}") from error
        if version != self._transfer.version:
            raise WeightMismatch(f"expected weights of version {self._transfer.version}, {whom} sent {version}")
        return content

    def check(self, deadline: float, whom: str) -> None:
        """Raise `WeightSyncError` if another end gave up or the deadline (of `time.monotonic`) has passed."""
        if self._all.check([_ABORTED]):
            raise WeightSyncError(f"{self._who} gave up: {self._all.get(_ABORTED).decode()}")
        if time.monotonic() > deadline:
            raise WeightSyncError(
                f"{self._who} waited {self._transfer.timeout:g} s for {whom} in the transfer of version "
                f"{self._transfer.version} by {self._transport_name}"
            )

    def done(self, index: int) -> None:
        """Report that this receiver needs bucket `index` no more; the last one tells the sender."""
        if self._own.add(f"done/{index}", 1) == self._num_engines:
            self.publish(f"free/{index}", None)

    def wait_until_free(self, index: int) -> None:
        """Wait until no receiver needs bucket `index`, then forget about it."""
        self.wait(f"free/{index}", f"the engines to finish with bucket {index}")
        for key in (f"free/{index}", f"done/{index}", f"bucket/{index}"):
            self._own.delete_key(key)

    def abort(self, error: BaseException) -> None:
        """Tell the others that this end gives up; the first reason stays."""
        try:
            if not self._all.check([_ABORTED]):
                self._all.set(_ABORTED, f"{self._who}: {type(error).__name__}: {error}")
        except (dist.DistNetworkError, dist.DistStoreError):
            pass  # the controller is gone, and the store with it: nobody is left to be told
