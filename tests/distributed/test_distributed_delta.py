"""Delta sync: what travels of weights that both ends know, and that no delta is put on other weights."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from transfers import made

from roll.configs.catalog.transport_table import TRANSPORTS
from roll.distributed.byte_account import counting
from roll.distributed.transports import Transport, receive, send
from roll.distributed.transports.delta import Delta, WeightCopy
from roll.distributed.transports.rendezvous import RendezvousStore
from roll.distributed.weights import WeightMismatch, weights_checksum

Weights = dict[str, torch.Tensor]
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)


class Ends:
    """A sender and a receiver without a transport between them."""

    def __init__(self, weights: Weights) -> None:
        self.sender, self.receiver = WeightCopy(), WeightCopy()
        self.versions = 0
        self.travelled: list[tuple[str, torch.Tensor]] = []
        self.sync(weights, base="")

    @property
    def name(self) -> str:
        return f"v{self.versions}"

    def sync(self, weights: Weights, base: str | None = None) -> list[tuple[str, torch.Tensor]]:
        """What the engine gets."""
        base = self.name if base is None else base
        self.versions += 1
        encoded = self.sender.encoded(iter(weights.items()), base, self.name)
        self.travelled = [(name, tensor.clone()) for name, tensor in encoded]
        decoded = self.receiver.decoded(iter(self.travelled), base, self.name)
        return [(name, tensor.clone()) for name, tensor in decoded]


def same(got: list[tuple[str, torch.Tensor]], weights: Weights) -> bool:
    """Whether names, their order, types, shapes and all bits are the same."""
    return [name for name, _ in got] == list(weights) and weights_checksum(got) == weights_checksum(weights.items())


def half_changed(weights: Weights, share: float, seed: int) -> Weights:
    """A share of the elements of every second tensor has other bits."""
    generator = torch.Generator().manual_seed(seed)
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in list(changed.values())[seed % 2 :: 2]:
        flat = tensor.view(-1).view(torch.uint8).view(-1, tensor.itemsize)
        flat[torch.rand(len(flat), generator=generator) < share] ^= 1
    return changed


def test_what_travels_is_each_changed_element_with_its_place() -> None:
    a, b = torch.arange(8, dtype=torch.bfloat16).view(2, 4), torch.ones(3)
    ends = Ends({"a": a, "b": b})
    assert [name for name, _ in ends.travelled] == ["a", "b"]
    later = {"a": a.clone(), "b": b}
    later["a"][0, 3], later["a"][1, 2] = 30, 60
    assert same(ends.sync(later), later)
    ((index_name, index), (values_name, values)) = ends.travelled
    assert (index_name, values_name) == ("a@index", "a@values")
    assert index.tolist() == [3, 6] and index.dtype == torch.int32
    assert values.tolist() == [30, 60] and values.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 33), (torch.float32, 49), (torch.float8_e4m3fn, 19)])
def test_a_tensor_travels_whole_where_places_and_values_would_be_no_less(dtype: torch.dtype, most: int) -> None:
    """2 of 2 + 4 bytes: below a third of bfloat16; 4 of 4 + 4: below a half; 1 of 1 + 4: below a fifth. Of 100."""
    weights = {"w": torch.zeros(100).to(dtype)}
    for changes, pieces in ((most, 2), (most + 1, 1)):
        ends = Ends(weights)
        later = {"w": torch.cat([torch.ones(changes), torch.zeros(100 - changes)]).to(dtype)}
        assert same(ends.sync(later), later)
        assert len(ends.travelled) == pieces
        assert sum(tensor.nbytes for _, tensor in ends.travelled) <= 100 * dtype.itemsize


def test_equal_numbers_with_other_bits_travel_too() -> None:
    bits = torch.tensor([0, -(2**31), 0x7FC00000, 0x7FC00001, 5, 6, 7, 8], dtype=torch.int32)  # 0, -0, two NaNs
    ends = Ends({"w": bits.view(torch.float32)})
    later = {"w": bits[[1, 0, 3, 3, 4, 5, 6, 7]].clone().view(torch.float32)}
    assert same(ends.sync(later), later)
    assert ends.travelled[0][1].tolist() == [0, 1, 2]
    ends.sync(later)
    assert ends.travelled == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_after_many_syncs_every_bit_is_the_trainers(dtype: torch.dtype) -> None:
    shapes = [(40, 30), (1,), (), (0, 4), (7, 3), (999,)]
    weights: Weights = {f"w{i}": (torch.randn(shape) * 5).to(dtype) for i, shape in enumerate(shapes)}
    weights["not contiguous"] = torch.randn(6, 8).to(dtype).t()
    ends = Ends(weights)
    for step in range(8):
        weights = half_changed({name: w.contiguous() for name, w in weights.items()}, 0.6**step, step)
        assert same(ends.sync(weights), weights)
        if step == 4:  # everything, in between
            assert same(ends.sync(weights, base=""), weights)
            assert len(ends.travelled) == len(weights)


def test_a_delta_is_refused_by_both_ends_unless_they_have_what_it_belongs_to() -> None:
    weights = {"w": torch.zeros(10)}
    ends = Ends(weights)
    for end in (ends.sender.encoded, ends.receiver.decoded):
        with pytest.raises(WeightMismatch, match="a delta to weights v0 came to weights v1"):
            list(end(iter(weights.items()), "v0", "v2"))
    with pytest.raises(WeightMismatch, match="weights that are not complete"):
        list(WeightCopy().decoded(iter(()), "v1", "v2"))
    assert ends.sender.name == ends.receiver.name == "v1"


def test_a_copy_that_was_left_half_done_takes_no_delta() -> None:
    weights = {"a": torch.zeros(10), "b": torch.zeros(10)}
    later = half_changed(half_changed(weights, 0.2, 0), 0.2, 1)
    for base in ("", "v1"):
        ends = Ends(weights)
        broken = ends.receiver.decoded(ends.sender.encoded(iter(later.items()), base, "v2"), base, "v2")
        next(broken)
        broken.close()
        assert ends.sender.name == ends.receiver.name == ""
        with pytest.raises(WeightMismatch):
            ends.sync(later, base="v1")
        assert same(ends.sync(later, base=""), later)
        assert same(ends.sync(weights), weights)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"a": torch.zeros(10)}, "weight 'b' of v1 is missing"),
        ({"b": torch.zeros(10), "a": torch.zeros(10)}, "weight 'b' has a name, shape or type"),
        ({"a": torch.zeros(10), "b": torch.zeros(10), "c": torch.zeros(1)}, "weight 'c' has a name, shape or type"),
        ({"a": torch.zeros(10), "b": torch.zeros(5, 2)}, "weight 'b' has a name, shape or type"),
        ({"a": torch.zeros(10), "b": torch.zeros(10).half()}, "weight 'b' has a name, shape or type"),
    ],
)
def test_a_delta_of_other_names_shapes_or_types_is_an_error(later: Weights, message: str) -> None:
    ends = Ends({"a": torch.zeros(10), "b": torch.zeros(10)})
    with pytest.raises(WeightMismatch, match=message):
        ends.sync(later)
    assert ends.sender.name == ""
    assert same(ends.sync(later, base=""), later)


def test_changes_of_a_weight_that_the_receiver_lacks_are_an_error() -> None:
    copy = WeightCopy()
    list(copy.decoded(iter([("a", torch.zeros(4))]), "", "v1"))
    stream = [("b@index", torch.tensor([1], dtype=torch.int32)), ("b@values", torch.ones(1))]
    with pytest.raises(WeightMismatch, match="weight 'b' isn't in the weights v1"):
        list(copy.decoded(iter(stream), "v1", "v2"))


def test_only_the_copies_memory_is_held_and_it_is_used_again() -> None:
    ends = Ends({"a": torch.zeros(1000), "b": torch.zeros(1000)})
    places = [tensor.data_ptr() for end in (ends.sender, ends.receiver) for _, tensor in end]
    for step in range(4):
        ends.sync({"a": torch.full((1000,), step + 1.0), "b": torch.zeros(1000)}, base="" if step % 2 else None)
    assert places == [tensor.data_ptr() for end in (ends.sender, ends.receiver) for _, tensor in end]


# --- through every transport


def transferred(
    transport: Transport, delta: Delta, weights: Weights, copies: tuple[WeightCopy, WeightCopy]
) -> tuple[Any, Any, Any]:
    """(what the engine gets, what the sender says, what the engine says)."""
    said: list[Any] = []

    def sending() -> None:
        said.append(send(transport, lambda: iter(weights.items()), delta=delta, copy=copies[0]))

    thread = threading.Thread(target=sending)
    thread.start()
    if not transport.streams:
        thread.join(30)
    with receive(transport, said[0].handles if said else [], 0, delta=delta, copy=copies[1]) as incoming:
        got = [(name, tensor.clone()) for name, tensor in incoming]
    thread.join(30)
    return got, said[0], incoming.summary()


@pytest.fixture(scope="module")
def rendezvous() -> RendezvousStore:
    return RendezvousStore("127.0.0.1")


@pytest.mark.parametrize("bucket_bytes", [1, 3000])
@pytest.mark.parametrize("transport", sorted(TRANSPORTS.keys() - {"in_process"}))
def test_every_transport_carries_a_delta_and_what_is_kept_is_whole(
    rendezvous: RendezvousStore, tmp_path: Path, transport: str, bucket_bytes: int
) -> None:
    weights: Weights = {f"w{i}": torch.randn(50, 20).bfloat16() for i in range(6)}
    copies, base, group = (WeightCopy(), WeightCopy()), "", uuid.uuid4().hex
    for version in range(3):
        way = made(transport, rendezvous, version=version, bucket_bytes=bucket_bytes, group=group,
                   folder=str(tmp_path), keep=version == 2)  # fmt: skip
        delta = Delta(f"v{version}", base)
        got, sent, received = transferred(way, delta, weights, copies)
        assert same(got, weights)
        assert sent.summary == received
        assert sent.summary.moved == received.moved
        assert received.bytes == 6 * 2000
        assert received.moved < 1000 if base else received.moved == 6 * 2000
        before, weights, base = weights, half_changed(weights, 0.03, version), delta.snapshot
    with receive(made("object_store", version=2), sent.retained, 0) as incoming:
        assert same([(name, tensor.clone()) for name, tensor in incoming], before)


def test_weights_are_sent_again_as_they_were_sent_and_not_as_they_are_now() -> None:
    weights, copies = {"w": torch.zeros(100)}, (WeightCopy(), WeightCopy())
    transport, delta = made("object_store", version=1), Delta("v1")
    transferred(transport, delta, weights, copies)
    replaced = WeightCopy()
    got, _, _ = transferred(transport, delta, {"w": torch.ones(100)}, (copies[0], replaced))
    assert same(got, weights)
    assert replaced.name == "v1"


def test_the_account_has_what_both_ends_copy() -> None:
    ends = Ends({"w": torch.zeros(100)})
    later = torch.zeros(100)
    later[[3, 7]] = 1
    with counting() as account:
        ends.sync({"w": later})
    assert account.copied == 2 * 2 * 4  # two values at each end
