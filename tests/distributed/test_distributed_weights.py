from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from distributed_workers import send_weights, weights
from hypothesis import given
from hypothesis import strategies as st

from roll.distributed import handles
from roll.distributed import weights as transport
from roll.distributed.ray_session import PrivateFolder
from roll.distributed.weights import WeightMismatch, receive_weights, weights_checksum


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**9])
def test_weights_arrive_bit_for_bit_under_their_names(
    monkeypatch: pytest.MonkeyPatch, packed: bool, bucket_bytes: int
) -> None:
    monkeypatch.setattr(transport, "crosses_processes", lambda: packed)
    received = list(receive_weights(send_weights(weights(), bucket_bytes, version=2), version=2))
    for (name, sent), (other, got) in zip(weights(), received, strict=True):
        assert name == other
        assert (sent.dtype, sent.shape) == (got.dtype, got.shape)
        assert torch.equal(sent, got)
    assert weights_checksum(received) == weights_checksum(weights())


def test_handles_of_one_process_lead_to_copies() -> None:
    assert not handles.crosses_processes()
    tensor = torch.nn.Parameter(torch.randn(3))
    ((name, received),) = receive_weights(send_weights([("w", tensor)]))
    assert name == "w"
    assert torch.equal(received, tensor)
    assert received.data_ptr() != tensor.data_ptr()
    assert not received.requires_grad


def test_the_sender_never_holds_more_than_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "crosses_processes", lambda: True)
    asked: list[int] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            asked.append(i)
            yield f"w{i}", torch.zeros(10)  # 40 bytes

    put_after: list[int] = []
    monkeypatch.setattr(transport, "put", lambda bucket: put_after.append(len(asked)) or bucket)
    send_weights(stream(), 80)
    # Two tensors fill a bucket; it is put away when the third, fifth and no further tensor arrives.
    assert put_after == [3, 5, 6]


def consume(mixed: list[object], name: str) -> None:
    list(receive_weights(mixed, version=1))
    pytest.fail(f"{name} went unnoticed")


def test_mixed_up_buckets_are_refused() -> None:
    buckets = send_weights(weights(), 1, version=1)
    wrong = {
        "missing": buckets[:-1],
        "first gone": buckets[1:],
        "twice": [buckets[0], *buckets],
        "swapped": [buckets[1], buckets[0], *buckets[2:]],
        "none": [],
        "old": [*send_weights(weights(), 1, version=0)],
        "one old": [send_weights(weights(), 1, version=0)[0], *buckets[1:]],
        "trailing": [*buckets, buckets[-1]],
    }
    for name, handles_ in wrong.items():
        with pytest.raises(WeightMismatch, match="version|place|missing"):
            consume(handles_, name)


def test_an_empty_stream_is_a_valid_stream() -> None:
    assert list(receive_weights(send_weights([]))) == []
    with pytest.raises(ValueError, match="bucket_bytes must be >= 1, got 0"):
        send_weights([], 0)


@given(st.permutations(range(4)))
def test_the_checksum_ignores_order(order: list[int]) -> None:
    named = list(itertools.islice(weights(), 4))
    assert weights_checksum(named[i] for i in order) == weights_checksum(named)


def test_the_checksum_sees_names_types_shapes_and_bits() -> None:
    base = {"a": torch.tensor([1.0, 2.0])}
    others = [
        {"b": torch.tensor([1.0, 2.0])},
        {"a": torch.tensor([1.0, 2.0]).view(torch.int32)},  # same bytes
        {"a": torch.tensor([[1.0, 2.0]])},
        {"a": torch.tensor([1.0, 2.0000002])},
        {"a": torch.tensor([1.0, 2.0]), "c": torch.zeros(0)},
        {},
    ]
    sums = [weights_checksum(each.items()) for each in (base, *others)]
    assert len(set(sums)) == len(sums)


def test_hashing_and_packing_a_hundred_megabytes_is_quick() -> None:
    tensor = torch.zeros(25 * 2**20)
    start = time.perf_counter()
    weights_checksum([("w", tensor)])
    assert time.perf_counter() - start < 2


def test_a_private_folder_is_swept_only_when_its_owner_is_gone(tmp_path: Path) -> None:
    living = PrivateFolder(tmp_path)
    dead = tmp_path / "roll-ray-dead"
    dead.mkdir()
    (dead / "lock").touch()  # nobody holds it
    foreign = tmp_path / "roll-ray-starting"  # no lock yet: its owner is just making it
    foreign.mkdir()
    other = PrivateFolder(tmp_path)
    assert living.path.exists()
    assert foreign.exists()
    assert not dead.exists()
    for folder in (living, other):
        folder.remove()
        folder.remove()
        assert not folder.path.exists()
