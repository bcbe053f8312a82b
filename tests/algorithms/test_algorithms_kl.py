"""KL estimators, their gradients, and the coefficient's controllers."""

from __future__ import annotations

import math

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_mask, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.kl import AdaptiveKL, FixedKL, clamped_tokens, kl_divergence, kl_loss

QUICK = settings(max_examples=30, deadline=None, derandomize=True)
KINDS = ["kl", "abs", "mse", "low_var_kl"]


def one(logp: float, ref: float, kind: str, gradient: str = "own", dtype=torch.float32) -> tuple[float, float]:
    """(value, d value / d logp) of one token."""
    logprobs = torch.tensor([[logp]], dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    value = kl_divergence(logprobs, torch.tensor([[ref]], dtype=dtype), mask, kind=kind, gradient=gradient)
    value.sum().backward()
    return float(value.detach()), float(logprobs.grad)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("kl", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("mse", 0.125, 0.5),  # d^2 / 2, d
        ("low_var_kl", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),  # e^-d - 1 + d, 1 - e^-d
    ],
)
def test_estimators_match_hand_computed_values(kind, value, slope):
    # d = logp - ref = -1 - (-1.5) = 0.5
    assert one(-1.0, -1.5, kind) == pytest.approx((value, slope), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_unbiased_gradient_is_that_of_half_the_square(kind):
    # value of the estimator, slope d = 0.5
    own = one(-1.0, -1.5, kind)
    assert one(-1.0, -1.5, kind, "unbiased") == pytest.approx((own[0], 0.5), rel=1e-6)


@pytest.mark.parametrize("kind", ["kl", "abs", "low_var_kl"])
def test_a_plus_keeps_the_value_and_has_the_slope_of_half_the_square(kind):
    # d = -0.7: the value is the estimator's, the slope d; with the ratio e^0.5 to the sampler both times that.
    value, _ = one(-1.0, -0.3, kind)
    assert one(-1.0, -0.3, f"{kind}+") == pytest.approx((value, -0.7), rel=1e-6)
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    ref, sampled, mask = torch.full((1, 1), -0.3).double(), torch.full((1, 1), -1.5).double(), torch.ones(1, 1)
    for ratio, weight in (({}, 1.0), ({"sampled_logprobs": sampled}, math.exp(0.5))):
        found = kl_loss(logp, ref, mask, kind=f"{kind}+", **ratio)
        (slope,) = torch.autograd.grad(found.sum(), logp)
        assert float(found.detach()) == pytest.approx(weight * value, rel=1e-6)
        assert float(slope) == pytest.approx(weight * -0.7, rel=1e-6)


@pytest.mark.parametrize("log_ref_over_pi", [5.0, 30.0, 95.0, -95.0, 0.0, 1e-4, math.inf, -math.inf])
def test_low_var_kl_is_finite_with_the_right_gradient_far_from_the_reference(log_ref_over_pi):
    # x = log(ref / pi): value e^x - 1 - x, slope 1 - e^x, where x stays within +-10.
    value, slope = one(-100.0, -100.0 + log_ref_over_pi, "low_var_kl")
    x = max(min(log_ref_over_pi, 10.0), -10.0)
    assert value == pytest.approx(math.exp(x) - 1 - x, rel=1e-3, abs=1e-7)
    assert slope == pytest.approx(1 - math.exp(x), rel=1e-3, abs=1e-6)
    # sign: where the policy is below the reference (x > 0), raising logp lowers the KL
    assert (slope < 0) == (log_ref_over_pi > 0)


def test_low_var_kl_keeps_its_digits_near_zero():
    # d = 1e-4: d^2 / 2 - d^3 / 6 = 4.99983e-9; exp(-d) - 1 + d in float32 gives 0 or 6e-8
    value, _ = one(1e-4, 0.0, "low_var_kl")
    assert value == pytest.approx(4.99983e-9, rel=1e-2)


@given(seed=SEEDS, kind=st.sampled_from(KINDS), scale=st.sampled_from([0.01, 1.0, 4.0]))
@QUICK
def test_estimators_equal_a_float64_loop_and_never_see_what_is_masked(seed, kind, scale):
    logp, ref, mask = draw(seed, 3, 4, scale=scale), draw(seed + 1, 3, 4, scale=scale), draw_mask(seed, 3, 4)
    formula = {"kl": lambda d: d, "abs": abs, "mse": lambda d: d * d / 2, "low_var_kl": lambda d: math.exp(-d) - 1 + d}[
        kind
    ]
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for i in range(3):
        for t in range(4):
            if mask[i, t]:
                expected[i, t] = formula(max(-10.0, min(10.0, float(logp[i, t] - ref[i, t]))))
    for junk in (math.nan, -math.inf, 1e30):
        policy = poison(logp, mask, junk).requires_grad_()
        found = kl_divergence(policy, poison(ref, mask, junk), mask, kind=kind)
        assert_close(found, expected, atol=1e-12, rtol=1e-9)
        found.sum().backward()
        assert not policy.grad[~mask].any()
        assert torch.isfinite(policy.grad).all()


@pytest.mark.parametrize("gradient", ["own", "unbiased"])
@given(seed=SEEDS)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_the_unbiased_gradient_is_the_gradient_of_the_true_kl(gradient, seed):
    # Expectation over all tokens of a small vocabulary, weighted by the policy: exact, no sampling.
    logits, ref = draw(seed, 6).requires_grad_(), draw(seed + 1, 6).log_softmax(0)
    true = (logits.log_softmax(0).exp() * (logits.log_softmax(0) - ref)).sum()
    (true_slope,) = torch.autograd.grad(true, logits)
    logp, mask = logits.log_softmax(0), torch.ones(1, 6, dtype=torch.bool)
    per_token = kl_divergence(logp[None], ref[None], mask, kind="kl", gradient=gradient)
    expected_loss = (logp.detach().exp() * per_token[0]).sum()
    (slope,) = torch.autograd.grad(expected_loss, logits)
    assert_close(expected_loss, true)
    if gradient == "unbiased":
        assert_close(slope, true_slope)
    else:
        assert_close(slope, torch.zeros_like(slope))  # the score function has mean 0: `kl` alone teaches nothing


@pytest.mark.parametrize("kind", [*KINDS, "full"])
def test_following_the_kl_loss_leads_to_the_reference(kind):
    # gradient descent on the exact expectation over a vocabulary of three
    ref, logits = torch.tensor([2.0, 0.0, -1.0]).log_softmax(0), torch.zeros(3, requires_grad=True)
    for _ in range(200):
        logp = logits.log_softmax(0)
        if kind == "full":
            loss = kl_loss(logp[None, None], ref[None, None], torch.ones(1, 1), kind=kind).sum()
        else:
            loss = (logp.detach().exp() * kl_loss(logp[None], ref[None], torch.ones(1, 3), kind=kind)[0]).sum()
        (slope,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= 0.2 * slope
    assert (logits.detach().log_softmax(0) - ref).abs().max() < 0.2


@given(seed=SEEDS)
@QUICK
def test_low_var_kl_is_never_negative(seed):
    logp, ref = draw(seed, 2, 5, dtype=torch.float32), draw(seed + 1, 2, 5, dtype=torch.float32)
    assert (kl_divergence(logp, ref, torch.ones(2, 5), kind="low_var_kl") >= 0).all()


def toy_kl():
    """(logits, log-probs of the reference, exact KL, its exact gradient) of a vocabulary of six."""
    logits, ref = draw(3, 6).requires_grad_(), draw(4, 6).log_softmax(0)
    true = (logits.log_softmax(0).exp() * (logits.log_softmax(0) - ref)).sum()
    return logits, ref, true.detach(), torch.autograd.grad(true, logits)[0]


@pytest.mark.parametrize("kind", ["kl+", "low_var_kl+", "abs+", "full"])
def test_the_expected_gradient_of_straight_through_estimators_is_that_of_the_exact_kl(kind):
    logits, ref, true, true_slope = toy_kl()
    logp = logits.log_softmax(0)
    if kind == "full":
        loss = kl_loss(logp[None, None], ref[None, None], torch.ones(1, 1), kind=kind).sum()
    else:
        loss = (logp.detach().exp() * kl_loss(logp[None], ref[None], torch.ones(1, 6), kind=kind)[0]).sum()
    (slope,) = torch.autograd.grad(loss, logits)
    assert_close(slope, true_slope, atol=1e-12, rtol=1e-9)
    if kind != "abs+":  # whose mean isn't the KL
        assert_close(loss.detach(), true, atol=1e-12, rtol=1e-9)


def test_the_mean_of_estimators_over_samples_is_the_full_kl():
    logits, ref, true, _ = toy_kl()
    logp = logits.detach().log_softmax(0)
    drawn = torch.multinomial(logp.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    for kind in ("kl", "low_var_kl", "low_var_kl+"):
        found = kl_divergence(logp[drawn][None], ref[drawn][None], torch.ones(1, len(drawn)), kind=kind)
        assert float(found.mean()) == pytest.approx(float(true), abs=4 * float(found.std()) / len(drawn) ** 0.5)
    some = kl_divergence(logp[None, None, :3], ref[None, None, :3], torch.ones(1, 1), kind="full")
    assert 0 < float(some) < float(true)  # three tokens and all others as one: a lower bound


# ---- with the importance ratio -------------------------------------------------------------------------


def expected_gradient(kind, theta, ref, sampler, **options):
    """Gradient of the expected loss over all actions, drawn from `sampler`."""
    theta = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    logp, ref, sampled = (x.log_softmax(0)[None] for x in (theta, torch.tensor(ref).double(), sampler.double()))
    mask = torch.ones(logp.shape, dtype=torch.bool)
    if options:
        options["sampled_logprobs"] = sampled
    loss = (sampled.exp() * kl_loss(logp, ref, mask, kind=kind, **options)).sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    return loss.detach(), gradient


@pytest.mark.parametrize("sampler", [torch.tensor([0.5, 0.2, 0.0]), torch.tensor([1.2, 0.0, -1.0])])
@pytest.mark.parametrize("kind", ["kl", "mse", "low_var_kl"])
def test_with_the_ratio_the_expected_gradient_is_that_of_the_kl(kind, sampler):
    # d KL / d theta_a = pi_a (d_a - KL) with pi = softmax [1.2, 0, -1], d = log pi - log softmax [0, .3, .2],
    # whether the tokens are stale or not.
    loss, gradient = expected_gradient(kind, [1.2, 0.0, -1.0], [0.0, 0.3, 0.2], sampler, cap=math.inf)
    assert_close(gradient, torch.tensor([0.3600, -0.2115, -0.1484]).double(), atol=1e-4, rtol=0)
    if kind != "mse":
        p, q = torch.tensor([1.2, 0.0, -1.0]).softmax(0), torch.tensor([0.0, 0.3, 0.2]).softmax(0)
        assert float(loss) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_without_the_ratio_stale_tokens_bias_the_gradient():
    _, gradient = expected_gradient("low_var_kl", [1.2, 0.0, -1.0], [0.0, 0.3, 0.2], torch.tensor([0.5, 0.2, 0.0]))
    assert (gradient - torch.tensor([0.3600, -0.2115, -0.1484]).double()).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", [0.5, 5.0, 30.0, 95.0, -95.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_the_ratio_value_and_gradient_are_bounded_by_the_clamp_and_the_cap(kind, x, dtype):
    # Ratio e^0.5, at most 1.2. x = log(ref / pi) within +-10, d = -x. The ratio's own gradient adds the value to the
    # slope: of k3 that makes d.
    logp = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True)
    ref, sampled = torch.tensor([[-1.0 + x]], dtype=dtype), torch.tensor([[-1.5]], dtype=dtype)
    d = -max(min(x, 10.0), -10.0)
    value, slope = {
        "kl": (d, d),
        "abs": (abs(d), abs(d) + math.copysign(1, d)),
        "mse": (d * d / 2, d),
        "low_var_kl": (math.exp(-d) - 1 + d, d),
    }[kind]
    for cap, weight in ((math.inf, math.exp(0.5)), (1.2, 1.2)):
        found = kl_loss(logp, ref, torch.ones(1, 1), kind=kind, sampled_logprobs=sampled, cap=cap)
        (gradient,) = torch.autograd.grad(found.sum(), logp)
        assert float(found.detach()) == pytest.approx(weight * value, rel=1e-5)
        assert float(gradient) == pytest.approx(weight * slope, rel=1e-5)


def test_clamped_tokens_are_counted_inside_the_mask():
    logp = torch.tensor([[0.0, 0.0, 0.0, -math.inf, 0.0]])
    ref = torch.tensor([[-10.5, 9.5, 40.0, -math.inf, 99.0]])
    assert clamped_tokens(logp, ref, torch.tensor([[1, 1, 1, 1, 0]])) == 2


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_junk_under_the_mask_changes_no_kl_loss_with_the_ratio(junk):
    logp, ref, sampled, mask = draw(0, 3, 4), draw(1, 3, 4), draw(2, 3, 4), draw_mask(3, 3, 4)
    clean = kl_loss(logp, ref, mask, kind="low_var_kl", sampled_logprobs=sampled, cap=2.0)
    policy = poison(logp, mask, junk).requires_grad_()
    others = {"sampled_logprobs": poison(sampled, mask, junk), "cap": 2.0}
    dirty = kl_loss(policy, poison(ref, mask, junk), mask, kind="low_var_kl", **others)
    assert_close(dirty.detach(), clean)
    dirty.sum().backward()
    assert torch.isfinite(policy.grad).all()


# ---- full ----------------------------------------------------------------------------------------------


def test_full_kl_sums_over_the_vocabulary():
    # p = (1/2, 1/2), q = (1/4, 3/4): 1/2 log 2 + 1/2 log(2/3) = 0.5 log(4/3) = 0.143841, for each of 3 tokens
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    found = kl_divergence(p.expand(1, 3, 2), q.expand(1, 3, 2), torch.tensor([[True, True, False]]), kind="full")
    assert_close(found, torch.tensor([[0.143841, 0.143841, 0.0]]), atol=1e-6, rtol=0)


def full_kl(logits, ref_logits, mask):
    return kl_divergence(logits.log_softmax(-1), ref_logits.log_softmax(-1), mask, kind="full")


@given(seed=SEEDS)
@QUICK
def test_full_kl_equals_torch_distributions(seed):
    a, b = draw(seed, 2, 3, 5), draw(seed + 1, 2, 3, 5)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=a), torch.distributions.Categorical(logits=b)
    )
    assert_close(full_kl(a, b, torch.ones(2, 3, dtype=torch.bool)), expected, atol=1e-10, rtol=1e-10)


def test_full_kl_with_impossible_tokens_has_a_finite_gradient():
    # both sides rule the last token out: p log p = 0 there
    logits = torch.tensor([[[0.0, 1.0, -math.inf]]], requires_grad=True)
    ref = torch.tensor([[[1.0, 0.0, -math.inf]]])
    value = full_kl(logits, ref, torch.ones(1, 1, dtype=torch.bool))
    value.sum().backward()
    # p = (1, e) / (1 + e), q mirrored: (e - 1) / (e + 1)
    assert float(value.detach()) == pytest.approx((math.e - 1) / (math.e + 1), rel=1e-5)
    assert torch.isfinite(logits.grad).all()


def test_full_kl_ignores_junk_under_the_mask():
    logp = torch.full((1, 2, 3), math.nan)
    logp[0, 0] = math.log(1 / 3)
    ref = logp.clone()
    value = kl_divergence(logp.requires_grad_(), ref, torch.tensor([[True, False]]), kind="full")
    value.sum().backward()
    assert_close(value.detach(), torch.zeros(1, 2), atol=1e-6, rtol=0)
    assert torch.isfinite(logp.grad).all()


def test_full_kl_of_token_logprobs_is_refused():
    with pytest.raises(ValueError, match=r"\[B, T, V\]"):
        kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), kind="full")


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), kind="k9")
    with pytest.raises(ValueError, match="unbiased"):
        kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), kind="kl", gradient="best")


# ---- controllers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.2),  # on target
        (0.11, 0.2 * 1.01),  # 10 % above: 0.1 * 1000 / 10000
        (5.0, 0.2 * 1.02),  # far above: clipped to 0.2 * 0.1
        (0.0, 0.2 * 0.98),  # far below: clipped to -0.2 * 0.1
    ],
)
def test_the_adaptive_coefficient_matches_hand_computed_values(kl, expected):
    assert AdaptiveKL(target=0.1, horizon=10000).update(0.2, kl, 1000) == pytest.approx(expected)


def test_the_fixed_coefficient_stays():
    assert FixedKL().update(0.2, 99.0, 1000) == 0.2


@given(st.floats(0, 100), st.integers(0, 10**6), st.floats(1e-3, 10), st.floats(1, 1e5))
@QUICK
def test_the_adaptive_coefficient_never_turns_negative(kl, n, target, horizon):
    assert AdaptiveKL(target=target, horizon=horizon).update(0.1, kl, n) >= 0


def test_a_kl_that_is_not_a_number_does_not_reach_the_coefficient():
    with pytest.raises(ValueError, match="nan"):
        AdaptiveKL(target=0.1, horizon=100).update(0.1, math.nan, 10)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10.0), (0.1, 0.0), (-1.0, 10.0)])
def test_a_controller_that_cannot_work_is_refused(target, horizon):
    with pytest.raises(ValueError, match="target_kl > 0"):
        AdaptiveKL(target=target, horizon=horizon)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_a_log_prob_that_is_no_number_is_not_taken_for_agreement(kind):
    logprobs, mask = torch.tensor([[-1.0, -2.0, -torch.inf]]), torch.ones(1, 3, dtype=torch.bool)
    reference = torch.tensor([[-1.5, torch.nan, -torch.inf]])
    for found in (
        kl_divergence(logprobs, reference, mask, kind=kind),
        kl_loss(logprobs, reference, mask, kind=kind, sampled_logprobs=torch.tensor([[-1.0, -2.0, -1.0]])),
    ):
        assert found.isnan().tolist() == [[False, True, False]]
        assert float(found[0, 2]) == 0  # both say that it can't be
