"""Attention within rows against a dense mask, and its split over ranks, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from roll.distributed.process_group import init_process_group
from roll.strategies.attention.attention import (
    all_gathered,
    heads_to_sequence,
    sequence_to_heads,
    split_attention,
    varlen_attention,
)
from roll.strategies.attention.varlen_kernel import RowPlan

LENGTHS = (3, 140, 1, 12)
ROWS = RowPlan(LENGTHS)
HEADS, DIM, OUT, SCALE = 4, 6, 8, 0.3


def tensors(key_heads, lengths=LENGTHS, seed=0, heads=HEADS):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, DIM), (key_heads, DIM), (key_heads, OUT), (heads, OUT))
    return [torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def dense(query, key, value, lengths, scale, window):
    """The same by one mask over everything."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
    seen = (rows[:, None] == rows) & (distance >= 0) & (distance < (window or len(rows)))
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, value)


def with_gradients(function, query, key, value, outer):
    """(output, gradients of a weighted sum of it)."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad((out * outer).sum(), leaves)]


@pytest.mark.parametrize("window", [None, 1, 7, 133, 500])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [LENGTHS, (140, 140, 140), (5,)], ids=["of several lengths", "of one", "alone"])
def test_rows_attend_as_under_a_dense_mask(lengths, key_heads, window):
    *inputs, outer = tensors(key_heads, lengths)
    ours = with_gradients(lambda *t: varlen_attention(*t, RowPlan(lengths), scale=SCALE, window=window), *inputs, outer)
    theirs = with_gradients(lambda *t: dense(*t, lengths, SCALE, window), *inputs, outer)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_rows_of_one_length_are_one_call_with_the_bits_of_rows_by_themselves(monkeypatch):
    *inputs, _ = tensors(2, (7, 7, 7))
    rows = zip(*(tensor.split(7) for tensor in inputs), strict=True)
    alone = torch.cat([varlen_attention(*row, RowPlan((7,)), scale=SCALE) for row in rows])
    attend, calls = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*args, **options):
        calls.append(args)
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    assert torch.equal(varlen_attention(*inputs, RowPlan((7, 7, 7)), scale=SCALE), alone)
    assert len(calls) == 1


def test_heads_that_share_keys_are_repeated_for_float32_alone_and_not_where_autocast_computes_in_half(monkeypatch):
    """The accelerator's kernels in half precision take shared heads as they are."""
    seen = []

    def spy(query, key, value, **options):
        seen.append((query.dtype, key.shape[1], options["enable_gqa"]))
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with FakeTensorMode():
        query, key, value = (torch.empty(5, heads, DIM, device="cuda") for heads in (4, 2, 2))
        varlen_attention(query, key, value, RowPlan((3, 2)), scale=SCALE)
        before, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        try:
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            varlen_attention(query, key, value, RowPlan((3, 2)), scale=SCALE)
        finally:
            torch.set_autocast_enabled("cuda", before)
            torch.set_autocast_dtype("cuda", dtype)
    assert seen == [(torch.float32, 4, False)] * 2 + [(torch.bfloat16, 2, True)] * 2


def test_a_row_is_bit_for_bit_the_same_beside_any_other():
    (q, k, v, _), (q2, k2, v2, _) = tensors(2), tensors(2, seed=1)
    other = slice(3, 143)
    for mine, theirs in ((q, q2), (k, k2), (v, v2)):
        theirs[:3], theirs[143:] = mine[:3], mine[143:]
    first, second = (varlen_attention(*t, ROWS, scale=SCALE) for t in ((q, k, v), (q2, k2, v2)))
    assert not torch.equal(first[other], second[other])
    assert torch.equal(first[:3], second[:3])
    assert torch.equal(first[143:], second[143:])


def connected(info):
    init_process_group(info, "gloo")
    dist.barrier()  # a rank that is done at once would leave while others still connect


def shard(tensor, info):
    return tensor.chunk(info.world_size)[info.rank]


def exchanged(info):
    connected(info)
    whole = torch.arange(8 * 4 * 3).reshape(8, 4, 3)
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        there = sequence_to_heads(shard(whole, info).to(dtype), None)
        results.append((there.long(), heads_to_sequence(there, None).long()))
    return results


def test_gloo_exchanges_shards_for_heads_and_back(ranks):
    whole = torch.arange(8 * 4 * 3).reshape(8, 4, 3)
    for rank, answers in enumerate(ranks.run(exchanged, 2)):
        for there, back in answers:
            assert torch.equal(there, whole[:, 2 * rank : 2 * rank + 2])
            assert torch.equal(back, whole[4 * rank : 4 * rank + 4])


def split(info, heads, key_heads, window):
    connected(info)
    *inputs, outer = (shard(t, info) for t in tensors(key_heads, heads=heads))

    def attend(*shards):
        lines = (tensor[:, None] for tensor in shards)
        return split_attention(*lines, ROWS, dist.group.WORLD, scale=SCALE, window=window)[:, 0]

    return with_gradients(attend, *inputs, outer)


@pytest.mark.parametrize(
    ("world", "heads", "key_heads", "window"),
    [(2, 4, 4, None), (2, 4, 2, 7), (2, 4, 1, None), (4, 4, 2, None), (2, 6, 3, None)],
)
def test_ranks_with_a_shard_each_compute_the_whole_attention(ranks, world, heads, key_heads, window):
    *inputs, outer = tensors(key_heads, heads=heads)
    whole = with_gradients(lambda *t: varlen_attention(*t, ROWS, scale=SCALE, window=window), *inputs, outer)
    answers = ranks.run(split, world, heads, key_heads, window)
    for mine, expected in zip(zip(*answers, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(mine), expected, rtol=0, atol=1e-12)


def refused(info):
    connected(info)
    heads = torch.zeros(2, 1, 3, 4)
    try:
        split_attention(heads, heads, heads, RowPlan((4,)), dist.group.WORLD, scale=1.0)
    except ValueError as error:
        return str(error)
    return None


def test_heads_that_ranks_cannot_share_evenly_are_refused(ranks):
    assert ranks.run(refused, 2) == ["3 attention heads can't be spread over 2 ranks"] * 2


def gathered(info):
    connected(info)
    return torch.cat(all_gathered(shard(torch.arange(6.0), info), None))


def test_every_rank_gets_all_shards(ranks):
    assert all(torch.equal(whole, torch.arange(6.0)) for whole in ranks.run(gathered, 2))
