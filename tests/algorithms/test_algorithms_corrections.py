"""Train/infer mismatch: weights, filters and what is measured."""

from __future__ import annotations

import math

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_mask, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.corrections import (
    Filter,
    at_level,
    correct,
    effective_share,
    importance_weights,
    keep_by_difference,
    keep_by_divergence,
    keep_by_ratio,
    log_ratio_of,
    mean_one,
    mismatch_metrics,
    perplexity_metrics,
)
from roll.types.metrics import Metrics

QUICK = settings(max_examples=30, deadline=None, derandomize=True)
LEVELS = ["token", "segment", "geometric", "sequence"]

# One row, two turns: log-ratios 0.2, 0.4 | 0.9 with a reply between and padding behind.
LOG_RATIO = torch.tensor([[0.2, 0.4, 7.0, 0.9, 7.0]])
MASK = torch.tensor([[True, True, False, True, False]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.2, 0.4, 0.0, 0.9, 0.0]),
        ("segment", [0.3, 0.3, 0.0, 0.9, 0.0]),
        ("geometric", [0.5, 0.5, 0.0, 0.5, 0.0]),
        ("sequence", [1.5, 1.5, 0.0, 1.5, 0.0]),
    ],
)
def test_levels_match_hand_computed_values(level, expected):
    assert_close(at_level(LOG_RATIO, MASK, level), torch.tensor([expected]))


def test_weights_are_truncated_at_the_cap():
    # e^0.2 = 1.2214, e^0.4 = 1.4918, e^0.9 = 2.4596 -> 2
    expected = torch.tensor([[1.221403, 1.491825, 0.0, 2.0, 0.0]])
    assert_close(importance_weights(LOG_RATIO, MASK, level="token", cap=2.0), expected)


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("token", [True, False, False, False, False]),  # 1.22 | 1.49 | 2.46
        ("segment", [True, True, False, False, False]),  # e^0.3 = 1.35 | 2.46
        ("geometric", [False] * 5),  # e^0.5 = 1.65
        ("sequence", [False] * 5),  # e^1.5 = 4.48
    ],
)
def test_the_ratio_filter_keeps_what_lies_within(level, kept):
    found = keep_by_ratio(LOG_RATIO, MASK, level=level, low=0.5, high=1.4)
    assert found.tolist() == [kept]


def test_a_lower_bound_of_zero_filters_nothing_from_below():
    tiny = torch.tensor([[-400.0, -800.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert keep_by_ratio(tiny, mask, level="token", low=0.0, high=2.0).all()
    assert not keep_by_ratio(tiny, mask, level="token", low=1e-9, high=2.0).any()


def test_a_filter_with_one_bound_leaves_the_other_side_open():
    train = torch.tensor([[-5.0, 0.0, 5.0]])
    mask, infer = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3)
    for rule, kept in [
        (Filter("token", high=2.0), [True, True, False]),
        (Filter("token", low=0.5), [False, True, True]),
        (Filter("token", low=-0.5, on="difference"), [False, True, True]),
        (Filter("token", high=0.5, on="difference"), [True, True, False]),
    ]:
        assert correct(train, infer, mask, filters=(rule,)).keep.tolist() == [kept]


def test_the_difference_filter_compares_probabilities():
    # 0.9 - 0.5 = 0.4 and 0.5 - 0.6 = -0.1; mean 0.15
    train, infer = torch.tensor([[0.9, 0.5]]).log(), torch.tensor([[0.5, 0.6]]).log()
    mask = torch.ones(1, 2, dtype=torch.bool)
    bounds = {"low": -0.2, "high": 0.2}
    assert keep_by_difference(train, infer, mask, level="token", **bounds).tolist() == [[False, True]]
    assert keep_by_difference(train, infer, mask, level="sequence", **bounds).all()
    assert keep_by_difference(train, infer, mask, level="geometric", **bounds).all()


def test_a_segment_ends_where_other_weights_went_on():
    # Action tokens of versions 1, 1, 2 and, behind a reply, 2: three segments; the version under the mask says nothing.
    log_ratio = torch.tensor([[0.2, 0.4, 0.5, 7.0, 0.9]])
    mask, versions = torch.tensor([[1, 1, 1, 0, 1]]), torch.tensor([[1, 1, 2, 9, 2]])
    assert_close(at_level(log_ratio, mask, "segment", versions), torch.tensor([[0.3, 0.3, 0.5, 0.0, 0.9]]))
    weights = importance_weights(log_ratio, mask, level="segment", cap=2.0, versions=versions)
    assert_close(weights, torch.tensor([[1.349859, 1.349859, 1.648721, 0.0, 2.0]]))  # e^0.3, e^0.5, e^0.9 -> 2
    bounds = {"level": "segment", "low": 0.5, "high": 1.5, "versions": versions}
    assert keep_by_ratio(log_ratio, mask, **bounds).tolist() == [[True, True, False, False, False]]
    # p_infer = 0.5: differences 0.1 and 0.3, mean 0.2 | 0.4 | 0.3
    train, infer = torch.tensor([[0.6, 0.8, 0.9, 0.1, 0.8]]).log(), torch.full((1, 5), 0.5).log()
    found = keep_by_difference(train, infer, mask, level="segment", low=-1.0, high=0.35, versions=versions)
    assert found.tolist() == [[True, True, False, False, True]]


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_other_levels_do_not_ask_which_weights_sampled(level):
    log_ratio, mask, versions = draw(0, 3, 6), draw_mask(1, 3, 6), torch.arange(18).reshape(3, 6) // 2
    assert torch.equal(at_level(log_ratio, mask, level, versions), at_level(log_ratio, mask, level))


@given(seed=SEEDS, level=st.sampled_from(LEVELS), kinds=st.sampled_from([0, 1, 3]))
@QUICK
def test_levels_equal_a_loop_and_never_see_what_is_masked(seed, level, kinds):
    values, mask = draw(seed, 3, 6), draw_mask(seed, 3, 6, share=0.6)
    versions = torch.randint(kinds, (3, 6), generator=torch.Generator().manual_seed(seed)) if kinds else None
    expected = torch.zeros(3, 6, dtype=torch.float64)
    for i in range(3):
        units: list[list[int]] = []
        for t in range(6):
            if mask[i, t]:
                changed = t > 0 and versions is not None and bool(versions[i, t] != versions[i, t - 1])
                new = not units or level == "token" or (level == "segment" and (changed or not mask[i, t - 1]))
                units.append([t]) if new else units[-1].append(t)
        for unit in units:
            total = sum(float(values[i, t]) for t in unit)
            for t in unit:
                expected[i, t] = total if level == "sequence" else total / len(unit)
    for junk in (math.nan, math.inf):
        assert_close(at_level(poison(values, mask, junk), mask, level, versions), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_levels_have_a_clean_gradient(level):
    mask = torch.tensor([[True, False, True]])
    values = torch.tensor([[0.1, math.nan, 0.3]], requires_grad=True)
    at_level(values, mask, level).sum().backward()
    assert torch.isfinite(values.grad).all()
    # token, segment: 1 each; geometric: 2 tokens * 1/2; sequence: 2 tokens * 1
    each = 2.0 if level == "sequence" else 1.0
    assert_close(values.grad, torch.tensor([[each, 0.0, each]]))


def test_without_options_nothing_is_changed_but_everything_measured():
    train, infer = draw(0, 2, 3), draw(1, 2, 3)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    found = correct(train, infer, mask)
    assert torch.equal(found.keep, mask)
    assert torch.equal(found.weights, mask.to(found.weights.dtype))
    assert {"mismatch/kl", "mismatch/ratio_max", "mismatch/ratio_min"} <= set(found.metrics.result())


def test_mismatch_is_measured_by_hand_computed_values():
    # ratios 2 and 1: k3 = 2 - 1 - log 2 = 0.306853 and 0; mean 0.153426
    result = mismatch_metrics(torch.tensor([[math.log(2.0), 0.0, 9.0]]), torch.tensor([[1, 1, 0]])).result()
    assert result["mismatch/kl"] == pytest.approx(0.153426, rel=1e-5)
    assert result["mismatch/kl_k1"] == pytest.approx(-math.log(2) / 2)  # the mean of log infer - log train
    assert result["mismatch/ratio_max"] == pytest.approx(2.0)
    assert result["mismatch/ratio_min"] == pytest.approx(1.0)
    assert result["mismatch/abs_log_ratio_mean"] == pytest.approx(math.log(2) / 2)
    assert result["mismatch/chi2"] == pytest.approx(3 / 2)  # 2^2 - 1 and 0


def test_far_ratios_are_counted():
    log_ratio = torch.tensor([[2.5, 1.9, 1.0, 0.6, 0.4, 9.0]]).log()
    result = mismatch_metrics(log_ratio, torch.tensor([[1, 1, 1, 1, 1, 0]])).result()
    assert result["mismatch/above_2_share"] == pytest.approx(1 / 5)
    assert result["mismatch/below_half_share"] == pytest.approx(1 / 5)
    chi2 = math.fsum(r * r - 1 for r in (2.5, 1.9, 1.0, 0.6, 0.4)) / 5
    assert result["mismatch/chi2"] == pytest.approx(chi2, rel=1e-6)


def test_fresh_tokens_are_measured_apart_and_all_together():
    # fresh: ratio 2; stale: ratio 1/2, k3 ln 2 - 1/2 = 0.193147; the third is masked
    log_ratio = torch.tensor([[math.log(2.0), -math.log(2.0), 9.0]])
    mask, fresh = torch.tensor([[1, 1, 0]]), torch.tensor([[True, False, True]])
    result = mismatch_metrics(log_ratio, mask, fresh).result()
    assert result["mismatch/kl"] == pytest.approx(0.306853, rel=1e-5)
    assert result["mismatch/all_kl"] == pytest.approx((0.306853 + 0.193147) / 2, rel=1e-5)
    assert (result["mismatch/ratio_min"], result["mismatch/all_ratio_min"]) == pytest.approx((2.0, 0.5))
    # Where nothing is fresh there is nothing to say about the engine.
    assert set(mismatch_metrics(log_ratio, mask, torch.zeros_like(fresh)).result()) == {
        f"mismatch/all_{name}"
        for name in (
            "kl",
            "kl_k1",
            "chi2",
            "abs_log_ratio_mean",
            "above_2_share",
            "below_half_share",
            "ratio_max",
            "ratio_min",
        )
    }


def test_perplexities_are_those_of_each_response():
    # Row 1: train 1/2, 1/4 (mean log -1.5 ln 2, perplexity 2^1.5), infer 1/2, 1/2 (2). Row 2: train 1/2, infer 1/4.
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    train = torch.tensor([[half, quarter, math.nan], [half, 5.0, 5.0], [1.0, 1.0, 1.0]])
    infer = torch.tensor([[half, half, 7.0], [quarter, 5.0, 5.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    expected = {
        "ppl_train": (2**1.5 + 2) / 2,
        "ppl_infer": (2 + 4) / 2,
        "ppl_ratio": (2**0.5 + 0.5) / 2,
        "log_ppl_abs_diff": (0.5 + 1) * math.log(2) / 2,
    }
    found = perplexity_metrics(train, infer, mask)
    assert found.result() == pytest.approx({f"mismatch/{name}": value for name, value in expected.items()})
    parts = [perplexity_metrics(train[rows], infer[rows], mask[rows]) for rows in (slice(1, 3), slice(0, 1))]
    assert Metrics.merged(parts).result() == pytest.approx(found.result())
    # Only the first token of row 1 is of these weights: 2 and 2.
    fresh = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 0]])
    mixed = perplexity_metrics(train, infer, mask, fresh).result()
    assert (mixed["mismatch/ppl_train"], mixed["mismatch/ppl_ratio"]) == pytest.approx((2.0, 1.0))
    assert mixed["mismatch/all_ppl_train"] == pytest.approx(expected["ppl_train"])
    never = perplexity_metrics(torch.tensor([[-math.inf]]), torch.tensor([[0.0]]), torch.tensor([[1]])).result()
    assert never["mismatch/ppl_train"] == pytest.approx(math.exp(20)), "bounded: a metric must be a number"


@given(seed=SEEDS, cut=st.integers(0, 4))
@QUICK
def test_the_mismatch_of_parts_merges_to_that_of_the_whole_in_any_order(seed, cut):
    log_ratio, mask, fresh = draw(seed, 4, 5), draw_mask(seed, 4, 5), draw_mask(seed + 7, 4, 5, share=0.5)
    whole = mismatch_metrics(log_ratio, mask, fresh).result()
    parts = [mismatch_metrics(log_ratio[rows], mask[rows], fresh[rows]) for rows in (slice(cut, 4), slice(0, cut))]
    assert Metrics.merged(parts).result() == pytest.approx(whole)
    kept = [(float(log_ratio[i, t]), bool(fresh[i, t])) for i in range(4) for t in range(5) if mask[i, t]]
    k3 = [math.exp(x) - 1 - x for x, _ in kept]
    assert whole["mismatch/all_kl"] == pytest.approx(math.fsum(k3) / len(k3))
    new = [value for value, (_, is_fresh) in zip(k3, kept, strict=True) if is_fresh]
    assert not new or whole["mismatch/kl"] == pytest.approx(math.fsum(new) / len(new))


def test_the_effective_sample_size_is_a_share_of_the_tokens():
    # (1 + 3)^2 / (2 * 10) = 0.8; alike 1; one of four 1/4; none 0. What is masked has no say.
    mask = torch.tensor([[1, 1, 0]])
    assert effective_share(torch.tensor([[1.0, 3.0, math.nan]]), mask) == pytest.approx(0.8)
    assert effective_share(torch.full((1, 3), 7.0), mask) == 1.0
    assert effective_share(torch.tensor([[0.0, 5.0, 0.0, 0.0]]), torch.ones(1, 4)) == pytest.approx(0.25)
    assert effective_share(torch.zeros(1, 3), mask) == 0.0
    assert effective_share(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


@given(seed=SEEDS, scale=st.floats(1e-3, 1e3))
@QUICK
def test_the_effective_sample_size_equals_a_loop_and_knows_no_scale_and_no_order(seed, scale):
    weights, mask = draw(seed, 4, 5).exp(), draw_mask(seed, 4, 5)
    kept = [float(weights[i, t]) for i in range(4) for t in range(5) if mask[i, t]]
    expected = math.fsum(kept) ** 2 / (len(kept) * math.fsum(w * w for w in kept))
    assert 1 / len(kept) <= expected <= 1
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    for found in (effective_share(weights * scale, mask), effective_share(weights[order], mask[order])):
        assert found == pytest.approx(expected)


def test_a_rejected_token_counts_as_weight_0_in_the_effective_sample_size():
    # Ratios 1, 3 | 1, of which 3 is rejected: weights 1, 0, 1 -> 4 / (3 * 2)
    train = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    mask, infer = torch.tensor([[True, True], [True, False]]), torch.zeros(2, 2)
    rule = Filter(level="token", high=2.0)
    for level in (None, "token"):
        found = correct(train, infer, mask, weight_level=level, filters=(rule,)).metrics.result()
        assert found["mismatch/ess"] == pytest.approx(2 / 3)
    # Without the filter the weight of 3 is capped at 2: (1 + 2 + 1)^2 / (3 * 6)
    found = correct(train, infer, mask, weight_level="token", weight_cap=2.0).metrics.result()
    assert found["mismatch/ess"] == pytest.approx(16 / 18)
    assert "mismatch/ess" not in correct(train, infer, mask).metrics.result()


def test_filters_combine_and_are_counted():
    # ratios 1, 3 | 1: the ratio filter drops one of three tokens; the sequence filter then drops row 0 whole
    train = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    infer = torch.zeros(2, 2)
    token = Filter(level="token", low=0.5, high=2.0)
    found = correct(train, infer, mask, filters=(token,))
    assert found.keep.tolist() == [[True, False], [True, False]]
    assert found.metrics.result()["mismatch/rejected_share"] == pytest.approx(1 / 3)
    sequence = Filter(level="sequence", low=0.5, high=2.0)
    for both in ((token, sequence), (sequence, token)):
        found = correct(train, infer, mask, filters=both)
        assert found.keep.tolist() == [[False, False], [True, False]]
    assert found.metrics.result()["mismatch/rejected_row_share"] == 0.5


def test_a_difference_filter_works_through_correct():
    train, infer = torch.tensor([[0.9, 0.5]]).log(), torch.tensor([[0.5, 0.6]]).log()
    rule = Filter(level="token", low=-0.2, high=0.2, on="difference")
    assert correct(train, infer, torch.ones(1, 2), filters=(rule,)).keep.tolist() == [[False, True]]


def test_weights_and_their_truncation_are_measured():
    found = correct(LOG_RATIO, torch.zeros(1, 5), MASK, weight_level="token", weight_cap=2.0)
    result = found.metrics.result()
    assert result["mismatch/weight_mean"] == pytest.approx((1.221403 + 1.491825 + 2.0) / 3, rel=1e-5)
    assert result["mismatch/weight_capped_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("lower", "cap", "share"),
    [
        (0.0, 2.0, 1 / 4),  # 8 at the cap; what has no ratio is at no bound
        (0.5, 2.0, 2 / 4),  # 0.25 is raised to 0.5 as well
        (0.5, 100.0, 1 / 4),
        (0.0, 100.0, 0.0),
        (2.0, 2.0, 3 / 4),  # every ratio that there is
    ],
)
def test_weights_at_either_bound_are_counted(lower, cap, share):
    # Ratios 1/4, 1, 8, and one that neither side can have sampled: 0 / 0.
    train = torch.tensor([[0.25, 1.0, 8.0, 0.0]]).log()
    infer = torch.tensor([[1.0, 1.0, 1.0, 0.0]]).log()
    bounds = {"weight_lower": lower, "weight_cap": cap}
    found = correct(train, infer, torch.ones(1, 4), weight_level="token", **bounds)
    assert found.metrics.result()["mismatch/weight_capped_share"] == pytest.approx(share)
    assert found.metrics.result()["mismatch/undefined_weights"] == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_junk_under_the_mask_changes_no_weight_and_no_filter(level, junk):
    train, infer, mask = draw(0, 3, 4), draw(1, 3, 4), draw_mask(5, 3, 4)
    rules = (Filter(level, 0.3, 3.0), Filter(level, -0.9, 0.9, on="difference"))
    clean = correct(train, infer, mask, weight_level=level, filters=rules)
    dirty = correct(poison(train, mask, junk), poison(infer, mask, junk), mask, weight_level=level, filters=rules)
    assert torch.equal(clean.weights, dirty.weights)
    assert torch.equal(clean.keep, dirty.keep)
    assert clean.metrics.result() == dirty.metrics.result()


def test_everything_is_constant_in_the_loss():
    train = torch.zeros(1, 2, requires_grad=True)
    found = correct(train, torch.zeros(1, 2), torch.ones(1, 2), weight_level="sequence")
    assert not found.weights.requires_grad


def test_an_extreme_mismatch_stays_finite():
    found = correct(torch.full((1, 9), -1e4), torch.zeros(1, 9), torch.ones(1, 9), weight_level="sequence")
    assert torch.isfinite(found.weights).all()
    assert all(math.isfinite(x) for x in found.metrics.result().values())


INF = math.inf


@pytest.mark.parametrize(
    ("level", "expected"),
    # Row 1: ratio 2 and 0 / 0. Row 2: ratios 0 and infinite, whose product is undefined. Row 3: ratio 2 and 0.
    [
        ("token", [[2.0, 0.0], [0.0, 3.0], [2.0, 0.0]]),
        ("segment", [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]),
        ("geometric", [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]),
        ("sequence", [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]),
    ],
)
def test_an_undefined_ratio_has_weight_0_and_is_counted(level, expected):
    train = torch.tensor([[math.log(2.0), -INF], [-INF, 0.0], [math.log(2.0), -INF]])
    infer, mask = torch.tensor([[0.0, -INF], [0.0, -INF], [0.0, 0.0]]), torch.ones(3, 2, dtype=torch.bool)
    found = correct(train, infer, mask, weight_level=level, weight_cap=3.0)
    assert_close(found.weights, torch.tensor(expected), atol=1e-6, rtol=0)
    result = found.metrics.result()
    assert all(math.isfinite(value) for value in result.values())
    assert result["mismatch/undefined_weights"] == (1.0 if level == "token" else 4.0)
    plain = correct(infer[2:], train[2:], mask[2:], weight_level=level)
    assert "mismatch/undefined_weights" not in plain.metrics.result()
    rule = Filter(level, 0.1, 9.0)
    assert not correct(train, infer, mask, filters=(rule,)).keep[0, 1]


def test_icepop_zeroes_the_weight_of_what_the_rejection_mask_takes_out():
    # Ratios 1, 3 | 1, of which 3 is rejected. The loss of the token is 0 both ways; its place in the mean differs.
    train, infer = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]]), torch.zeros(2, 2)
    mask, rule = torch.tensor([[True, True], [True, False]]), Filter(level="token", low=0.5, high=2.0)
    masked = correct(train, infer, mask, filters=(rule,), rejection="mask")
    popped = correct(train, infer, mask, filters=(rule,), rejection="icepop")
    assert masked.keep.tolist() == [[True, False], [True, False]]
    assert masked.weights.tolist() == [[1.0, 1.0], [1.0, 0.0]]
    assert popped.keep.tolist() == mask.tolist()
    assert popped.weights.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert popped.metrics.result() == masked.metrics.result()


def test_an_unknown_kind_of_rejection_is_refused():
    with pytest.raises(ValueError, match="icepop"):
        correct(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), rejection="drop")


def test_an_empty_mask_is_fine():
    found = correct(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0), weight_level="segment")
    assert found.weights.shape == (2, 0)
    assert found.metrics.result() == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: at_level(LOG_RATIO, MASK, "row"), "unknown ratio level"),
        (lambda: at_level(LOG_RATIO, MASK[:, :1], "token"), "mask has shape"),
        (lambda: importance_weights(LOG_RATIO, MASK, level="token", cap=0.0), "cap"),
        (lambda: keep_by_ratio(LOG_RATIO, MASK, level="token", low=2.0, high=1.0), "low < high"),
        (lambda: log_ratio_of(LOG_RATIO, LOG_RATIO[:, :2], MASK), "infer_logprobs has shape"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("level", ["token", "segment", "geometric", "sequence"])
def test_rejection_by_divergence_is_the_definition(estimator, level):
    generator = torch.Generator().manual_seed(5)
    d = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 7, generator=generator) > 0.3
    found = keep_by_divergence(d, mask, estimator=estimator, level=level, high=0.4)
    largest = keep_by_divergence(d, mask, estimator=estimator, level=level, high=0.4, row_max=True)
    for row in range(6):
        of_token = [float(x) ** 2 / 2 if estimator == "k2" else math.exp(x) - 1 - float(x) for x in d[row]]
        where = [t for t in range(7) if mask[row, t]]
        for t in range(7):
            begin, end = t, t + 1
            while level == "segment" and begin > 0 and mask[row, begin - 1]:
                begin -= 1
            while level == "segment" and end < 7 and mask[row, end]:
                end += 1
            unit = list(range(begin, end)) if level in ("token", "segment") else where
            total = math.fsum(of_token[i] for i in unit)
            value = total if level == "sequence" else total / max(len(unit), 1)
            assert bool(found[row, t]) == (bool(mask[row, t]) and value <= 0.4)
            worst = max((of_token[i] for i in where), default=0.0)
            assert bool(largest[row, t]) == (bool(mask[row, t]) and worst <= 0.4)


def test_an_undefined_ratio_diverges_and_what_is_masked_does_not():
    d = torch.tensor([[math.nan, 0.0, 0.0], [math.nan, 0.0, math.inf]])
    mask = torch.tensor([[True, True, False], [False, True, False]])
    token = keep_by_divergence(d, mask, estimator="k3", level="token", high=0.1)
    assert token.tolist() == [[False, True, False], [False, True, False]]
    row = keep_by_divergence(d, mask, estimator="k3", level="token", high=0.1, row_max=True)
    assert row.tolist() == [[False, False, False], [False, True, False]]


def test_weights_of_mean_one():
    weights = torch.tensor([[1.0, 3.0, 9.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert_close(mean_one(weights, mask)[0, :2], torch.tensor([1.0, 3.0]))  # mean (1 + 3 + 0 + 0) / 4
    assert_close(mean_one(weights * 0, mask), weights * 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"high": 0.0, "estimator": "k3"}, "must be > 0"), ({"high": 1.0, "estimator": "k1"}, "unknown divergence 'k1'")],
)
def test_bad_divergences_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        keep_by_divergence(LOG_RATIO, MASK, level="token", **options)


def test_a_lower_bound_above_the_cap_is_refused():
    with pytest.raises(ValueError, match="from 0 to its cap 2"):
        importance_weights(LOG_RATIO, MASK, level="token", cap=2.0, lower=3.0)
