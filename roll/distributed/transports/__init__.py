"""How new weights travel from the trainer to every engine: one seam, several ways.

    controller:  route = Route(...)                                    (roll/pipelines/rl/sync.py)
    trainer:     sent = send(route, strategy.named_weights, rank)      every rank; rank 0's has the handles
    engine:      with receive(route, sent.handles, rank) as incoming:
                     engine.update_weights(route.version, incoming)

A *stored* transport is sent first and received after; a *streaming* one has no handles, and both ends work at the same
time. Beyond the trainer's and the engines' own weights, with M for the size of the model and B for a bucket
(`model_update_buffer_size_mb`, in streaming transports at most 16 MiB on the host; or the largest tensor if that is
larger), the memory in use at a time is

| transport | kind | in the trainer | shared by the machine | in each engine |
|---|---|---|---|---|
| `in_process` | stored | one tensor that is gathered or merged | - | - |
| `object_store` | stored | B | M | - |
| `file` | stored | B | M on disk | what the reader maps of one shard |
| `shared_memory` | streaming | one tensor | 2 B | - |
| `broadcast` | streaming | 2 B | - | 3 B |

`shared_memory` needs no bucket for weights in memory that the engines can open (`shm_places.share`). With it several
ranks of the trainer may send, since each has every tensor once it is gathered. Either they take turns, a bucket each,
and each needs 2 B (`Route.senders`); or each sends everything to the engines on its own accelerator, with 2 B there
(`Route.sources`). By `broadcast` one rank sends: an engine takes in no more than its link carries, whoever sends.
`keep` adds M: in the object store, or in one process in its own memory. Both ends keep the segments of `shared_memory`
from one sync to the next. With `snapshot` (delta.py) each end adds M, and what a transport carries lies on the host.

An engine may look at the tensors of one bucket and of the one before it, never write to them, and has to copy what it
wants to keep.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeAlias

from torch import Tensor

from roll.configs.catalog.transport_table import TRANSPORTS
from roll.distributed.byte_account import ByteAccount, counting
from roll.distributed.handles import Handle
from roll.distributed.transports.delta import WeightCopy
from roll.distributed.weights import BucketWriter, Checksum, WeightPart, WeightSyncError

NamedWeights: TypeAlias = "Iterator[tuple[str, Tensor]]"
Weights: TypeAlias = Callable[[], "NamedWeights"]
"""Begins the stream of full tensors; every rank of the trainer must go through it."""

STREAMING = frozenset(name for name, transport in TRANSPORTS.items() if transport.streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What both ends are told about one transfer."""

    transport: str
    version: int
    transfer: str
    """Name of this transfer, unlike that of any other on any machine."""
    bucket_bytes: int
    part: WeightPart = "merged"
    """What is sent."""
    dtype: str = ""
    """What the engines compute in, as `model_args.dtype` has it: weights are cast before they travel. Empty: as is."""
    receivers: int = 1
    senders: tuple[int, ...] = (0,)
    """Ranks of the trainer that send, in turn a bucket each."""
    sources: tuple[int | None, ...] = ()
    """For each engine the rank of the trainer that sends it everything; None: it takes no part. Empty: `senders` do."""
    sender: int = 0
    """The trainer's rank whose end this is."""
    lane: str = ""
    """What tells the keys of one source and its engines from those of others. Only an end of the whole is common."""
    timeout: float = 600.0
    """Seconds that one end waits for the other at any point."""
    rendezvous: tuple[str, int] | None = None
    """Host and port where the ends of a streaming transport meet: the controller's."""
    group: str = ""
    """Name of the broadcast group, which lasts from one transfer to the next."""
    folder: str = ""
    """Where `file` writes."""
    on_device: bool = False
    """Whether every engine shares an accelerator with the rank that sends to it: `shared_memory` then stays on it."""
    checksum: bool = False
    """Hash what leaves and what arrives."""
    keep: bool = False
    """Make handles that hold this version while the trainer goes on, whatever the transport."""
    snapshot: str = ""
    """Name of these weights, under which both ends keep a copy of them; not in one process. Empty: they keep none."""
    base: str = ""
    """Name of the copy that all ends have, of which only the changes travel. Empty: all weights do."""

    def of_sender(self, rank: int) -> Route | None:
        """Return what a rank of the trainer has to send; None if it sends nothing."""
        if self.sources:
            return self._lane(rank) if rank in self.sources else None
        return replace(self, sender=rank) if rank in self.senders else None

    def of_engine(self, rank: int) -> Route:
        """Return what an engine receives."""
        return self._lane(self.sources[rank]) if self.sources else self

    def _lane(self, source: int | None) -> Route:
        assert source is not None, "this engine takes no part in the transfer"
        served = self.sources.count(source)
        return replace(self, receivers=served, senders=(source,), sources=(), sender=source, lane=f"/from-{source}")


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """What passed through one end."""

    tensors: int
    bytes: int
    checksum: str = ""
    """Empty unless the route asks for it."""
    gathered: int = field(default=0, compare=False)
    """Bytes that the trainer's ranks gathered for this end."""
    copied: int = field(default=0, compare=False)
    """Bytes that this end copied on the host, see `ByteAccount`."""
    moved: int = field(default=0, compare=False)
    """Bytes that the transport moved: `bytes`, or what had changed of them."""

    def __str__(self) -> str:
        return f"{self.tensors} tensors, {self.bytes} bytes" + (f", checksum {self.checksum}" if self.checksum else "")


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank of the trainer has to say afterwards; handles and what is kept come from rank 0."""

    handles: list[Handle]
    """For the engines; empty for a streaming transport."""
    summary: TransferSummary | None
    """None where nothing was looked at: in one process, without `checksum`; and of a rank that sends nothing."""
    retained: list[Handle]
    """For an engine that comes later, readable as `object_store` (`file` with that transport); empty without `keep`."""


class TransferStats:
    """Counts and, if asked, hashes a stream that passes by."""

    def __init__(self, *, checksum: bool) -> None:
        self._tensors = self._bytes = 0
        self._checksum = Checksum() if checksum else None

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor."""
        self._tensors += 1
        self._bytes += tensor.nbytes
        if self._checksum is not None:
            self._checksum.add(name, tensor)

    def summary(self) -> TransferSummary:
        """Return the counts so far."""
        checksum = self._checksum.hexdigest() if self._checksum is not None else ""
        return TransferSummary(self._tensors, self._bytes, checksum, moved=self._bytes)

    def watch(self, stream: NamedWeights) -> NamedWeights:
        """Yield the stream itself."""
        for name, tensor in stream:
            self.add(name, tensor)
            yield name, tensor
            del tensor


def send(route: Route, weights: Weights, rank: int = 0, *, copy: WeightCopy | None = None) -> Sent:
    """Send the weights; every rank of the trainer calls, and the route says which of them are the source.

    All ranks go through the whole stream even when sending fails, because gathering a tensor takes every rank. `copy`:
    this end's, for a route with a `snapshot`; weights that it has under that name already are sent from there.
    """
    stream = weights()
    mine = route.of_sender(rank)
    try:
        if rank:  # what is kept, and what is compared with the engines', is rank 0's
            if mine is None:
                return Sent([], None, [])
            mine = replace(mine, keep=False, checksum=False)
        with counting() as account:
            sent = _send(mine or route, weights, stream, copy, ships=mine is not None)
        if sent.summary is None:
            return sent
        return replace(sent, summary=replace(sent.summary, gathered=account.gathered, copied=account.copied))
    finally:
        if route.transport != "in_process":
            _go_through(stream)


def _send(route: Route, weights: Weights, stream: NamedWeights, copy: WeightCopy | None, *, ships: bool) -> Sent:
    module = importlib.import_module(TRANSPORTS[route.transport].path)
    stats = TransferStats(checksum=route.checksum)
    if route.transport == "in_process" and not route.keep:
        # Every engine begins the stream itself and pulls it tensor by tensor: nothing is ever held.
        if route.checksum:
            for name, tensor in weights():
                stats.add(name, tensor)
        return Sent(module.hand_to_engine(route, weights), stats.summary() if route.checksum else None, [])
    later = None
    if route.keep and (route.transport in STREAMING or route.snapshot):
        later = BucketWriter(route.bucket_bytes, route.version)
    moved = stats
    if route.snapshot:
        assert copy is not None
        moved = TransferStats(checksum=False)
        resent = copy.name == route.snapshot
        watched = _watched(iter(copy) if resent else stream, stats, later)
        stream = moved.watch(watched if resent else copy.encoded(watched, route.base, route.snapshot))
    else:
        stream = _watched(stream, stats, later)
    handles: list[Handle] = []
    if ships:
        handles = module.send(route, stream)
    else:
        _go_through(stream)
    retained = later.finish() if later is not None else handles if route.keep else []
    return Sent(handles, replace(stats.summary(), moved=moved.summary().bytes), retained)


def _go_through(stream: NamedWeights) -> None:
    """Take part in gathering what is left of a stream."""
    for _ in stream:
        pass


def _watched(stream: NamedWeights, stats: TransferStats, later: BucketWriter | None) -> NamedWeights:
    for name, tensor in stats.watch(stream):
        if later is not None:
            later.add(name, tensor)
        yield name, tensor
        del tensor


class WeightStream:
    """The stream at an engine's end: iterate inside the `with` block, once.

    Leaving the block frees what the transport holds; with an error it tells the other end, which would wait otherwise.
    """

    def __init__(self, route: Route, handles: Sequence[Handle], rank: int, copy: WeightCopy | None = None) -> None:
        module = importlib.import_module(TRANSPORTS[route.transport].path)
        self._stream: Any = module.receive(route.of_engine(rank), handles, rank)
        self._route = route
        self._copy = copy
        self._moved = TransferStats(checksum=False)
        self._stats = TransferStats(checksum=route.checksum)
        self._where = f"engine {rank}, weights of version {route.version} by {route.transport}"
        self._ended = False
        self._counting: Any = counting()
        self._account = ByteAccount()

    def __iter__(self) -> NamedWeights:
        moved = self._moved.watch(self._stream)
        if self._route.snapshot:
            assert self._copy is not None
            moved = self._copy.decoded(moved, self._route.base, self._route.snapshot)
        yield from self._stats.watch(moved)
        self._ended = True

    def __enter__(self) -> WeightStream:
        self._account = self._counting.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._counting.__exit__(None, None, None)
        if error is not None and not self._ended:
            with contextlib.suppress(BaseException):
                self._stream.throw(error)
        self._stream.close()

    def summary(self) -> TransferSummary:
        """Return what arrived; raises `WeightSyncError` if the engine didn't read to the end."""
        if not self._ended:
            raise WeightSyncError(f"{self._where}: the engine stopped reading after {self._stats.summary()}")
        account, moved = self._account, self._moved.summary().bytes
        return replace(self._stats.summary(), gathered=account.gathered, copied=account.copied, moved=moved)


def receive(route: Route, handles: Sequence[Handle], rank: int, copy: WeightCopy | None = None) -> WeightStream:
    """Open the engine's end; `rank` is its place among the `receivers`, `copy` this end's for a `snapshot`."""
    return WeightStream(route, handles, rank, copy)
