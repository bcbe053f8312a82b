"""What each rank writes of a Megatron checkpoint: its own part, without a word to the others."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_contract import layout_spec
from ranks import status_bytes
from tiny_models import build_tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from train_contract import build

from roll.strategies.megatron.pieces import blocks_between, pieces_of

MIB = 1 << 20
LARGE = {"hidden": 256, "layers": 4, "intermediate_size": 1024, "vocab_size": 8192, "head_dim": 64}
RANKS = 4


@pytest.mark.parametrize(
    ("sizes", "strides"), [((7,), (1,)), ((3, 5), (5, 1)), ((5, 3), (1, 5)), ((2, 3, 4), (12, 1, 3)), ((1, 4), (9, 1))]
)
def test_blocks_are_the_elements_between_two_places_each_once(sizes, strides):
    places = torch.zeros(sizes, dtype=torch.int64)
    for index in torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)).tolist():
        places[tuple(index)] = sum(i * stride for i, stride in zip(index, strides, strict=True))
    for start in range(-2, places.numel() + 1):
        for stop in range(start + 1, places.numel() + 3):
            found = torch.zeros(sizes, dtype=torch.int64)
            blocks = list(blocks_between(sizes, strides, start, stop))
            for offsets, extents in blocks:
                window = tuple(slice(a, a + n) for a, n in zip(offsets, extents, strict=True))
                assert found[window].numel(), "an empty block"
                found[window] += 1
            assert torch.equal(found, ((places >= start) & (places < stop)).long()), (start, stop)
            assert len(blocks) <= 2 * len(sizes) - 1


def of_experts(copies):
    """A place for [2, 6] that is stored as [3, 4] of a [3, 8]: transposed, as views or as copies of the parameter."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def divide(key, data, replica, part):
        assert part is None
        halves = data.view(4, 3).t().chunk(2, dim=1)
        halves = [half.contiguous() if copies else half for half in halves]
        return [
            ShardedTensor.from_rank_offsets(key, half, (1, i, 4), replica_id=replica) for i, half in enumerate(halves)
        ]

    parameter = nn.Parameter(torch.zeros(2, 6))
    return parameter, ShardedTensorFactory("w", parameter, divide, None, 0)


@pytest.mark.parametrize("copies", [False, True])
def test_a_part_of_a_parameter_is_found_in_tensors_of_another_order(copies):
    parameter, place = of_experts(copies)
    whole = torch.full((3, 8), -1.0)
    for start, stop in ((0, 5), (5, 12)):
        flat = torch.arange(start, stop, dtype=torch.float32)
        for piece in pieces_of(place, parameter, slice(start, stop), "moment.", flat):
            assert piece.key == "moment.w" and piece.global_shape == (3, 8)
            assert piece.data.untyped_storage()._cdata == flat.untyped_storage()._cdata
            window = tuple(slice(a, a + n) for a, n in zip(piece.global_offset, piece.local_shape, strict=True))
            whole[window] = piece.data
    assert torch.equal(whole[:, :4], torch.arange(12.0).view(4, 3).t())
    assert (whole[:, 4:] == -1).all()  # another rank's


class Sent(TorchDispatchMode):
    """Bytes of numbers that this rank hands to collectives; plans and names aren't numbers."""

    def __init__(self):
        super().__init__()
        self.by_kind = defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            for tensor in tensors_of(args):
                self.by_kind[func.__name__] += tensor.nbytes if tensor.is_floating_point() else 0
        return func(*args, **(kwargs or {}))


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def peak_of(act):
    """(its result, MiB that the process is larger meanwhile)"""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    result = act()
    return result, (status_bytes("VmHWM") - before) / MIB


def save_and_load(info, small, spec, folder):
    """Bytes sent, and MiB of the peaks, of a checkpoint that is written and read again."""
    build(small, info).save(folder / "imports")  # what a first save imports isn't counted
    strategy = build(spec, info)
    strategy._optimizer.fill_state()
    with Sent() as sent:
        _, saving = peak_of(lambda: strategy.save(folder / "saved"))
        dist.barrier()
        _, loading = peak_of(lambda: strategy.load(folder / "saved"))
    return dict(sent.by_kind), saving, loading


def test_ranks_write_equal_parts_send_nothing_and_hold_nothing(ranks, model_of, tmp_path):
    large = build_tiny_model(tmp_path / "large", **LARGE)
    specs = (layout_spec(path, "megatron_train", {}, model={"dtype": "bf16"}) for path in (model_of("llama"), large))
    answers = ranks.run(save_and_load, RANKS, *specs, tmp_path)
    written = [file.stat().st_size for file in sorted((tmp_path / "saved" / "state").glob("*.distcp"))]
    assert len(written) == RANKS
    numbers = sum(written) / 14  # a weight of two bytes, two moments and a master of four
    for size in written:
        assert size < 1.3 * sum(written) / RANKS
    for sent, saving, loading in answers:
        assert sum(sent.values()) == 0, sent
        # One block is copied at a time; this would hold half of all.
        assert max(saving, loading) < 12 * numbers / 2 / MIB
