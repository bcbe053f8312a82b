"""Trees of rows: their segments, where tokens stand, how micro-batches are cut, and attention over them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from prefix_rows import answers, batch_of, turns

from roll.strategies.attention.attention import TreePlan, tree_attention
from roll.strategies.attention.prefix_tree import LONGEST_BRANCH, PrefixTree, plan_shared_batches, sort_rows, tree_of
from roll.strategies.training.micro import lay_out_tree


def rows_of(*rows):
    return batch_of([list(row) for row in rows], [[False] + [True] * (len(row) - 1) for row in rows])


def test_segments_by_hand():
    batch = rows_of((1, 2, 5), (7, 8), (1, 2, 3, 4), (1, 2, 3), (1, 2, 5))
    tree, place, source = tree_of(batch)
    # 1 2 | 3 | 4 | 5 | 7 8
    assert (tree.lengths, tree.parents) == ((2, 1, 1, 1, 2), (-1, 0, 1, 0, -1))
    assert place.tolist() == [0, 1, 4, 5, 6, 0, 1, 2, 3, 0, 1, 2, 0, 1, 4]
    assert batch.token_ids[source].tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert (tree.starts, tree.ends) == ((0, 2, 3, 4, 5), (5, 4, 4, 5, 7))
    assert tree.ancestors(2) == (0, 1)
    padded = tree.with_padding(3)
    assert (padded.lengths[-1], padded.parents[-1], padded.num_tokens) == (3, -1, 10)


def distinct_beginnings(batch):
    """Number of different prefixes of the rows: what must be computed at least."""
    rows = [batch.row("token_ids", i).tolist() for i in range(len(batch))]
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


@pytest.mark.parametrize("seed", range(5))
def test_every_token_stands_behind_its_own_row_and_nothing_stands_twice(seed):
    draw = random.Random(seed)
    batch = rows_of(*(tuple(draw.randrange(3) for _ in range(draw.randrange(1, 9))) for _ in range(12)))
    tree, place, source = tree_of(batch)
    assert tree.num_tokens == distinct_beginnings(batch)
    assert batch.token_ids[source][place].equal(batch.token_ids)
    segment_of = torch.repeat_interleave(torch.arange(len(tree.lengths)), torch.tensor(tree.lengths)).tolist()
    for i in range(len(batch)):
        mine = place[batch.offsets[i] : batch.offsets[i + 1]].tolist()
        path = list(dict.fromkeys(segment_of[p] for p in mine))
        assert (*tree.ancestors(path[-1]), path[-1]) == tuple(path)
        assert mine == [p for s in path for p in range(tree.starts[s], tree.starts[s] + tree.lengths[s])]


def test_a_long_branch_is_a_chain():
    row = list(range(LONGEST_BRANCH * 2 + 7))
    tree, place, _ = tree_of(rows_of(row[:3], row))
    assert (tree.lengths, tree.parents) == ((3, LONGEST_BRANCH, LONGEST_BRANCH, 4), (-1, 0, 1, 2))
    assert place[3:].tolist() == row


def test_a_layout_scores_shared_tokens_once():
    batch = turns()
    layout = lay_out_tree(batch, torch.device("cpu"), multiple=4)
    # 10..15, 40 41 42 are there once, as rows 1 and 3 begin with row 0; 20 21 22 43; 44 23 24; 47 48; 45 46.
    assert layout.ids[0].tolist() == [
        *(10, 11, 12, 13, 14, 15, 40, 41, 42), *(20, 21, 22, 43), *(44, 23, 24), *(47, 48), *(45, 46)
    ]  # fmt: skip
    assert layout.positions[0].tolist() == [*range(9), *range(9, 13), *range(13, 16), *range(16, 18), *range(13, 15)]
    assert layout.tree.lengths == (9, 4, 3, 2, 2)
    assert layout.tree.parents == (-1, 0, 1, 2, 1)
    # Scored once each: 40 41 42, 43, 44 and 45 (both after 43), 46, 47, 48.
    pairs = sorted(zip(layout.index.tolist(), layout.targets.tolist(), strict=True))
    assert pairs == [(5, 40), (6, 41), (7, 42), (11, 43), (12, 44), (12, 45), (15, 47), (16, 48), (18, 46)]
    assert layout.targets[layout.copies].equal(batch.token_ids[layout.flat])
    assert int(batch.action_mask.sum()) == len(layout.copies) == 3 + 5 + 6 + 7


# --- micro-batches ---------------------------------------------------------------------------------------------------


def cost_of(batch, rows):
    return tree_of(batch.select(rows))[0].num_tokens


def prompts(groups, each, prompt, answer):
    numbers = itertools.count(1000)
    rows = []
    for g in range(groups):
        asked = [g * 50 + i for i in range(prompt)]
        rows += [(*asked, *(next(numbers) for _ in range(answer))) for _ in range(each)]
    return rows_of(*rows)


def test_groups_stay_whole_where_they_fit():
    batch = prompts(groups=4, each=4, prompt=20, answer=5)  # each group: 20 + 4 x 5 = 40 tokens
    parts = plan_shared_batches(batch, batch.units(), max_rows=None, max_tokens=100)
    assert parts == [list(range(8)), list(range(8, 16))]
    # Four rows of 25 tokens allow as many.
    assert plan_shared_batches(batch, batch.units(), max_rows=4, max_tokens=None) == parts
    assert [cost_of(batch, part) for part in parts] == [80, 80]


def test_a_group_above_the_limit_is_cut():
    batch = prompts(groups=1, each=8, prompt=20, answer=5)
    parts = plan_shared_batches(batch, batch.units(), max_rows=None, max_tokens=35)
    assert [cost_of(batch, part) for part in parts] == [35, 35, 30]
    assert sorted(row for part in parts for row in part) == list(range(8))


def test_rows_that_share_little_are_left_to_the_usual_plan():
    batch = prompts(groups=4, each=2, prompt=5, answer=15)  # 140 of 160 tokens are computed
    assert plan_shared_batches(batch, batch.units(), max_rows=4, max_tokens=None) is None
    assert plan_shared_batches(batch.select([0]), [[0]], max_rows=4, max_tokens=None) is None


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_in_one_part_with_its_unit_and_within_the_limit(seed):
    draw = random.Random(seed)
    asked = [tuple(draw.randrange(3) for _ in range(6)) for _ in range(12)]
    rows = [(*prompt, *(draw.randrange(3) for _ in range(draw.randrange(1, 5)))) for prompt in asked for _ in "ab"]
    batch, units = rows_of(*rows), [[i, i + 1] for i in range(0, 24, 2)]
    parts = plan_shared_batches(batch, units, max_rows=None, max_tokens=30)
    assert sorted(row for part in parts for row in part) == list(range(24))
    assert all(set(unit) <= set(part) or not set(unit) & set(part) for unit in units for part in parts)
    costs = [cost_of(batch, part) for part in parts]
    assert len(parts) > 2
    assert max(costs) <= 30
    assert sort_rows(batch, units).cost(0, 24) >= cost_of(batch, range(24)) == sort_rows(batch).cost(0, 24)


# --- attention -------------------------------------------------------------------------------------------------------


def row_by_row(query, key, value, batch, place, window, scale):
    """Each row by itself in plain matrices, put back at the places of the line."""
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for i in range(len(batch)):
        at = place[batch.offsets[i] : batch.offsets[i + 1]]
        scores = torch.einsum("qhd,khd->hqk", query[at], key[at]) * scale
        distance = torch.arange(len(at))[:, None] - torch.arange(len(at))
        hidden = (distance < 0) | (distance >= (window or len(at) + 1))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = out.index_put((at,), torch.einsum("hqk,khd->qhd", weights, value[at]))
    return out


LONG = list(range(100, 100 + LONGEST_BRANCH + 90))
TREES = {
    "answers": answers,
    "turns": turns,
    "long": lambda: rows_of((1, 2, 3, *LONG), (1, 2, 3, 4), (1, 2, 3, *LONG[:40], 5, 6), (7, 8)),
}


@pytest.mark.parametrize("window", [None, 5, 200])
@pytest.mark.parametrize("kind", TREES)
def test_attention_over_a_tree_is_that_of_rows_by_themselves(kind, window):
    batch = TREES[kind]()
    tree, place, _ = tree_of(batch)
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, 6))
    made = [torch.randn(tree.num_tokens, *s, generator=generator, dtype=torch.float64) for s in shapes]
    weights = torch.randn(tree.num_tokens, 4, 6, generator=generator, dtype=torch.float64)
    answers_of = []
    for attend in ("tree", "rows"):
        query, key, value = (tensor.clone().requires_grad_() for tensor in made)
        if attend == "tree":
            out = tree_attention(query, key, value, TreePlan(tree), scale=0.4, window=window)
        else:
            wide = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
            out = row_by_row(query, *wide, batch, place, window, 0.4)
        (out * weights).sum().backward()
        answers_of.append((out.detach(), query.grad, key.grad, value.grad))
    for mine, theirs in zip(*answers_of, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_short_segments_share_a_call_and_long_ones_do_not():
    plan = TreePlan(PrefixTree((20, 3, 4, 2, 9, 300, 300), (-1, 0, 1, 0, -1, 4, 4)))
    assert plan.calls == [(0, 1), (1, 4), (4, 5), (5, 6), (6, 7)]
    mask = plan.mask((1, 4), None, torch.device("cpu"))
    assert mask.shape == (9, 29)
    # A token of segment 2 sees the prompt, segment 1 and its own; one of segment 3 the prompt and its own.
    assert mask[4].nonzero()[:, 0].tolist() == [*range(20), 20, 21, 22, 23, 24]
    assert mask[8].nonzero()[:, 0].tolist() == [*range(20), 27, 28]
    assert plan.mask((1, 4), None, torch.device("cpu")) is mask
