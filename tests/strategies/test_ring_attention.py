"""Ring attention: how a line is cut, one block, merging, what travels, and the numbers of one rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from layout_contract import FAMILIES, check_layout, refusal
from tiny_models import build_tiny_model
from train_contract import build, make_batch, make_spec, with_worker

from roll.distributed.process_group import init_process_group
from roll.strategies.attention import ring_attention
from roll.strategies.attention.attention import varlen_attention
from roll.strategies.attention.ring_attention import block_attention, block_gradients, merge
from roll.strategies.attention.varlen_kernel import RowPlan
from roll.strategies.attention.zigzag import RingPlan, pieces, zigzag_order
from roll.strategies.training.micro import lay_out, take_shard, zigzag

ROWS = (5, 11, 1, 20, 3)  # 40 tokens: pieces of 10 or 5, and rows that begin and end inside of them
WINDOWS = [None, 1, 4, 12]


# --- how a line is cut -----------------------------------------------------------------------------------------------


def test_each_rank_holds_an_early_and_a_late_piece():
    assert [pieces(rank, 3) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_blocks_hold_each_pair_of_a_query_and_a_key_it_sees_once(ranks, window):
    row_of = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS))
    distance = torch.arange(40)[:, None] - torch.arange(40)
    seen = (row_of[:, None] == row_of) & (distance >= 0) & (distance < (window or 40))
    order = zigzag_order(40, ranks).chunk(ranks)
    found = torch.zeros(40, 40, dtype=torch.int64)
    for rank in range(ranks):
        plan = RingPlan(ROWS, rank, ranks)
        for source in range(ranks):
            for block in plan.blocks(source, window):
                q, k = order[rank][block.queries], order[source][block.keys]
                assert q[0] - k[0] == block.offset
                apart = q[:, None] - k
                inside = (apart >= 0) & (apart < (window or 40))
                assert inside.any(1).all()  # no query without a key
                found[q[:, None], k] += inside
    assert found.equal(seen.long())


def test_causal_work_by_hand_with_a_long_row_and_with_two():
    # Keys seen by each token of one row of 8: 1 to 8. Contiguous halves have 10 and 26 of these 36.
    # Pieces 0 and 3 have 1 2 7 8, pieces 1 and 2 have 3 4 5 6: 18 each. Of two rows of 4: 1 2 3 4 on both ranks.
    for row, expected in (((8,), [18, 18]), ((4, 4), [10, 10])):
        found = [sum(work(block) for source in (0, 1) for block in RingPlan(row, rank, 2).blocks(source))
                 for rank in (0, 1)]  # fmt: skip
        assert found == expected


def work(block):
    """Pairs of a query and a key it sees."""
    queries, keys = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
    return sum(min(keys, block.offset + query + 1) for query in range(queries))


def test_shards_of_the_zigzag_order_hold_every_token_with_its_position_and_its_target():
    whole = lay_out(make_batch(), torch.device("cpu"), packed=True, multiple=8)
    tokens = whole.ids.shape[1]
    whole = replace(whole, experts=torch.arange(2 * tokens, dtype=torch.int16).view(1, tokens, 1, 2))
    order = zigzag_order(tokens, 4).chunk(4)
    moved, seen = zigzag(whole, 4), []
    for rank in range(4):
        shard, place = take_shard(moved, rank, 4)
        assert shard.ids[0].equal(whole.ids[0, order[rank]])
        assert shard.positions[0].equal(whole.positions[0, order[rank]])
        assert shard.experts[0].equal(whole.experts[0, order[rank]])
        assert order[rank][shard.index].equal(whole.index[place])
        assert shard.targets.equal(whole.targets[place])
        seen.append(place)
    assert torch.cat(seen).sort().values.tolist() == list(range(len(whole.targets)))


# --- one block, and merging ------------------------------------------------------------------------------------------


def test_merging_by_hand():
    # Two keys with scores ln 1 and ln 3, and one with ln 4: weights 1, 3 and 4 of 8. Values 8, 0 and 2.
    out, lse = merge(*(torch.tensor(x) for x in ([[[2.0]]], [[math.log(4)]], [[[2.0]]], [[math.log(4)]])))
    assert out.item() == pytest.approx(2.0)  # (1 * 8 + 3 * 0 + 4 * 2) / 8
    assert lse.item() == pytest.approx(math.log(8))
    nothing = torch.zeros(1, 1, 1), torch.full((1, 1), -torch.inf)
    out, lse = merge(*nothing, torch.tensor([[[5.0]]]), torch.tensor([[-300.0]]))
    assert (out.item(), lse.item()) == (5.0, -300.0)


def tensors(rows=ROWS, heads=4, shared=2, dtype=torch.float64):
    made = torch.Generator().manual_seed(0)
    sizes = ((heads, 8), (shared, 8), (shared, 6), (heads, 6))
    return [torch.randn(sum(rows), *size, generator=made, dtype=torch.float64).to(dtype) for size in sizes]


def whole_attention(query, key, value, rows, scale, window):
    """All scores at once in float64."""
    row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    seen = (row_of[:, None] == row_of) & (distance >= 0) & (distance < (window or len(query)))
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.double().repeat_interleave(repeats, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scores", [1, 1 << 24], ids=["query by query", "at once"])
def test_parts_of_the_keys_merge_to_all_of_them(monkeypatch, scores, dtype):
    monkeypatch.setattr(ring_attention, "_SCORES", scores)
    query, key, value, _ = tensors((12,), dtype=dtype)
    expected = whole_attention(query, key, value, (12,), 0.3, None)[7:]
    parts = [block_attention(query[7:], key[a:b], value[a:b], 7 - a, 0.3, None) for a, b in ((0, 3), (3, 7), (7, 12))]
    out, lse = parts[2]
    for other in (parts[0], parts[1]):
        out, lse = merge(out, lse, *other)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


def test_gradients_of_a_block_are_those_of_the_whole():
    query, key, value, grad = tensors((9,))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = whole_attention(*leaves, (9,), 0.3, 4)
    expected = torch.autograd.grad(out, leaves, grad)
    with torch.no_grad():
        _, lse = block_attention(query, key, value, 0, 0.3, 4)
        found = block_gradients(grad, (grad * out).sum(-1), lse, query, key, value, 0, 0.3, 4)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# --- around the ring -------------------------------------------------------------------------------------------------


def around(info, window, dtype):
    """This rank's part of a line's attention and gradients, and the bytes that it sent forward and backward."""
    init_process_group(info, "gloo")
    sent, exchange = [], dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: (sent.append(ops[0].tensor.nbytes), exchange(ops))[1]
    order = zigzag_order(40, info.world_size).chunk(info.world_size)[info.rank]
    *mine, grad = (tensor[order] for tensor in tensors(dtype=dtype))
    leaves = [tensor.requires_grad_() for tensor in mine]
    plan = RingPlan(ROWS, info.rank, info.world_size)
    out = ring_attention.ring_attention(*leaves, plan, scale=0.3, window=window)
    forward = sum(sent)
    grads = torch.autograd.grad(out, leaves, grad)
    return [out.detach(), *grads], forward, sum(sent) - forward


@pytest.mark.parametrize(("world", "window"), [(2, None), (4, None), (4, 6)])
def test_a_ring_gives_the_attention_and_the_gradients_of_one_rank(ranks, world, window):
    *mine, grad = tensors()
    leaves = [tensor.requires_grad_() for tensor in mine]
    out = whole_attention(*leaves, ROWS, 0.3, window)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    order = zigzag_order(40, world)
    answers = ranks.run(around, world, window, torch.float64)
    for number, whole in enumerate(expected):
        found = torch.cat([answer[0][number] for answer in answers])
        torch.testing.assert_close(found, whole[order], rtol=0, atol=1e-12)


def test_what_a_rank_sends(ranks):
    # 10 tokens x 2 key heads x (8 + 6) numbers of 2 bytes, 3 times; backward again, and 4 times in float32.
    for (out, *_), forward, backward in ranks.run(around, 4, None, torch.bfloat16):
        assert out.dtype == torch.bfloat16
        assert (forward, backward) == (3 * 560, 3 * 560 + 4 * 1120)


def test_one_rank_is_a_ring_that_sends_nothing():
    query, key, value, _ = tensors(dtype=torch.float32)
    out = ring_attention.ring_attention(query, key, value, RingPlan(ROWS, 0, 1), scale=0.3, window=4)
    theirs = varlen_attention(query, key, value, RowPlan(ROWS), scale=0.3, window=4)
    torch.testing.assert_close(out, theirs, rtol=0, atol=1e-5)


# --- the numbers of a strategy ---------------------------------------------------------------------------------------

LAYOUTS = {
    "a ring of 2": ("llama", "fsdp2_train", 2, {"ring_attention_size": 2}),
    "a ring of 4, more than key heads": ("qwen2", "fsdp2_train", 4, {"ring_attention_size": 4}),
    "two rings": ("qwen3", "fsdp2_train", 4, {"ring_attention_size": 2}),
    "with Ulysses": ("llama", "fsdp2_train", 4, {"ring_attention_size": 2, "ulysses_size": 2}),
    "a window": ("mistral", "fsdp2_train", 2, {"ring_attention_size": 2}),
    "experts, without recomputation": ("qwen3_moe", "fsdp2_train", 2,
                                       {"ring_attention_size": 2, "disable_gradient_checkpointing": True}),
    "ZeRO": ("llama", "deepspeed_train", 2, {"ring_attention_size": 2}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_ring_train_as_one_rank_does(ranks, model_of, layout):
    family, strategy, world, model = LAYOUTS[layout]
    if strategy == "deepspeed_train":
        pytest.importorskip("deepspeed")
    options = {"zero_optimization": {"stage": 3}} if strategy == "deepspeed_train" else {}
    check_layout(ranks, model_of(family, **FAMILIES[family]), strategy, options, world, tolerance=1e-5, model=model)


def values_of(info, spec):
    strategy = build(spec, info)
    return strategy.layout, strategy.forward(make_batch(), ("logprobs",)).logprobs, strategy._micros.shares_prefixes


def test_a_reference_gives_the_same_numbers_on_every_rank_with_rounded_lengths(ranks, model_of):
    spec = make_spec(model_of("llama"), strategy="fsdp2_infer", trains=False)
    ring = make_spec(model_of("llama"), strategy="fsdp2_infer", trains=False, model={"ring_attention_size": 2})
    ((_, expected, _),) = ranks.run(values_of, 1, spec)
    answers = ranks.run(values_of, 2, with_worker(ring, sequence_length_round_in_infer=3))
    assert [(place.dp_rank, place.dp_size, place.collects) for place, *_ in answers] == [(0, 1, True), (0, 1, False)]
    for _, found, shares in answers:
        assert not shares  # a tree of rows isn't cut
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_models_that_attend_in_other_ways_are_refused(ranks, tmp_path):
    path = build_tiny_model(tmp_path, "gemma2", sliding_window=4)
    for answer in ranks.run(refusal, 2, make_spec(path, model={"ring_attention_size": 2})):
        assert "softcap=50.0" in answer
        assert answer.endswith("Write model_args.ring_attention_size: 1")
