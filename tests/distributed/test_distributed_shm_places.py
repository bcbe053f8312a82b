"""Weights in memory that other processes can open: they stay what they are, and are sent from where they lie."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transfers import made

from roll.distributed.transports import TransferSummary, receive, send
from roll.distributed.transports import shared as shared_transport
from roll.distributed.transports.rendezvous import RendezvousStore
from roll.distributed.transports.shm_places import locate, share
from roll.distributed.transports.shm_segments import attach
from roll.distributed.weights import weights_checksum


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 7).to(torch.bfloat16))


def opened(tensor: Tensor) -> Tensor:
    """Return what another process finds."""
    place = locate(tensor)
    assert place is not None
    assert place.stays
    data = torch.from_numpy(attach(place.token).copy())
    return data[place.start : place.start + tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def test_a_model_trains_on_in_shared_memory_as_it_would_elsewhere() -> None:
    ours, plain = model(), model()
    moved = list(ours.parameters())
    ours_adamw, plain_adamw = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain))
    assert share(ours.parameters()) == sum(p.nbytes for p in plain.parameters())
    assert all(a is b for a, b in zip(moved, ours.parameters(), strict=True)), "the optimizer knows these"
    for _ in range(3):
        for network, adamw in ((ours, ours_adamw), (plain, plain_adamw)):
            adamw.zero_grad()
            hidden = network[1](network[0](torch.ones(2, 40)))
            network[2](hidden.bfloat16()).float().square().sum().backward()
            adamw.step()
    for trained, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(trained, expected)
        assert torch.equal(opened(trained), expected), "others see what was trained"


def test_what_lies_there_stays_and_what_has_no_plain_memory_is_left_alone() -> None:
    weight, gaps, empty = torch.randn(8, 8), torch.randn(8, 8)[:, ::2], torch.empty(0)
    crossed, number = torch.randn(4, 5, 6).transpose(0, 1), torch.tensor(2.5)
    assert share([weight, gaps, crossed, empty, number]) == weight.nbytes + number.nbytes
    before = weight.data_ptr()
    assert share([weight, gaps, crossed, number]) == 0
    assert weight.data_ptr() == before
    assert locate(gaps) is locate(crossed) is None
    assert opened(number) == 2.5


def test_a_matrix_that_lies_by_columns_goes_on_to() -> None:
    weight = torch.randn(7, 5).t()
    expected = weight.clone()
    assert share([weight]) == weight.nbytes
    assert weight.stride() == (1, 5)
    assert torch.equal(opened(weight), expected)
    weight.add_(1)
    assert torch.equal(opened(weight), expected + 1)


def test_each_tensor_has_a_storage_of_its_own_for_files_and_copies(tmp_path: Any) -> None:
    weights = {f"w{i}": torch.randn(10 + i) for i in range(3)}
    share(weights.values())
    assert [w.untyped_storage().nbytes() for w in weights.values()] == [40, 44, 48]
    save_file(weights, tmp_path / "weights.safetensors")
    assert weights_checksum(load_file(tmp_path / "weights.safetensors").items()) == weights_checksum(weights.items())
    assert locate(copy.deepcopy(weights["w0"])) is None


def test_the_memory_goes_with_the_last_tensor() -> None:
    weights = [torch.randn(10), torch.randn(10)]
    share(weights)
    place = locate(weights[0])
    assert place is not None
    del weights[0]
    gc.collect()
    assert os.path.exists(place.path)
    weights.clear()
    gc.collect()
    assert not os.path.exists(place.path)


# --- transfers


Consume = Callable[[Iterator[tuple[str, Tensor]]], Any]


def clones(stream: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in stream}


@pytest.fixture(scope="module")
def store() -> RendezvousStore:
    return RendezvousStore("127.0.0.1")


def transfer(
    store: RendezvousStore,
    weights: dict[str, Tensor],
    consume: Consume = clones,
    *,
    receivers: int = 1,
    sent: threading.Event | None = None,
) -> tuple[list[Any], list[TransferSummary]]:
    """Send by shared memory; (what the engines made of it, summaries of the trainer and the engines).

    `sent` is set as soon as the trainer is through.
    """
    transport = made("shared_memory", store, version=1, timeout=20.0, receivers=receivers)
    got: list[Any] = [None] * receivers
    summaries: list[Any] = [None] * (receivers + 1)

    def engine(rank: int) -> None:
        with receive(transport, [], rank) as incoming:
            got[rank] = consume(iter(incoming))
        summaries[rank + 1] = incoming.summary()

    engines = [threading.Thread(target=engine, args=(rank,)) for rank in range(receivers)]
    for thread in engines:
        thread.start()
    summaries[0] = send(transport, lambda: iter(weights.items())).summary
    if sent is not None:
        sent.set()
    for thread in engines:
        thread.join(20)
    return got, summaries


def mixed() -> dict[str, Tensor]:
    """Weights of which some lie in shared memory, among them neighbours, one alone, and the first and the last."""
    weights = {f"w{i}": torch.randn(300 + i) for i in range(9)}
    weights["w4"] = weights["w4"].bfloat16()
    weights |= {"w7": torch.randn(30, 11).t(), "w8": torch.randn(20, 12).t()}  # linear layers on the host
    share(weights[name] for name in ("w0", "w3", "w4", "w8"))
    return weights


def test_every_engine_gets_every_bit_wherever_it_lies(store: RendezvousStore) -> None:
    weights = mixed()
    got, summaries = transfer(store, weights, receivers=2)
    for engine in got:
        assert list(engine) == list(weights)
        assert weights_checksum(engine.items()) == weights_checksum(weights.items())
        assert [tensor.stride() for tensor in engine.values()] == [tensor.stride() for tensor in weights.values()]
    assert summaries[0] == summaries[1] == summaries[2]
    in_buckets = sum(weights[f"w{i}"].nbytes for i in (1, 2, 5, 6, 7))
    assert summaries[0].copied == in_buckets, "the account has the copies that were made, and no others"


def test_shared_weights_are_sent_without_a_copy_or_a_segment(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_transport, "make", lambda *_, **__: pytest.fail("a segment was made"))
    weights = {f"w{i}": torch.randn(300) for i in range(5)}
    share(weights.values())
    paths: set[str] = set()

    def look(stream: Iterator[tuple[str, Tensor]]) -> list[bool]:
        found = []
        for _, tensor in stream:
            place = locate(tensor)
            assert place is not None
            paths.add(place.path)
            found.append(place.stays)
        return found

    got, summaries = transfer(store, weights, look)
    assert got == [[True] * 5]
    assert len(paths) == 1
    assert summaries[0].copied == 0


def test_the_trainer_waits_until_nobody_reads_and_the_next_sync_brings_what_it_trained(store: RendezvousStore) -> None:
    weights = {f"w{i}": torch.full((300,), float(i)) for i in range(4)}
    share(weights.values())
    reading = threading.Event()
    go_on, sent = threading.Event(), threading.Event()

    def slowly(stream: Iterator[tuple[str, Tensor]]) -> list[float]:
        sums = []
        for _, tensor in stream:
            reading.set()
            assert go_on.wait(10)
            sums.append(float(tensor[0]))
        return sums

    results: list[Any] = []
    run = threading.Thread(target=lambda: results.append(transfer(store, weights, slowly, sent=sent)))
    run.start()
    assert reading.wait(10)
    assert not sent.wait(0.3), "the trainer may not go on: it would write where an engine reads"
    go_on.set()
    run.join(10)
    assert results[0][0] == [[0.0, 1.0, 2.0, 3.0]]
    for tensor in weights.values():
        tensor += 10
    got, _ = transfer(store, weights, lambda stream: [float(tensor[0]) for _, tensor in stream])
    assert got == [[10.0, 11.0, 12.0, 13.0]]
