"""Weights from an engine's owner to its workers on accelerators, with stand-ins for the device: memory of the host.

Decisions, messages and the order of events; CUDA's handles themselves were never run.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import device_stand_in
import fake_sglang
import pytest
import torch
from device_stand_in import OnDevice, Segment

from roll.distributed.byte_account import counting
from roll.distributed.transports.shm_segments import ShmSegment
from roll.strategies.engines import buckets
from roll.strategies.engines.async_engine import AsyncEngine
from roll.strategies.engines.buckets import BucketReader, SharedBucket, on_device, open_device
from roll.strategies.engines.responses import ResponseRules
from roll.strategies.engines.sglang import sglang_loader as loader
from roll.strategies.engines.sglang.host import _Host
from roll.strategies.engines.sglang.sglang_channel import Answers, answer
from roll.strategies.engines.vllm.vllm_engine import VllmBackend


@pytest.fixture
def events(monkeypatch):
    """What was done, in order; with the stand-ins in place."""
    return device_stand_in.install(monkeypatch)


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


@pytest.fixture
def sglang(events, monkeypatch):
    """SGLang's backend and host with a stand-in for its engine; `told`: the paths of the buckets."""
    fake_sglang.install(monkeypatch)
    engines, told = [], []
    bucket = _Host.do_bucket

    async def do_bucket(self, path, entries):
        told.append(path)
        await bucket(self, path, entries)

    def start(**arguments):
        backend = fake_sglang.Backend(bucket_bytes=256, **arguments)
        engines.append(AsyncEngine(backend, ResponseRules(frozenset({99}), 100), timeout=20.0))
        return SimpleNamespace(engine=engines[-1], fake=backend.fake, told=told)

    monkeypatch.setattr(_Host, "do_bucket", do_bucket)
    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("opens", "stays"), [((True, True), True), ((True, False), False)])
def test_sglang_is_told_of_memory_on_the_device_if_all_its_ranks_can_open_it(sglang, stages, opens, stays):
    run = sglang(tp_size=2 // stages, pp_size=stages)
    for rank, can in zip(run.fake.ranks, opens, strict=True):
        if not can:
            rank.loader.open_device = lambda path: False
    sent = {"w": torch.ones(4).as_subclass(OnDevice), **weights()}
    with counting() as account:
        run.engine.update_weights(1, sent.items())
    assert all(same(rank.weights, sent) for rank in run.fake.ranks)
    assert len(run.told) > 2 and {on_device(path) for path in run.told} == {stays}
    assert (account.copied == 0) == stays


def test_ranks_of_sglang_answer_once_what_they_copied_on_their_device_is_there(sglang, events):
    run = sglang()
    (rank,) = run.fake.ranks
    rank.parameter = torch.zeros(1).as_subclass(OnDevice)
    load, answer = rank.load_weights, rank.loader.answer
    rank.load_weights = lambda tensors: (load(tensors), events.append("loaded"))
    rank.loader.answer = lambda *args, **kwargs: (events.append("answered"), answer(*args, **kwargs))
    run.engine.update_weights(1, {"w": torch.ones(4).as_subclass(OnDevice), **weights()}.items())
    bucket = ["settled", "loaded", "settled", "answered"]  # the owner's copies; the rank's
    assert events == ["settled", "answered", *(bucket * len(run.told)), "answered"]


def test_a_rank_of_sglang_brings_weights_from_another_ranks_device_to_its_own(monkeypatch):
    sent = {"there": torch.randn(3).as_subclass(OnDevice), "on the host": torch.randn(3)}
    got = []
    model = SimpleNamespace(parameters=lambda: iter([torch.zeros(1, device="meta")]), load_weights=got.extend)
    monkeypatch.setattr(loader, "BucketReader", lambda: SimpleNamespace(read=lambda path, entries: iter(sent.items())))
    monkeypatch.setattr(loader, "answer", lambda path, yes: None)
    told = torch.frombuffer(bytearray(json.dumps(["update", "", "{}", [["w"]], False]).encode()), dtype=torch.uint8)
    loader.load(model, [("bucket", told)])
    loader._readers.clear()
    assert [(name, tensor.device.type) for name, tensor in got] == [("there", "meta"), ("on the host", "cpu")]


def test_a_process_with_two_models_answers_for_both_and_all_processes_are_waited_for():
    given = Answers(2)

    async def wait():
        waiting = asyncio.create_task(given.wait(5))
        for worker, yes in ((7, True), (7, False), (8, True)):
            answer(given.path, yes, worker)
            await asyncio.sleep(0.01)
            assert waiting.done() == (worker == 8)
        return await waiting

    assert not asyncio.run(wait())
    given.clear()
    answer(given.path, True)
    with pytest.raises(TimeoutError, match="answered by 1 of the 2 processes"):
        asyncio.run(given.wait(0.01))
