"""How new weights travel from the trainer to every engine: one interface, `Transport`, with a class for each way.

    controller:  transport = Class.build(Transfer(...), plan)                 (roll/pipelines/rl/sync.py)
    trainer:     sent = send(transport, strategy.named_weights, rank)         every rank; rank 0's has the handles
    engine:      with receive(transport, sent.handles, rank) as incoming:
                     engine.update_weights(transport.transfer.version, incoming)

A class says what its two ends do with a stream of tensors. `send` and `receive` here do what is common to all: they
count and hash what passes, keep a version for later (`Transfer.keep`), and let only changes travel (delta.py).

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
and each needs 2 B; or each sends everything to the engines on its own accelerator, with 2 B there (`Lane`). By
`broadcast` one rank sends: an engine takes in no more than its link carries, whoever sends. `keep` adds M: in the
object store, or in one process in its own memory. Both ends keep the segments of `shared_memory` from one sync to the
next. With a `Delta` each end adds M, and what a transport carries lies on the host.

An engine may look at the tensors of one bucket and of the one before it, never write to them, and has to copy what it
wants to keep.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from roll.distributed.byte_account import ByteAccount, counting
from roll.distributed.handles import Handle
from roll.distributed.transports.delta import Delta, WeightCopy
from roll.distributed.weights import BucketWriter, Checksum, WeightPart, WeightSyncError

NamedWeights: TypeAlias = "Iterator[tuple[str, Tensor]]"
Weights: TypeAlias = Callable[[], "NamedWeights"]
"""Begins the stream of full tensors; every rank of the trainer must go through it."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What both ends are told about one transfer, whatever the transport."""

    version: int
    name: str
    """Unlike that of any other transfer on any machine."""
    bucket_bytes: int
    part: WeightPart = "merged"
    """What is sent."""
    dtype: str = ""
    """What the engines compute in, as `model_args.dtype` has it: weights are cast before they travel. Empty: as is."""
    timeout: float = 600.0
    """Seconds that one end waits for the other at any point."""
    checksum: bool = False
    """Hash what leaves and what arrives."""
    keep: bool = False
    """Make handles that hold this version while the trainer goes on, whatever the transport."""


@dataclass(frozen=True)
class Transport(ABC):
    """One way of weights, with what both ends have to know of it: each has a copy of this object."""

    name: ClassVar[str]
    """In `weight_transport`."""
    streams: ClassVar[bool] = False
    """Whether both ends are at work at the same time; the handles of others stay what they are."""
    reads_in_place: ClassVar[bool] = False
    """Whether engines can read weights where the trainer keeps them, in memory that others can open."""

    transfer: Transfer

    @classmethod
    def build(cls, transfer: Transfer, plan: object) -> Transport:
        """Return the transport for one transfer, with those of the plan's attributes that the class has fields for."""
        return cls(transfer, **{each.name: getattr(plan, each.name) for each in fields(cls) if each.name != "transfer"})

    def sends(self, rank: int) -> bool:
        """Return whether this rank of the trainer sends something."""
        return rank == 0

    @abstractmethod
    def send(self, stream: NamedWeights, rank: int) -> list[Handle]:
        """Send the stream, or this rank's share of it, and return handles for the engines; none if it `streams`."""

    @abstractmethod
    def receive(self, handles: Sequence[Handle], rank: int) -> NamedWeights:
        """Yield the stream at the end of an engine."""

    def hand_to_engine(self, weights: Weights) -> list[Handle] | None:
        """Return handles to the trainer's weights themselves, where engines can begin the stream on their own."""
        del weights
        return None

    def discard(self, retained: Sequence[Handle]) -> None:
        """Delete what this transfer and those before it have left for others, except behind these handles."""

    def close(self) -> None:
        """Delete all of that."""


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """What passed through one end."""

    tensors: int
    bytes: int
    checksum: str = ""
    """Empty unless the transfer asks for it."""
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


def send(
    transport: Transport, weights: Weights, rank: int = 0, *, delta: Delta | None = None, copy: WeightCopy | None = None
) -> Sent:
    """Send the weights; every rank of the trainer calls, and the transport says which of them send something.

    All ranks go through the whole stream even when sending fails, because gathering a tensor takes every rank. `copy`:
    this end's, for a `delta`; weights that it has under that name already are sent from there.
    """
    stream = weights()
    with counting() as account:
        handles = transport.hand_to_engine(weights) if rank == 0 else None
        if handles is None:
            sent = _send_stream(transport, stream, rank, delta, copy)
        else:
            # Every engine begins the stream itself and pulls it tensor by tensor: nothing is ever held.
            sent = Sent(handles, _hashed(weights()) if transport.transfer.checksum else None, [])
    if sent.summary is None:
        return sent
    return replace(sent, summary=replace(sent.summary, gathered=account.gathered, copied=account.copied))


def _send_stream(
    transport: Transport, weights: NamedWeights, rank: int, delta: Delta | None, copy: WeightCopy | None
) -> Sent:
    transfer, sends = transport.transfer, transport.sends(rank)
    keeps = transfer.keep and rank == 0  # what is kept, and what is compared with the engines', is rank 0's
    try:
        if rank and not sends:
            return Sent([], None, [])
        moved = stats = TransferStats(checksum=transfer.checksum and rank == 0)
        later = None
        if keeps and (transport.streams or delta is not None):
            later = BucketWriter(transfer.bucket_bytes, transfer.version)
        if delta is None:
            stream = _watched(weights, stats, later)
        else:
            assert copy is not None
            moved = TransferStats(checksum=False)
            resent = copy.name == delta.snapshot
            watched = _watched(iter(copy) if resent else weights, stats, later)
            stream = moved.watch(watched if resent else copy.encoded(watched, delta.base, delta.snapshot))
        handles: list[Handle] = []
        if sends:
            handles = transport.send(stream, rank)
        else:
            _go_through(stream)
        retained = later.finish() if later is not None else handles if keeps else []
        return Sent(handles, replace(stats.summary(), moved=moved.summary().bytes), retained)
    finally:
        _go_through(weights)


def _go_through(stream: NamedWeights) -> None:
    """Take part in gathering what is left of a stream."""
    for _ in stream:
        pass


def _hashed(weights: NamedWeights) -> TransferSummary:
    stats = TransferStats(checksum=True)
    _go_through(stats.watch(weights))
    return stats.summary()


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

    def __init__(
        self,
        transport: Transport,
        handles: Sequence[Handle],
        rank: int,
        delta: Delta | None = None,
        copy: WeightCopy | None = None,
    ) -> None:
        self._stream: Any = transport.receive(handles, rank)
        self._delta = delta
        self._copy = copy
        self._moved = TransferStats(checksum=False)
        self._stats = TransferStats(checksum=transport.transfer.checksum)
        self._where = f"engine {rank}, weights of version {transport.transfer.version} by {transport.name}"
        self._ended = False
        self._counting: Any = counting()
        self._account = ByteAccount()

    def __iter__(self) -> NamedWeights:
        moved = self._moved.watch(self._stream)
        if self._delta is not None:
            assert self._copy is not None
            moved = self._copy.decoded(moved, self._delta.base, self._delta.snapshot)
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


def receive(
    transport: Transport,
    handles: Sequence[Handle],
    rank: int,
    *,
    delta: Delta | None = None,
    copy: WeightCopy | None = None,
) -> WeightStream:
    """Open an engine's end; `rank` is that of the engine, `copy` this end's for a `delta`."""
    return WeightStream(transport, handles, rank, delta, copy)
