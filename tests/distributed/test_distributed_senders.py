"""Several ranks of the trainer that send: a share each, or all of it to engines of their own. On threads."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transfers import made

from roll.configs.catalog.transport_table import Lane
from roll.distributed.transports import Sent, Transport, WeightStream, receive, send, shared, shm_segments
from roll.distributed.transports.rendezvous import RendezvousStore
from roll.distributed.weights import weights_checksum

Named = list[tuple[str, torch.Tensor]]
SESSION = uuid.uuid4().hex[:8]


def sizes_of(seed: int, count: int = 120) -> Named:
    """Tensors of very different sizes, some of them empty or larger than a bucket."""
    rng = random.Random(seed)
    return [(f"w{i}", torch.full((rng.choice((0, 1, 7, 60, 250, 900)),), float(i))) for i in range(count)]


@pytest.fixture(scope="module")
def rendezvous() -> RendezvousStore:
    return RendezvousStore("127.0.0.1")


def taking_turns(senders: tuple[int, ...], engines: int) -> tuple[Lane, ...]:
    return (Lane(senders, tuple(range(engines))),)


def one_each(*sources: int) -> tuple[Lane, ...]:
    """Of each engine the rank that sends it everything."""
    engines = range(len(sources))
    return tuple(
        Lane((source,), tuple(i for i in engines if sources[i] == source), on_device=True)
        for source in dict.fromkeys(sources)
    )


@pytest.fixture
def make(rendezvous: RendezvousStore) -> Callable[..., Transport]:
    def make(lanes: tuple[Lane, ...], **keys: Any) -> Transport:
        settings = {"bucket_bytes": 4000, "timeout": 10.0, **keys}
        return made("shared_memory", rendezvous, name=f"{SESSION}-{uuid.uuid4().hex}", lanes=lanes, **settings)

    return make


class Run:
    """All ranks of a trainer and all engines at once. What passes a rank waits for every other, as a gather does."""

    def __init__(
        self,
        transport: Transport,
        weights: Named,
        ranks: int,
        engines: int,
        consume: Callable[[WeightStream, int], Any] = lambda incoming, _: [(n, t.clone()) for n, t in incoming],
        fails: tuple[int, int] = (-1, -1),
    ) -> None:
        self.weights, self.fails = weights, fails
        self.barrier = threading.Barrier(ranks)
        self.failed = threading.Event()
        self.passed = [0] * ranks
        self.sent: dict[int, Sent] = {}
        self.got: dict[int, Any] = {}
        self.errors: dict[str, BaseException] = {}
        ends = [(f"rank {r}", lambda r=r: self.sent.update({r: send(transport, lambda: self.stream(r), r)}))
                for r in range(ranks)]  # fmt: skip
        ends += [(f"engine {e}", lambda e=e: self.receive(transport, e, consume)) for e in range(engines)]
        threads = [threading.Thread(target=self.end, args=each) for each in ends]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        self.seconds = time.monotonic() - started

    def stream(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for i, each in enumerate(self.weights):
            if (rank, i) == self.fails:
                raise KeyError(f"rank {rank} failed")  # before the gather
            if self.fails == (-1, -1):
                self.barrier.wait(20)
            elif i == self.fails[1]:  # in a gather they would wait for it for ever
                self.failed.wait(20)
            self.passed[rank] += 1
            yield each

    def receive(self, transport: Transport, engine: int, consume: Callable[[WeightStream, int], Any]) -> None:
        with receive(transport, [], engine) as incoming:
            self.got[engine] = consume(incoming, engine)
        incoming.summary()

    def end(self, name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.errors[name] = error
            if name == f"rank {self.fails[0]}":
                self.failed.set()


def one_behind(incoming: WeightStream, engine: int) -> Named:
    """Hold the tensor before the one that is read, as engines do that load in the background; one end is slow."""
    got, held = [], None
    for i, (name, tensor) in enumerate(incoming):
        if held is not None:
            got.append((held[0], held[1].clone()))
        held = name, tensor
        if i % 9 == engine:
            time.sleep(0.002)
    return [*got, (held[0], held[1].clone())]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_shares_arrive_whole_in_order_and_are_copied_once(
    make: Callable[..., Transport], ranks: int, seed: int
) -> None:
    weights = sizes_of(seed)
    run = Run(make(taking_turns(tuple(range(ranks)), 2)), weights, ranks, 2, one_behind)
    assert not run.errors
    for engine in (0, 1):
        assert [name for name, _ in run.got[engine]] == [name for name, _ in weights]
        assert weights_checksum(run.got[engine]) == weights_checksum(weights) == run.sent[0].summary.checksum
    total = sum(tensor.nbytes for _, tensor in weights)
    copied = [sent.summary.copied for sent in run.sent.values()]
    assert sum(copied) == total
    assert all(each > 0.4 * total / ranks for each in copied)
    assert all(sent.summary.bytes == total for sent in run.sent.values())
    assert all(sent.summary.checksum == "" for rank, sent in run.sent.items() if rank), "one rank hashes"


def test_the_first_sender_alone_takes_tensors_that_are_larger_than_a_bucket(
    make: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, list[int]] = {}
    original = shm_segments.ShmSegment.__init__
    ranks: dict[int, int] = {}

    def watching(self: Any, transfer: str, size: int) -> None:
        original(self, transfer, size)
        made.setdefault(ranks.setdefault(threading.get_ident(), len(ranks)), []).append(size)

    monkeypatch.setattr(shm_segments.ShmSegment, "__init__", watching)
    weights = [(f"w{i}", torch.full((2000 if i % 4 == 2 else 200,), float(i))) for i in range(60)]
    run = Run(make(taking_turns((0, 1, 2), 1), bucket_bytes=1600), weights, 3, 1, one_behind)
    assert not run.errors
    assert weights_checksum(run.got[0]) == weights_checksum(weights)
    grown = [sizes for sizes in made.values() if max(sizes) > 1600]
    assert len(made) == 3
    assert len(grown) == 1
    assert max(grown[0]) == 8000
    assert all(sent.summary.copied > 0 for sent in run.sent.values())


def test_ranks_that_are_not_named_only_go_along(make: Callable[..., Transport]) -> None:
    weights = sizes_of(9)
    run = Run(make(taking_turns((0, 2), 1)), weights, 4, 1)
    assert not run.errors
    assert weights_checksum(run.got[0]) == weights_checksum(weights)
    assert [sent.summary is None for _, sent in sorted(run.sent.items())] == [False, True, False, True]
    assert run.passed == [len(weights)] * 4


def test_each_source_serves_its_own_engines(make: Callable[..., Transport]) -> None:
    weights = sizes_of(5)
    run = Run(make(one_each(2, 1, 2)), weights, 3, 3, one_behind)
    assert not run.errors
    for engine in range(3):
        assert [name for name, _ in run.got[engine]] == [name for name, _ in weights]
        assert weights_checksum(run.got[engine]) == weights_checksum(weights)
    total = sum(tensor.nbytes for _, tensor in weights)
    # Rank 0 serves none, and still says what the engines must have got.
    assert [run.sent[rank].summary.copied for rank in range(3)] == [0, total, total]
    assert run.sent[0].summary.checksum == weights_checksum(weights)


def test_one_engine_alone_takes_part_in_a_transfer(make: Callable[..., Transport]) -> None:
    weights = sizes_of(6)
    run = Run(make((Lane((1,), (1,), on_device=True),), timeout=0.5), weights, 2, 0)
    assert set(run.errors) == {"rank 1"}  # nobody came
    assert "the trainer's rank 1 waited 0.5 s for the engines to finish with bucket" in str(run.errors["rank 1"])


def test_nothing_to_send_ends_for_everybody(make: Callable[..., Transport]) -> None:
    for lanes in (taking_turns((0, 1, 2), 2), one_each(1, 0)):
        run = Run(make(lanes), [], 3, 2)
        assert not run.errors
        assert run.got == {0: [], 1: []}


def test_every_sender_is_at_most_two_buckets_ahead(make: Callable[..., Transport]) -> None:
    weights = [(f"w{i}", torch.full((500,), float(i))) for i in range(24)]  # a bucket each
    lead: list[int] = []
    runs: list[Run] = []

    def slowly(incoming: WeightStream, _: int) -> None:
        for i, (_, tensor) in enumerate(incoming):
            time.sleep(0.01)
            assert tensor[0] == i
            lead.append(max(runs[0].passed) - i if runs else 0)

    class Watched(Run):
        def __init__(self, *args: Any) -> None:
            runs.append(self)
            super().__init__(*args)

    run = Watched(make(taking_turns((0, 1, 2), 1), bucket_bytes=2000), weights, 3, 1, slowly)
    assert not run.errors
    assert max(lead) <= 2 * 3 + 3  # two of each; the one that is read, one that waits for its buffer, one gathered


@pytest.mark.parametrize("lanes", [taking_turns((0, 1, 2), 3), one_each(0, 1, 2)])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_fails_ends_everybodys_wait(make: Callable[..., Transport], lanes: Any, rank: int) -> None:
    weights = [(f"w{i}", torch.zeros(250)) for i in range(30)]
    run = Run(make(lanes), weights, 3, 3, fails=(rank, 7))
    assert isinstance(run.errors[f"rank {rank}"], KeyError)
    for engine in range(3):
        assert f"the trainer's rank {rank}: KeyError" in str(run.errors[f"engine {engine}"])
    assert run.seconds < 4, "nobody waited for a time limit"


@pytest.mark.parametrize("lanes", [taking_turns((0, 1), 2), one_each(0, 1)])
def test_an_engine_that_fails_lets_every_rank_go_through_the_stream(make: Callable[..., Transport], lanes: Any) -> None:
    def refuse(incoming: WeightStream, engine: int) -> None:
        for i, _ in enumerate(incoming):
            if engine == 1 and i == 3:
                raise ValueError("unknown name")

    weights = [(f"w{i}", torch.zeros(250)) for i in range(30)]
    run = Run(make(lanes), weights, 2, 2, refuse)
    for end in ("rank 0", "rank 1", "engine 0"):
        assert "engine 1: ValueError: unknown name" in str(run.errors[end])
    assert run.passed == [30, 30], "gathering takes every rank"
    assert run.seconds < 4


def test_a_receiver_keeps_the_memory_of_all_senders_open(
    make: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A segment's name is gone once everybody has opened it: it can't be opened again.
    opened: list[str] = []
    attach = shm_segments.attach
    monkeypatch.setattr(shared, "attach", lambda token: opened.append(token["name"]) or attach(token))
    weights = [(f"w{i}", torch.full((500,), float(i))) for i in range(64)]
    run = Run(make(taking_turns(tuple(range(8)), 1), bucket_bytes=2000), weights, 8, 1)
    assert not run.errors
    assert len(opened) == len(set(opened)) == 16
    assert not list(shm_segments.FOLDER.glob(f"{shm_segments.PREFIX}{SESSION}*"))
