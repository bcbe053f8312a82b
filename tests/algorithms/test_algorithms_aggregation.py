"""Aggregation: one number from losses per token, the same for every split of the batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_mask, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from whole_batch import aggregate_whole, denominators_of

from roll.algorithms.aggregation import aggregate, equal_prompts
from roll.types.batch import Denominators

QUICK = settings(max_examples=40, deadline=None, derandomize=True)
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]


def test_token_mean_counts_masked_tokens_only():
    # (1 + 1) / 2 tokens
    loss, mask = torch.tensor([[1.0, 100.0], [1.0, -50.0]]), torch.tensor([[1, 0], [1, 0]])
    assert float(aggregate_whole(loss, mask, mode="token-mean")) == 1.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (2 + 4 + 3) / 3),
        ("seq-mean-token-sum", (6 + 3) / 2),
        ("seq-mean-token-mean", (3 + 3) / 2),
        ("seq-mean-token-sum-norm", (6 + 3) / 8 / 2),
        ("token-sum", 6 + 3),
    ],
)
def test_modes_match_hand_computed_values(mode, expected):
    # rows: 2 + 4 over two tokens; 3 over one token; a row without tokens, which is not a sequence
    loss = torch.tensor([[2.0, 4.0, 9.0], [9.0, 3.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    assert float(aggregate_whole(loss, mask, mode=mode, norm_length=8)) == pytest.approx(expected)


def test_prompts_of_any_length_count_the_same():
    # prompt 0: (2 + 4 + 3) / 3 tokens = 3; prompt 1: 7 / 1; a row without tokens counts nowhere: (3 + 7) / 2
    loss = torch.tensor([[2.0, 4.0], [3.0, 9.0], [7.0, 9.0], [9.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]])
    weights = equal_prompts(mask.sum(1), torch.tensor([4, 4, 2, 2]))
    assert weights.tolist() == pytest.approx([4 / (2 * 3), 4 / (2 * 3), 4 / (2 * 1), 1.0])
    assert float(aggregate_whole(loss, mask, mode="prompt-mean", row_weights=weights)) == pytest.approx(5.0)


def test_row_weights_multiply_the_numerator_only():
    # (2 * 6 + 1 * 3) / 3 tokens = 5
    loss, mask = torch.tensor([[2.0, 4.0], [3.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    found = aggregate_whole(loss, mask, mode="token-mean", row_weights=torch.tensor([2.0, 1.0]))
    assert float(found) == 5.0


@pytest.mark.parametrize("mode", MODES)
def test_a_duplicated_row_of_weight_zero_changes_nothing(mode):
    loss, mask = draw(3, 3, 4), draw_mask(3, 3, 4)
    mask[:, 0] = True
    filled = torch.cat([loss, torch.full_like(loss[:1], math.nan)]), torch.cat([mask, mask[:1]])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert_close(
        aggregate_whole(*filled, mode=mode, norm_length=4, row_weights=weights),
        aggregate_whole(loss, mask, mode=mode, norm_length=4),
    )


def loop(loss, mask, mode, weights, norm_length):
    total, tokens, sequences = 0.0, 0, 0
    for i in range(loss.shape[0]):
        kept = [float(loss[i, t]) for t in range(loss.shape[1]) if mask[i, t]]
        w = float(weights[i])
        if w and kept:
            tokens, sequences = tokens + len(kept), sequences + 1
            total += w * sum(kept) / {"seq-mean-token-mean": len(kept), MODES[3]: norm_length}.get(mode, 1)
    return total / {"token-mean": max(tokens, 1), "token-sum": 1}.get(mode, max(sequences, 1))


@pytest.mark.parametrize("mode", MODES)
@given(seed=SEEDS, rows=st.integers(0, 5), width=st.integers(0, 5), junk=st.sampled_from([math.nan, math.inf, -9.0]))
@QUICK
def test_aggregation_equals_a_loop_and_never_sees_what_is_masked(mode, seed, rows, width, junk):
    loss, mask = draw(seed, rows, width), draw_mask(seed, rows, width)
    weights = draw(seed + 1, rows).abs() * draw_mask(seed + 1, 1, rows)[0]
    dirty = poison(loss, mask, junk).requires_grad_()
    found = aggregate_whole(dirty, mask, mode=mode, norm_length=7.0, row_weights=weights)
    assert float(found.detach()) == pytest.approx(loop(loss, mask, mode, weights, 7.0), abs=1e-12)
    found.backward()
    assert torch.isfinite(dirty.grad).all()
    assert not dirty.grad[~mask].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@given(seed=SEEDS, rows=st.integers(1, 8), width=st.integers(1, 6), cuts=st.lists(st.integers(0, 8), max_size=4))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_split_gives_the_loss_and_gradient_of_the_whole(mode, dtype, tolerance, seed, rows, width, cuts):
    parameters = draw(seed, width, dtype=dtype).requires_grad_()
    features, mask = draw(seed + 1, rows, width, dtype=dtype), draw_mask(seed, rows, width)
    weights = draw(seed + 2, rows, dtype=dtype).abs() * draw_mask(seed + 2, 1, rows)[0]
    sizes = denominators_of(mask, weights)

    def losses():
        return (features * parameters).exp().clamp(max=50)

    def result(total):
        return total.detach(), torch.autograd.grad(total, parameters)[0]

    whole = result(aggregate(losses(), mask, sizes, mode=mode, norm_length=9.0, row_weights=weights))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    bounds = [0, *sorted(min(c, rows) for c in cuts), rows]
    total = parameters.sum() * 0
    for start, end in itertools.pairwise(bounds):
        part = order[start:end]
        longest = width - int(mask[part].any(0).flip(0).to(torch.uint8).argmax()) if mask[part].any() else 0
        # another padding in every part: cut off what the part doesn't need, then add junk columns
        piece = torch.cat([losses()[part, :longest], torch.full((len(part), 2), 1e6, dtype=dtype)], 1)
        piece_mask = torch.cat([mask[part, :longest], torch.zeros(len(part), 2, dtype=torch.bool)], 1)
        total = total + aggregate(piece, piece_mask, sizes, mode=mode, norm_length=9.0, row_weights=weights[part])
    split = result(total)
    assert_close(split[0], whole[0], atol=tolerance, rtol=tolerance)
    assert_close(split[1], whole[1], atol=tolerance, rtol=tolerance)


def test_a_rejected_token_leaves_numerator_and_denominator():
    # losses 1, 2, 6 and the last is rejected: (1 + 2) / 2, not 3 / 3
    loss, mask = torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[True, True, True]])
    keep = mask & (loss < 5)
    assert float(aggregate_whole(loss, keep, mode="token-mean")) == 1.5


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_on_gives_zero_with_a_gradient(mode):
    loss = torch.ones(2, 3, requires_grad=True)
    total = aggregate(loss, torch.zeros(2, 3), Denominators(0, 0, 0), mode=mode, norm_length=3)
    total.backward()
    assert float(total.detach()) == 0
    assert torch.equal(loss.grad, torch.zeros(2, 3))


def test_bfloat16_losses_are_added_in_float32():
    loss = torch.ones(1, 1000, dtype=torch.bfloat16)
    total = aggregate(loss, torch.ones(1, 1000), Denominators(1, 1, 1), mode="seq-mean-token-sum")
    assert total.dtype == torch.float32
    assert float(total) == 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "mean"}, "token-mean, seq-mean"),
        ({"mode": "seq-mean-token-sum-norm"}, "maximum response length"),
        ({"mode": "token-mean", "row_weights": torch.ones(3)}, "row_weights has shape"),
        ({"mode": "token-mean", "mask": torch.ones(2)}, "mask has shape"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    arguments = {"loss": torch.zeros(2, 2), "mask": torch.ones(2, 2), **changes}
    with pytest.raises(ValueError, match=message):
        aggregate_whole(**arguments)


@given(seed=SEEDS, rows=st.integers(0, 5))
@QUICK
def test_denominators_of_parts_add_up(seed, rows):
    mask = draw_mask(seed, rows, 3)
    whole = denominators_of(mask)
    parts = [denominators_of(mask[i : i + 1]) for i in range(rows)]
    assert whole == Denominators(*(sum(getattr(p, name) for p in parts) for name in ("tokens", "sequences", "units")))
