"""Weights on their way to an engine's workers: out of a bucket as they went in, and not copied without need."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
import uuid

import pytest
import torch

from roll.configs.catalog.transport_table import Lane
from roll.distributed.transports import Transfer, receive, send
from roll.distributed.transports.rendezvous import RendezvousStore
from roll.distributed.transports.shared import SharedMemoryTransport
from roll.distributed.weights import weights_checksum
from roll.strategies.engines.buckets import BucketReader, SharedBucket
from roll.strategies.engines.weight_feed import WeightFeed
from roll.utils.loop_thread import LoopThread


async def stream(tensors):
    for name, tensor in tensors.items():
        yield name, tensor


@pytest.mark.parametrize("size", [7, 64, 10_000])
def test_tensors_come_out_of_buckets_of_any_size_as_they_went_in(size):
    sent = {
        "matrix": torch.randn(13, 5),
        "half": torch.randn(4, 3).to(torch.bfloat16),
        "number": torch.tensor(3.5),
        "transposed": torch.randn(6, 4).T,
        "empty": torch.empty(0, 3),
        "whole": torch.arange(9),
    }

    async def send():
        bucket, reader, got = SharedBucket(size), BucketReader(), {}
        try:
            async for path, entries, _ in bucket.fill(stream(sent)):
                used = sum(sent[name].nbytes for name, *_ in entries)
                assert used <= max(size, *(tensor.nbytes for tensor in sent.values()))
                got.update((name, tensor.clone()) for name, tensor in reader.read(path, entries))
        finally:
            bucket.close()
        return got

    received = asyncio.run(send())
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


def read_batches(connection):
    """An engine's worker process: answers each batch with the bytes of its tensors."""
    reader = BucketReader()
    while (batch := connection.recv()) is not None:
        found = reader.read(*batch)
        connection.send([(n, str(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8).tolist()) for n, t in found])


@pytest.fixture
def worker():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_batches, args=(theirs,), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join(30)
    assert process.exitcode == 0


class Relay:
    """The trainer, and an engine's owner that tells its worker about each batch."""

    def __init__(self, load, **changes):
        self._store = store = RendezvousStore("127.0.0.1")
        transfer = Transfer(version=1, name=uuid.uuid4().hex, timeout=20.0, checksum=True, **changes)
        self.batches = 0
        self.begun = 0
        self._load = load
        self._transport = SharedMemoryTransport(transfer, store.address, (Lane((0,), (0,)),))

    def run(self, tensors, bucket_size=64):
        def source():
            for name, tensor in tensors.items():
                self.begun += 1
                yield name, tensor

        sent = []
        sender = threading.Thread(target=lambda: sent.append(send(self._transport, source)))
        sender.start()
        loop = LoopThread("engine")
        try:
            with receive(self._transport, [], 0) as incoming:
                feed = WeightFeed(incoming, loop.loop)
                future = loop.submit(self._relay(feed, bucket_size))
                feed.serve(future)
                future.result(30)
            sender.join(30)
            assert incoming.summary() == sent[0].summary
        finally:
            loop.stop(5)

    async def _relay(self, weights, bucket_size):
        bucket = SharedBucket(bucket_size)
        try:
            async for path, entries, _ in bucket.fill(weights):
                self._load(path, entries)
                self.batches += 1
        finally:
            bucket.close()


def test_a_worker_reads_the_trainers_buckets_where_they_lie(worker):
    torch.manual_seed(0)
    sent = {f"w{i}": torch.randn(30 + i) for i in range(60)}
    sent |= {"half": torch.randn(4, 3).bfloat16(), "large": torch.arange(5000), "number": torch.tensor(2.5)}
    paths, got = set(), {}

    def load(path, entries):
        paths.add(path)
        worker.send((path, entries))
        for name, dtype, shape, data in worker.recv():
            kind = getattr(torch, dtype.removeprefix("torch."))
            got[name] = torch.tensor(data, dtype=torch.uint8).view(kind).view(shape)

    relay = Relay(load, bucket_bytes=1000)
    relay.run(sent)
    assert list(got) == list(sent)
    assert weights_checksum(got.items()) == weights_checksum(sent.items())
    assert all(path.startswith("/dev/shm/") for path in paths), "a tensor was copied on its way"
    assert relay.batches > 2 * len(paths), "segments should be used again"


def test_the_trainer_fills_one_bucket_while_the_engine_loads_the_other():
    sent = {f"w{i}": torch.full((300,), float(i)) for i in range(8)}  # a bucket each

    def load(path, entries):
        ((name, *_),) = entries
        # It has filled the next bucket, and waits with one more tensor for the bucket that is loaded now.
        wanted = min(int(name[1:]) + 3, len(sent))
        deadline = time.monotonic() + 5
        while relay.begun < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        assert relay.begun == wanted

    relay = Relay(load, bucket_bytes=1)
    relay.run(sent)
    assert relay.batches == len(sent)
