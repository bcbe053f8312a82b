"""Ragged carriers: whatever is cut, shuffled and put together again comes back row for row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.ragged import Ragged, RowMismatch, pad_flat, unpad

QUICK = settings(max_examples=40, deadline=None, derandomize=True)
LENGTHS = st.lists(st.integers(0, 5), max_size=6)
TOKEN_COLUMNS = ("token_ids", "action_mask", "old_logprobs", "versions")


def make(lengths, prefix="r", **columns):
    """Every token and every row has a number of its own, so a misplaced one shows."""
    total = sum(lengths)
    return TokenBatch(
        row_ids=tuple(f"{prefix}{i}" for i in range(len(lengths))),
        group_ids=tuple(f"g{prefix}{i // 2}" for i in range(len(lengths))),
        offsets=torch.tensor([0, *itertools.accumulate(lengths)]),
        token_ids=torch.arange(total),
        action_mask=torch.arange(total) % 2 == 0,
        old_logprobs=-torch.arange(total, dtype=torch.float32),
        versions=torch.arange(total) * 3,
        loss_weight=torch.arange(len(lengths), dtype=torch.float32),
        **columns,
    )


def contents(batch):
    """row id -> everything about the row."""
    return {
        row_id: (
            batch.group_ids[i],
            float(batch.loss_weight[i]),
            [batch.row(name, i).tolist() for name in TOKEN_COLUMNS],
        )
        for i, row_id in enumerate(batch.row_ids)
    }


@st.composite
def batches(draw):
    return make(draw(LENGTHS))


@st.composite
def shuffled(draw):
    batch = draw(batches())
    return batch, draw(st.permutations(range(len(batch))))


@given(shuffled())
@QUICK
def test_selecting_rows_moves_everything_about_them(case):
    batch, order = case
    picked = batch.select(order)
    assert picked.row_ids == tuple(batch.row_ids[i] for i in order)
    assert contents(picked) == contents(batch)


@given(shuffled(), st.integers(0, 6))
@QUICK
def test_selecting_some_rows_keeps_just_those(case, count):
    batch, order = case
    some = batch.select(order[:count])
    assert contents(some) == {batch.row_ids[i]: contents(batch)[batch.row_ids[i]] for i in order[:count]}
    assert some.num_tokens == int(batch.lengths[list(order[:count])].sum())


@given(shuffled())
@QUICK
def test_reordering_back_is_the_identity(case):
    batch, order = case
    back = batch.select(order).reorder(batch.row_ids)
    assert back.row_ids == batch.row_ids
    assert torch.equal(back.offsets, batch.offsets)
    for name, column in batch.columns().items():
        assert torch.equal(getattr(back, name), column)


@given(batches(), st.lists(st.integers(0, 3), max_size=5))
@QUICK
def test_splitting_and_joining_up_again_is_the_identity(batch, cuts):
    bounds = [0, *sorted(min(c, len(batch)) for c in cuts), len(batch)]
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    pieces = [batch.select(range(a, b)) for a, b in itertools.pairwise(bounds)]
    assert [len(piece) for piece in pieces] == sizes
    whole = TokenBatch.concat(pieces)
    assert whole.row_ids == batch.row_ids
    assert whole.group_ids == batch.group_ids
    assert torch.equal(whole.offsets, batch.offsets)
    for name, column in batch.columns().items():
        assert torch.equal(getattr(whole, name), column)


@given(LENGTHS, LENGTHS)
@QUICK
def test_concatenating_two_batches_keeps_both(first, second):
    a, b = make(first, "a"), make(second, "b")
    assert contents(TokenBatch.concat([a, b])) == {**contents(a), **contents(b)}


@given(shuffled())
@QUICK
def test_a_join_puts_each_value_on_its_own_row(case):
    batch, order = case
    values = batch.token_ids.float() / 7
    other = TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, values=values).select(order)
    joined = batch.join(other, values="values", returns="values")
    assert torch.equal(joined.values, values)
    assert torch.equal(joined.returns, values)
    assert batch.values is None


def test_a_join_of_other_rows_says_which_are_missing():
    batch = make([1, 2])
    other = TokenOutputs(row_ids=("r0", "zzz"), offsets=batch.offsets, values=torch.zeros(3))
    with pytest.raises(RowMismatch, match=r"absent \['r1'\], present but unwanted \['zzz'\]"):
        batch.join(other, values="values")


def test_a_join_of_rows_of_other_lengths_says_which_row():
    batch = make([1, 2])
    other = TokenOutputs(row_ids=("r0", "r1"), offsets=torch.tensor([0, 2, 3]), values=torch.zeros(3))
    with pytest.raises(RowMismatch, match="'r0' has 1 tokens here and 2 there"):
        batch.join(other, values="values")


def test_a_join_of_a_column_that_nobody_filled_says_so():
    batch = make([1])
    other = TokenOutputs(row_ids=("r0",), offsets=batch.offsets, values=torch.zeros(1))
    with pytest.raises(ValueError, match=r"'entropy' is not filled; present: \['values'\]"):
        batch.join(other, values="entropy")


# ---- padding -------------------------------------------------------------------------------------------


@given(batches())
@QUICK
def test_padding_and_unpadding_are_inverse(batch):
    padded, valid = batch.pad("old_logprobs", 9.0), batch.valid()
    assert padded.shape == valid.shape
    assert torch.equal(unpad(padded, batch.offsets), batch.old_logprobs)
    assert torch.equal(padded[valid], batch.old_logprobs)
    assert bool((padded[~valid] == 9.0).all())
    assert torch.equal(valid.sum(1), batch.lengths)


@given(batches(), st.sampled_from([torch.float64, torch.int64, torch.bool]))
@QUICK
def test_padding_keeps_the_dtype_and_trailing_axes(batch, dtype):
    flat = (torch.arange(batch.num_tokens * 2) % 3).reshape(-1, 2).to(dtype)
    padded = pad_flat(flat, batch.offsets)
    assert padded.dtype == dtype
    assert padded.shape[2:] == (2,)
    assert torch.equal(unpad(padded, batch.offsets), flat)


def test_gradients_flow_through_padding():
    flat = torch.ones(3, requires_grad=True)
    padded = pad_flat(flat, torch.tensor([0, 1, 3]))
    (padded * torch.tensor([[2.0, 99.0], [3.0, 5.0]])).sum().backward()
    assert flat.grad.tolist() == [2.0, 3.0, 5.0]


# ---- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 1])}, "2 rows need 3 offsets"),
        ({"offsets": torch.tensor([1, 2, 3])}, "start at 0"),
        ({"offsets": torch.tensor([0, 4, 3])}, "never fall"),
        ({"row_ids": ("a", "a")}, "'a' appears twice"),
        ({"group_ids": ("g",)}, "2 rows but 1 group ids"),
        ({"token_ids": torch.arange(4)}, r"'token_ids' has 4 entries, expected 3 \(one per token\)"),
        ({"loss_weight": torch.zeros(3)}, r"'loss_weight' has 3 entries, expected 2 \(one per row\)"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(make([1, 2]), **change)


def test_unknown_columns_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown columns \['reward'\].*'token_rewards'"):
        make([1]).with_columns(reward=torch.zeros(1))


def test_concatenating_nothing_or_different_columns_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        TokenBatch.concat([])
    with pytest.raises(ValueError, match="different columns"):
        TokenBatch.concat([make([1], "a"), make([1], "b", values=torch.zeros(1))])


def test_a_carrier_is_frozen_and_select_makes_no_row_twice():
    batch = make([1, 2])
    with pytest.raises(AttributeError):
        batch.row_ids = ()
    with pytest.raises(ValueError, match="appears twice"):
        batch.select([0, 0])


def test_columns_can_be_set_and_cleared():
    batch = make([2]).with_columns(values=torch.zeros(2))
    assert "values" in batch.columns()
    assert "values" not in batch.with_columns(values=None).columns()


def test_a_carrier_moves_to_a_device_with_its_offsets_on_the_cpu():
    moved = make([1, 2]).to("meta")
    assert moved.token_ids.device.type == "meta"
    assert moved.loss_weight.device.type == "meta"
    assert moved.offsets.device.type == "cpu"


def test_no_rows_are_a_batch_too():
    empty = Ragged(row_ids=(), offsets=torch.zeros(1, dtype=torch.int64))
    assert len(empty) == empty.num_tokens == 0
    assert empty.valid().shape == (0, 0)


def test_columns_with_several_numbers_per_token_follow_their_rows():
    batch = TokenBatch(
        row_ids=("r0", "r1", "r2"),
        group_ids=("g", "g", "g"),
        offsets=torch.tensor([0, 2, 3, 6]),
        token_ids=torch.arange(6),
        action_mask=torch.ones(6, dtype=torch.bool),
        teacher_ids=torch.arange(12).view(6, 2),
        teacher_logprobs=-torch.arange(12.0).view(6, 2),
    )
    turned = batch.reorder(["r2", "r0", "r1"])
    assert turned.teacher_ids.tolist() == [[6, 7], [8, 9], [10, 11], [0, 1], [2, 3], [4, 5]]
    joined = TokenBatch.concat([turned.select([0]), turned.select([1, 2])])
    assert joined.teacher_ids.tolist() == turned.teacher_ids.tolist()
    assert batch.select([]).teacher_logprobs.shape == (0, 2)
    padded = batch.pad("teacher_logprobs", 7.0)
    assert padded.shape == (3, 3, 2)
    assert padded[1].tolist() == [[-4.0, -5.0], [7.0, 7.0], [7.0, 7.0]]
    outputs = TokenOutputs(
        row_ids=turned.row_ids, offsets=turned.offsets, top_ids=turned.teacher_ids, top_logprobs=turned.teacher_logprobs
    )
    bare = batch.with_columns(teacher_ids=None, teacher_logprobs=None)
    joined = bare.join(outputs, teacher_ids="top_ids", teacher_logprobs="top_logprobs")
    assert torch.equal(joined.teacher_ids, batch.teacher_ids)
    assert torch.equal(joined.teacher_logprobs, batch.teacher_logprobs)
