"""Both ends of every transport in this process, on threads: what arrives, what is held, what a failure leaves."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_workers import weights as made_weights
from transfers import STREAMING, changed, made, num_engines

from roll.configs.catalog.transport_table import TRANSPORTS
from roll.distributed.transports import Sent, Transport, WeightStream, receive, send, shared, shm_segments
from roll.distributed.transports import file_transport as files_module
from roll.distributed.transports.bucket_layout import buffer_size
from roll.distributed.transports.rendezvous import RendezvousStore, TransferChannel
from roll.distributed.weights import WeightMismatch, WeightSyncError, weights_checksum

Consume = Callable[[WeightStream], Any]
SESSION = uuid.uuid4().hex[:8]
WEIGHTS = list(made_weights())


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    return iter(WEIGHTS)


@pytest.fixture(scope="module")
def rendezvous() -> RendezvousStore:
    return RendezvousStore("127.0.0.1")


@pytest.fixture
def make(rendezvous: RendezvousStore, tmp_path: Path) -> Callable[..., Transport]:
    def make(transport: str, **changes: Any) -> Transport:
        name, folder = f"{SESSION}-{uuid.uuid4().hex}", str(tmp_path / "weights")
        return made(transport, rendezvous, **{"name": name, "folder": folder, **changes})

    return make


@pytest.fixture(autouse=True)
def _no_shared_memory_is_left() -> Iterator[None]:
    yield
    assert not names()


def names() -> set[str]:
    """Our files in /dev/shm; other runs of the machine have theirs."""
    return {path.name for path in shm_segments.FOLDER.glob(f"{shm_segments.PREFIX}{SESSION}*")}


def copied(incoming: WeightStream) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in incoming]


class Run:
    """One transfer to several receivers; errors are kept, by end."""

    def __init__(self, transport: Transport, source: Any = weights, consume: Consume | list[Consume] = copied) -> None:
        self.sent: Sent | None = None
        self.errors: dict[str, BaseException] = {}
        self.got: dict[int, Any] = {}
        self.summaries: dict[int, Any] = {}
        consumers = consume if isinstance(consume, list) else [consume] * num_engines(transport)
        started = time.monotonic()
        if not transport.streams:
            self._end("sender", lambda: setattr(self, "sent", send(transport, source)))
        handles = self.sent.handles if self.sent else []
        ends = [
            threading.Thread(target=self._receive, args=(transport, handles, i, c)) for i, c in enumerate(consumers)
        ]
        if transport.streams:
            work = lambda: setattr(self, "sent", send(transport, source))  # noqa: E731
            ends.append(threading.Thread(target=self._end, args=("sender", work)))
        for thread in ends:
            thread.start()
        for thread in ends:
            thread.join(30)
            assert not thread.is_alive()
        self.seconds = time.monotonic() - started

    def _end(self, name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.errors[name] = error

    def _receive(self, transport: Transport, handles: Any, rank: int, consume: Consume) -> None:
        def work() -> None:
            with receive(transport, handles, rank) as incoming:
                self.got[rank] = consume(incoming)
            self.summaries[rank] = incoming.summary()

        self._end(f"engine {rank}", work)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**6])
def test_every_engine_gets_every_bit_in_order(
    make: Callable[..., Transport], transport: str, bucket_bytes: int
) -> None:
    run = Run(make(transport, receivers=2, bucket_bytes=bucket_bytes), consume=[copied, copied])
    assert not run.errors
    expected = list(weights())
    for rank in (0, 1):
        assert [name for name, _ in run.got[rank]] == [name for name, _ in expected]
        for (_, got), (_, sent) in zip(run.got[rank], expected, strict=True):
            assert got.dtype == sent.dtype
            assert torch.equal(got, sent)
        assert run.summaries[rank] == run.sent.summary
    assert run.sent.summary.checksum == weights_checksum(weights())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_to_send_is_a_valid_stream(make: Callable[..., Transport], transport: str) -> None:
    run = Run(make(transport), source=lambda: iter(()))
    assert not run.errors
    assert run.got == {0: []}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_kept_stays_as_it_was(make: Callable[..., Transport], transport: str) -> None:
    tensor = torch.arange(100.0)
    sending = make(transport, keep=True)
    run = Run(sending, source=lambda: iter([("w", tensor)]))
    tensor += 1
    later = make("file" if transport == "file" else "object_store")
    with receive(later, run.sent.retained, 0) as incoming:
        ((_, got),) = copied(incoming)
    assert torch.equal(got, torch.arange(100.0))


def test_in_one_process_the_tensors_are_handed_over_when_they_are_asked_for(make: Callable[..., Transport]) -> None:
    tensor, asked = torch.randn(4), []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        asked.append(True)
        yield "w", tensor

    transport = make("in_process", checksum=False)
    sent = send(transport, source)
    asked.clear()
    with receive(transport, sent.handles, 0) as incoming:
        assert next(iter(incoming))[1].data_ptr() == tensor.data_ptr()
    assert asked == [True]
    with pytest.raises(WeightMismatch, match="expected weights of version 4, the trainer's are 3"):
        list(receive(changed(transport, version=4), sent.handles, 0))


@pytest.mark.parametrize("transport", STREAMING)
def test_a_sender_is_never_more_than_two_buckets_ahead(make: Callable[..., Transport], transport: str) -> None:
    begun, lead = [0], []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(12):
            begun[0] = i + 1
            yield f"w{i}", torch.full((250,), float(i))  # a bucket each

    def slowly(incoming: WeightStream) -> None:
        for i, (_, tensor) in enumerate(incoming):
            time.sleep(0.02)
            assert tensor[0] == i
            lead.append(begun[0] - i)

    run = Run(make(transport), source=source, consume=slowly)
    assert not run.errors
    # The one that is read, two that are full, one that waits for a buffer; with broadcast one more on its way.
    assert max(lead) <= 5


def test_shared_memory_holds_two_buckets_and_a_larger_tensor_gets_a_larger_one(
    make: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    original = shm_segments.ShmSegment.__init__

    def counting(self: Any, transfer: str, size: int) -> None:
        original(self, transfer, size)
        held.append(size)

    monkeypatch.setattr(shm_segments.ShmSegment, "__init__", counting)
    sizes = (100, 100, 100, 1000, 100, 100, 100)
    run = Run(
        make("shared_memory", bucket_bytes=400),
        source=lambda: ((f"w{i}", torch.full((n,), float(i))) for i, n in enumerate(sizes)),
        consume=lambda incoming: [float(tensor.sum()) for _, tensor in incoming],
    )
    assert run.got[0] == [i * n for i, n in enumerate(sizes)]
    assert held == [400, 400, 4000]


def test_the_next_sync_finds_the_memory_of_the_one_before(
    make: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    opened: list[str] = []
    original, attach = shm_segments.ShmSegment.__init__, shm_segments.attach
    monkeypatch.setattr(shm_segments, "_reusable", [])
    monkeypatch.setattr(
        shm_segments.ShmSegment, "__init__", lambda self, name, size: made.append(size) or original(self, name, size)
    )
    monkeypatch.setattr(shared, "attach", lambda token: opened.append(token["name"]) or attach(token))
    for version in range(3):
        tensors = [(f"w{i}", torch.full((1 << 18,), float(10 * version + i))) for i in range(6)]
        run = Run(
            make("shared_memory", bucket_bytes=1 << 20),
            source=lambda tensors=tensors: iter(tensors),
            consume=lambda incoming: [float(tensor[0]) for _, tensor in incoming],
        )
        assert not run.errors
        assert all(got == [10.0 * version + i for i in range(6)] for got in run.got.values())
    assert made == [1 << 20] * 2
    assert len(set(opened)) == len(opened) == 2  # by the first engine that came
    assert not names()


def test_an_engine_that_keeps_tensors_of_the_stream_is_told_so_before_they_change(
    make: Callable[..., Transport],
) -> None:
    run = Run(make("shared_memory", bucket_bytes=1), consume=lambda incoming: list(incoming))
    assert "still holds tensors of bucket 0 when it asks for bucket 2" in str(run.errors["engine 0"])
    assert "engine 0: WeightSyncError" in str(run.errors["sender"])


def test_broadcast_buffers_are_used_again_only_when_nobody_looks_at_them(make: Callable[..., Transport]) -> None:
    run = Run(make("broadcast", bucket_bytes=1), consume=lambda incoming: list(incoming))
    assert not run.errors
    assert weights_checksum(run.got[0]) == weights_checksum(weights())


def test_buffers_grow_with_the_model_up_to_a_limit() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    sizes = [buffer_size(i, 256 * 2**20, cpu) // 2**20 for i in range(9)]
    assert sizes == [1, 1, 4, 4, 16, 16, 16, 16, 16]
    assert buffer_size(1000, 256 * 2**20, gpu) == 256 * 2**20
    assert buffer_size(1000, 5, gpu) == buffer_size(0, 5, cpu) == 5


# --- failures


def failing(after: int) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(20):
            if i == after:
                raise RuntimeError("the gather failed")
            yield f"w{i}", torch.zeros(250)

    return source


def refusing(incoming: WeightStream) -> None:
    for i, _ in enumerate(incoming):
        if i == 3:
            raise KeyError("unknown name")


@pytest.mark.parametrize("transport", STREAMING)
@pytest.mark.parametrize("after", [0, 7])
def test_a_sender_that_fails_ends_the_engines_wait(make: Callable[..., Transport], transport: str, after: int) -> None:
    run = Run(make(transport, receivers=2), source=failing(after))
    assert str(run.errors["sender"]) == "the gather failed"
    for rank in (0, 1):
        assert "the trainer: RuntimeError: the gather failed" in str(run.errors[f"engine {rank}"])
    assert run.seconds < 4, "nobody waited for a time limit"


@pytest.mark.parametrize("transport", STREAMING)
def test_an_engine_that_fails_ends_everybodys_wait_and_the_trainers_ranks_go_through_the_stream(
    make: Callable[..., Transport], transport: str
) -> None:
    asked = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(20):
            asked.append(i)
            yield f"w{i}", torch.zeros(250)

    run = Run(make(transport, receivers=2), source=source, consume=[copied, refusing])
    assert isinstance(run.errors["engine 1"], KeyError)
    for end in ("sender", "engine 0"):
        assert "engine 1: KeyError: 'unknown name'" in str(run.errors[end])
    assert run.seconds < 4
    assert asked == list(range(20)), "gathering takes every rank, so rank 0 may not stop"
    # The same trainer and the engines that are left go on under another group.
    again = Run(make(transport))
    assert not again.errors


@pytest.mark.parametrize("transport", STREAMING)
def test_an_engine_that_never_comes_is_named_after_the_time_limit(
    make: Callable[..., Transport], transport: str
) -> None:
    run = Run(make(transport, timeout=0.5, receivers=2), consume=[copied])
    expected = {"shared_memory": "the engines to finish with bucket 0", "broadcast": "engine 1 to join"}[transport]
    told = " ".join(map(str, run.errors.values()))
    assert f"waited 0.5 s for {expected}" in told
    assert "version 3" in told


@pytest.mark.parametrize("transport", STREAMING)
def test_the_controller_ends_a_transfer_whose_other_end_has_died(
    make: Callable[..., Transport], rendezvous: RendezvousStore, transport: str
) -> None:
    waiting = make(transport, timeout=60.0)
    threading.Timer(0.2, rendezvous.abort, (waiting.transfer.name, "actor_infer rank 0 died")).start()
    with pytest.raises(WeightSyncError, match="the trainer gave up: actor_infer rank 0 died"):
        send(waiting, weights)


@pytest.mark.parametrize("transport", ["object_store", "file", "shared_memory", "broadcast"])
def test_another_version_is_refused(make: Callable[..., Transport], transport: str) -> None:
    sending = make(transport)
    if sending.streams:
        channel = TransferChannel(sending, "the trainer", sending.lanes[0])
        channel.publish("bucket/0" if transport == "shared_memory" else "device", "cpu")
    handles = [] if sending.streams else send(sending, weights).handles
    later = changed(sending, version=4)
    with (
        pytest.raises(WeightMismatch, match=r"expected weights of version 4.* (holds|sent) 3"),
        receive(later, handles, 0) as incoming,
    ):
        copied(incoming)


def test_a_bucket_that_is_missing_is_noticed(make: Callable[..., Transport], tmp_path: Path) -> None:
    written = make("file", bucket_bytes=1)
    (folder,) = send(written, weights).handles
    sorted(Path(folder).glob("*.safetensors"))[2].unlink()
    with pytest.raises(WeightSyncError, match=r"engine 0 couldn't read weights of version 3 from .*No such file"):
        Run(written, consume=copied) and list(receive(written, [folder], 0))

    stored = make("object_store", bucket_bytes=1)
    handles = send(stored, weights).handles
    with pytest.raises(WeightMismatch, match="place 2"):
        list(receive(stored, [*handles[:2], *handles[3:]], 0))

    late = make("shared_memory", timeout=0.5)
    with pytest.raises(WeightSyncError, match=r"engine 0 waited 0.5 s for bucket 0 from the trainer"):
        list(receive(late, [], 0))


def test_an_engine_that_reads_only_a_part_has_failed(make: Callable[..., Transport]) -> None:
    run = Run(make("object_store"), consume=lambda incoming: next(iter(incoming)))
    assert "the engine stopped reading after 1 tensors, 1600 bytes" in str(run.errors["engine 0"])


@pytest.mark.parametrize("number", [errno.ENOSPC, None])
def test_full_shared_memory_is_an_error_that_says_what_to_do(
    make: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    import resource

    monkeypatch.setattr(shm_segments, "_reusable", [])  # what other tests have left would be large enough
    if number is None:  # a real limit, on files of this process
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, before[1]))
    else:

        def full(*_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", full)
    try:
        run = Run(make("shared_memory", bucket_bytes=8 * 2**20))
    finally:
        if number is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = str(run.errors["sender"])
    assert "1 MiB of shared memory are needed for a bucket of weights" in told
    assert "lower model_update_buffer_size_mb" in told
    assert "the trainer: WeightSyncError: 1 MiB" in str(run.errors["engine 0"])


def test_a_full_disk_leaves_no_half_folder(make: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch) -> None:
    transport = make("file")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files_module, "save_file", full)
    with pytest.raises(WeightSyncError, match=r"version 3 couldn't be written to .*No space left"):
        send(transport, weights)
    assert list(Path(transport.folder).iterdir()) == []


def test_older_files_are_deleted_and_the_folder_is_one_of_hugging_faces(make: Callable[..., Transport]) -> None:
    first, second = (send(make("file", version=v), weights).handles for v in (3, 4))
    root = Path(second[0]).parent
    make("file").discard(second)
    assert [str(path) for path in root.iterdir()] == second
    assert not Path(first[0]).exists()
    index = json.loads((Path(second[0]) / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for _, t in weights()), "version": 4}
    assert list(index["weight_map"]) == [name for name, _ in weights()]


def test_litter_of_killed_senders_is_swept_and_nobody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shm_segments, "FOLDER", tmp_path)
    in_use = shm_segments.ShmSegment("a", 4096)
    litter, fresh = tmp_path / f"{shm_segments.PREFIX}b-1-0", tmp_path / f"{shm_segments.PREFIX}c-1-0"
    for path in (litter, fresh):
        path.touch()
    for path in (litter, Path(in_use.token["path"])):
        os.utime(path, (0, 0))
    shm_segments.sweep()
    assert not litter.exists()
    assert fresh.exists(), "its maker may be about to lock it"
    assert Path(in_use.token["path"]).exists()
    in_use.close()
    assert not Path(in_use.token["path"]).exists()
