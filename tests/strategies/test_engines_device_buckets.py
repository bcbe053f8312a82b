"""Weights from an engine's owner to its workers on accelerators, with stand-ins for the device: memory of the host.

Decisions, messages and the order of events; CUDA's handles themselves were never run.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from roll.distributed.byte_account import counting
from roll.distributed.transports.shm_segments import ShmSegment
from roll.strategies import buckets
from roll.strategies.buckets import BucketReader, SharedBucket, on_device, open_device
from roll.strategies.vllm.engine import VllmBackend

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


@pytest.fixture
def events(monkeypatch):
    """What was done, in order; with the stand-ins in place."""
    found = []
    stream = SimpleNamespace(synchronize=lambda: found.append("settled"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(buckets, "DeviceSegment", Segment)
    return found


async def stream(tensors):
    for name, tensor in tensors.items():
        yield name, tensor


def transfer(tensors, opens, size=256):
    """What workers got, the paths that they were told, and the bytes copied on the host."""
    got, paths = {}, []

    async def relay():
        bucket, reader = SharedBucket(size, opens), BucketReader()
        try:
            async for path, entries, stays in bucket.fill(stream(tensors)):
                assert not stays
                paths.append(path)
                got.update((name, tensor.clone()) for name, tensor in reader.read(path, entries))
        finally:
            bucket.close()

    with counting() as account:
        asyncio.run(relay())
    return got, paths, account.copied


def answers(reply, asked=None):
    """What an engine says to `opens`; None: what its workers find."""

    async def opens(path):
        if asked is not None:
            asked.append(path)
        return open_device(path) if reply is None else reply

    return opens


def weights():
    return {f"w{i}": torch.randn(10 + i).as_subclass(OnDevice) for i in range(12)}


def same(got, sent):
    return list(got) == list(sent) and all(torch.equal(got[n], t.as_subclass(torch.Tensor)) for n, t in sent.items())


def test_weights_on_the_device_stay_there_and_are_settled_before_workers_are_told(events):
    sent, asked = weights(), []
    got, paths, copied = transfer(sent, answers(None, asked))
    assert same(got, sent)
    assert all(map(on_device, paths)) and copied == 0
    assert len(asked) == 1 and events == ["settled"] * (len(paths) + 1)  # the trial and every bucket


def test_weights_go_through_the_host_where_a_worker_cant_open_memory_of_the_device(events, caplog):
    sent = weights()
    got, paths, copied = transfer(sent, answers(False))
    assert same(got, sent)
    assert not any(map(on_device, paths)) and copied == sum(tensor.nbytes for tensor in sent.values())
    assert "its workers can't open memory of cuda:0" in caplog.text


def test_weights_go_through_the_host_where_memory_of_the_device_cant_be_shared(events, monkeypatch, caplog):
    def refuse(size, device):
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(buckets, "DeviceSegment", refuse)
    sent, asked = weights(), []
    got, paths, _ = transfer(sent, answers(True, asked))
    assert same(got, sent) and not any(map(on_device, paths)) and not asked
    assert "operation not supported" in caplog.text


def test_the_rest_goes_through_the_host_when_a_larger_tensor_has_no_room_on_the_device(events, monkeypatch):
    def make(size, device):
        if size > 256:
            raise torch.OutOfMemoryError("no room")
        return Segment(size, device)

    monkeypatch.setattr(buckets, "DeviceSegment", make)
    sent = {name: torch.randn(size).as_subclass(OnDevice) for name, size in {"a": 9, "large": 100, "b": 5}.items()}
    got, paths, copied = transfer(sent, answers(None))
    assert same(got, sent)
    assert list(map(on_device, paths)) == [True, False, False] and copied == 420


def test_tensors_of_both_places_and_larger_than_a_bucket_arrive(events):
    sent = {"a": torch.randn(3), "b": torch.randn(100).as_subclass(OnDevice), "c": torch.randn(5).as_subclass(OnDevice)}
    sent |= {"d": torch.randn(7), "e": torch.randn(200), "f": torch.randn(300).as_subclass(OnDevice)}
    got, paths, _ = transfer(sent, answers(None))
    assert same(got, sent)
    assert list(map(on_device, paths)) == [False, True, True, False, False, True]


def test_weights_on_the_host_and_engines_without_such_workers_ask_nothing(events):
    asked = []
    assert not any(map(on_device, transfer({"a": torch.randn(3)}, answers(True, asked))[1]))
    assert not any(map(on_device, transfer(weights(), None)[1]))
    assert not asked and not events


def test_a_worker_that_finds_other_bytes_or_nothing_says_no():
    segment = ShmSegment("stand-in", 64)
    try:
        assert not open_device(json.dumps(segment.token))
        segment.flat[: len(buckets._MARK)] = torch.tensor(list(buckets._MARK), dtype=torch.uint8)
        assert open_device(json.dumps(segment.token))
    finally:
        segment.close()
    assert not open_device(json.dumps(segment.token)), "it is gone"


class Engine:
    """vLLM's, with workers that answer in turn."""

    def __init__(self, *opens):
        self.opens, self.updates, self.reader, self.got = opens, [], BucketReader(), {}

    def __getattr__(self, name):
        async def nothing(*args, **kwargs):
            return True

        return nothing

    async def collective_rpc(self, method, args=()):
        assert method == "opens" and on_device(*args)
        return list(self.opens)

    async def update_weights(self, request):
        info = json.loads(json.dumps(request.update_info))
        self.updates.append(info)
        self.got.update((n, t.clone()) for n, t in self.reader.read(info["path"], info["entries"]))


@pytest.mark.parametrize(("opens", "stays"), [((True, True), True), ((True, False), False)])
def test_vllm_is_told_of_memory_on_the_device_if_all_its_workers_can_open_it(events, monkeypatch, opens, stays):
    pytest.importorskip("vllm", reason="needs vllm, which isn't installed")
    description = SimpleNamespace(bucket_bytes=lambda size: size, checkpoint=lambda given: given)
    backend = VllmBackend({}, description, sleep_level=0, update_buffer_bytes=256)
    backend._engine, sent = Engine(*opens), weights()
    with counting() as account:
        asyncio.run(backend.load(1, stream(sent)))
    assert same(backend._engine.got, sent)
    assert {on_device(info["path"]) for info in backend._engine.updates} == {stays}
    assert not any(info["in_place"] for info in backend._engine.updates)
    assert (account.copied == 0) == stays
