from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.configs.schema.model_shape import ModelShape
from roll.distributed.dispatch import check_layouts, split_batch, split_units
from roll.distributed.executors import make_executor
from roll.distributed.layout import RankLayout
from roll.distributed.placement import RolePlacement, num_slots
from roll.distributed.worker import Worker
from roll.types.batch import TokenBatch


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6), st.booleans())
def test_every_row_goes_to_exactly_one_rank_and_only_the_last_ranks_are_idle(
    lengths: list[int], ranks: int, balance: bool
) -> None:
    parts = split_units(lengths, [[i] for i in range(len(lengths))], ranks, balance=balance)
    assert len(parts) == ranks
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert [bool(part) for part in parts] == [rank < len(lengths) for rank in range(ranks)]
    assert all(part == sorted(part) for part in parts)
    if len(lengths) % ranks == 0:
        assert {len(part) for part in parts} == {len(lengths) // ranks}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), min_size=1, max_size=30), st.integers(1, 6))
def test_rows_of_a_unit_go_to_one_rank(rows: list[tuple[int, int]], ranks: int) -> None:
    units = [[i for i, (unit, _) in enumerate(rows) if unit == wanted] for wanted in dict(rows)]
    for balance in (False, True):
        parts = split_units([length for _, length in rows], units, ranks, balance=balance)
        assert sorted(row for part in parts for row in part) == list(range(len(rows)))
        assert all(sum(bool(set(unit) & set(part)) for part in parts) == 1 for unit in units)


def test_balancing_evens_out_tokens_and_not_balancing_keeps_the_order() -> None:
    lengths = [8, 7, 6, 1, 1, 1]
    # Equal row counts: 8 + 1 + 1 = 10 or so against 7 + 6 + 1 = 14; in order it is 21 against 3.
    units = [[i] for i in range(len(lengths))]
    balanced = split_units(lengths, units, 2, balance=True)
    loads = sorted(sum(lengths[row] for row in part) for part in balanced)
    assert loads == [10, 14]
    assert split_units(lengths, units, 2, balance=False) == [[0, 1, 2], [3, 4, 5]]


def test_calls_of_two_threads_reach_all_ranks_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from roll.distributed.ray_cluster import Peer, RayCluster

    got: list[list[str]] = [[], [], []]

    def submit(_: RayCluster, rank: int, name: str, args: object) -> object:
        time.sleep(0.001)
        got[rank].append(name)
        return object()

    monkeypatch.setattr(RayCluster, "_submit", submit)
    monkeypatch.setattr(RayCluster, "_collect", lambda *_: [])
    peers = [Peer(shell=None, log_file=Path()) for _ in got]
    placement = RolePlacement("actor", ((0,), (1,), (2,)))
    cluster = RayCluster(placement, Worker, peers, rpc_timeout=1, balance=False)
    calls = [f"{thread}{i}" for i in range(20) for thread in "ab"]
    with ThreadPoolExecutor(2) as pool:  # ranks that met in different calls would wait for each other for ever
        list(pool.map(lambda name: cluster._run(name, dict.fromkeys(range(3), ()), None), calls))
    assert got[0] == got[1] == got[2]
    assert sorted(got[0]) == sorted(calls)


def test_layouts_must_give_every_shard_one_answer() -> None:
    good = [RankLayout(0, 2, False), RankLayout(0, 2, True), RankLayout(1, 2, True), RankLayout(1, 2, False)]
    check_layouts("actor", good)
    for bad in (
        [RankLayout(0, 2, True), RankLayout(0, 2, True)],
        [RankLayout(0, 2, True), RankLayout(1, 2, False)],
        [RankLayout(0, 1, True), RankLayout(1, 2, True)],
    ):
        with pytest.raises(ValueError, match="actor: each data-parallel rank needs one rank that collects"):
            check_layouts("actor", bad)


def test_the_cluster_needs_as_many_slots_as_the_largest_one_named() -> None:
    placements = [RolePlacement("a", ((0, 1),)), RolePlacement("b", ((4,),)), RolePlacement("c", ((),))]
    assert num_slots(placements) == 5
    assert num_slots([]) == 0


def test_an_unknown_executor_is_refused() -> None:
    role = RolePlacement("a", ((0,),))
    with pytest.raises(ValueError, match=r"unknown executor 'slurm'; known: \['inline', 'ray'\]"):
        make_executor("slurm", [role], rpc_timeout=1)


def test_long_rows_count_by_the_square_of_their_length_where_attention_counts():
    """By tokens 8 | 4 + 4; by 0.5 l^2 on top a row of 8 costs 40 and eight of 1 cost 12."""
    lengths, units = [8, 4, 4, 1, 1, 1, 1], [[i] for i in range(7)]
    by_tokens = split_units(lengths, units, 2, balance=True)
    by_cost = split_units(lengths, units, 2, balance=True, attention_share=0.5)
    assert sorted(sum(lengths[i] for i in part) for part in by_tokens) == [10, 10]
    costs = sorted(sum(lengths[i] + 0.5 * lengths[i] ** 2 for i in part) for part in by_cost)
    assert costs == [30.0, 40.0]  # 8 alone; 4, 4 and four of 1


def test_the_share_of_attention_is_that_of_its_flops():
    """h = 4, one of two heads for keys: per token and layer 2 (32 + 16 + 36) FLOPs of weights, 8 l of attention."""
    shape = ModelShape(heads=2, kv_heads=1, hidden=4, intermediate=3)
    assert shape.attention_share == pytest.approx(8 / (2 * (2 * 16 + 2 * 4 * 2 + 3 * 4 * 3)))
    assert ModelShape().attention_share == 0.0


def grouped(rows: list[list[int]], groups: str, units: str = "") -> TokenBatch:
    lengths = [len(row) for row in rows]
    return TokenBatch(
        row_ids=tuple(f"row{i}" for i in range(len(rows))),
        group_ids=tuple(groups),
        unit_ids=tuple(units),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        token_ids=torch.tensor([token for row in rows for token in row]),
        action_mask=torch.zeros(sum(lengths), dtype=torch.bool),
    )


def dealt(batch: TokenBatch, **options: bool) -> list[tuple[str, ...]]:
    layouts = [RankLayout(dp_rank=rank, dp_size=2) for rank in range(2)]
    return [piece.row_ids for piece in split_batch(batch, layouts, **{"balance": True, "keep_groups": True, **options})]


def test_the_rows_of_a_prompt_go_to_one_rank_where_that_is_less_to_compute() -> None:
    """Two prompts of 8 tokens, three answers of 2 each: 14 tokens on each rank, and 8 + 8 + 3 x 2 = 22 on a rank that
    has answers to both."""
    rows = [[*range(group, group + 8), 90, 90 + i] for i in range(3) for group in (0, 20)]
    batch = grouped(rows, "ababab")
    assert sorted(dealt(batch)) == [("row0", "row2", "row4"), ("row1", "row3", "row5")]
    # One by one, or in order, as without the switch.
    for options in ({"keep_groups": False}, {"balance": False}):
        assert sorted(dealt(batch, **options)) != sorted(dealt(batch))
    # Rows of both groups that must stay together do.
    assert any({"row0", "row1"} <= set(part) for part in dealt(grouped(rows, "ababab", "uuvwxy")))


def test_groups_are_parted_where_one_rank_would_have_far_more_tokens() -> None:
    """Three groups on two ranks: whole, one rank would have 40 of 60 tokens."""
    batch = grouped([[*range(group, group + 8), 90, 90 + i] for group in (0, 20, 40) for i in range(2)], "aabbcc")
    assert [len(part) for part in dealt(batch)] == [3, 3]
    assert dealt(batch) == dealt(batch, keep_groups=False)


def test_groups_that_share_nothing_are_dealt_out_row_by_row() -> None:
    batch = grouped([[10 * row + i for i in range(4)] for row in range(6)], "ababab")
    assert dealt(batch) == dealt(batch, keep_groups=False)
