"""Policy and value losses: values and gradients worked by hand, float64 references, masks that hold."""

from __future__ import annotations

import math

import pytest
import torch
from algorithms_reference import SEEDS, draw, draw_mask, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from whole_batch import policy_loss

from roll.algorithms.losses import PolicyLossInputs, entropy_loss, sft_loss, value_loss
from roll.configs.catalog.loss_table import LOSSES
from roll.types.metrics import Metrics

QUICK = settings(max_examples=25, deadline=None, derandomize=True)
NAMES = sorted(LOSSES)
OLD = -1.0


def run(name, ratios, advantages, mask=None, dtype=torch.float64, rollout=None, **options):
    """(loss [B, T], d sum(loss) / d logprobs, metrics) for tokens with these ratios to the old policy."""
    ratios = torch.as_tensor(ratios, dtype=dtype)
    logprobs = (OLD + ratios.log()).requires_grad_()
    advantages = torch.as_tensor(advantages, dtype=dtype)
    mask = torch.ones_like(ratios, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    old = torch.full_like(ratios, OLD)
    rollout_logprobs = None if rollout is None else old - torch.as_tensor(rollout, dtype=dtype).log()
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=advantages,
        mask=mask,
        rollout_logprobs=old if rollout_logprobs is None else rollout_logprobs,
    )
    found = policy_loss(name, inputs, options)
    found.loss.sum().backward()
    return found.loss.detach(), logprobs.grad, found.metrics.result()


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


# ---- PPO -----------------------------------------------------------------------------------------------


def test_ppo_matches_hand_computed_values():
    # clip 0.2 / 0.28. A = 2: rho 1.5 is clipped to 1.28 -> -2.56 without gradient; rho 0.5 stays -> -1, slope -A rho.
    # A = -2: rho 1.5 stays -> 3, slope 3; rho 0.5 is clipped to 0.8 -> 1.6 without gradient.
    loss, slope, metrics = run("ppo", [[1.5, 0.5, 1.5, 0.5]], [[2.0, 2.0, -2.0, -2.0]], clip_low=0.2, clip_high=0.28)
    assert_close(loss, row(-2.56, -1.0, 3.0, 1.6))
    assert_close(slope, row(0.0, -1.0, 3.0, 0.0))
    assert metrics["actor/clip_share"] == 0.5
    assert metrics["actor/clip_high_share"] == 0.25
    assert metrics["actor/ratio_mean"] == pytest.approx(1.0)
    assert metrics["actor/ratio_max"] == pytest.approx(1.5)
    assert metrics["actor/ratio_min"] == pytest.approx(0.5)


def test_ppo_on_policy_is_the_policy_gradient():
    loss, slope, _ = run("ppo", [[1.0, 1.0]], [[3.0, -2.0]])
    assert_close(loss, row(-3.0, 2.0))
    assert_close(slope, row(-3.0, 2.0))


def test_the_dual_clip_bounds_the_loss_of_bad_actions_only():
    # c = 3: A = -1, rho 5 -> min(5, 3) = 3 without gradient; rho 2 -> 2. A = 1, rho 5 is PPO's 1.2.
    loss, slope, metrics = run("ppo", [[5.0, 2.0, 5.0]], [[-1.0, -1.0, 1.0]], dual_clip=3.0)
    assert_close(loss, row(3.0, 2.0, -1.2))
    assert_close(slope, row(0.0, 2.0, 0.0))
    assert metrics["actor/dual_clip_share"] == pytest.approx(1 / 3)


def test_ppo_by_segment_uses_the_geometric_mean_of_each_turn():
    # turns of ratios (4, 1) and (1): means 2 and 1; A = -1 so nothing is clipped from above
    loss, slope, _ = run("ppo", [[4.0, 1.0, 9.0, 1.0]], -torch.ones(1, 4), [[1, 1, 0, 1]], ratio_type="segment")
    assert_close(loss, row(2.0, 2.0, 0.0, 1.0))
    # d/dlogp of two equal losses exp((a + b) / 2): 2 * 2 / 2 each
    assert_close(slope, row(2.0, 2.0, 0.0, 1.0))


@given(seed=SEEDS, dual=st.sampled_from([None, 3.0]))
@QUICK
def test_ppo_equals_a_float64_loop(seed, dual):
    logp, old, adv, mask = draw(seed, 3, 4), draw(seed + 1, 3, 4), draw(seed + 2, 3, 4), draw_mask(seed, 3, 4)
    inputs = PolicyLossInputs(logprobs=logp, old_logprobs=old, advantages=adv, mask=mask)
    found = policy_loss("ppo", inputs, {"dual_clip": dual}).loss
    for i in range(3):
        for t in range(4):
            a, rho = float(adv[i, t]), math.exp(float(logp[i, t] - old[i, t]))
            expected = max(-a * rho, -a * min(max(rho, 0.8), 1.2))
            if dual is not None and a < 0:
                expected = min(expected, -dual * a)
            assert float(found[i, t]) == pytest.approx(expected if mask[i, t] else 0.0)


# ---- the others ----------------------------------------------------------------------------------------


def test_gspo_matches_hand_computed_values():
    # ratios 4 and 1 over two tokens: s = 2, clipped to 1.5 for A > 0 (no gradient). Second row:
    # s = sqrt(0.5 * 0.72) = 0.6 stays for A = 1; each token's slope is -A s by itself (stop-gradient form),
    # whatever the others do.
    loss, slope, _ = run("gspo", [[4.0, 1.0], [0.5, 0.72]], [1.0, 1.0], clip_low=0.5, clip_high=0.5)
    assert_close(loss, torch.tensor([[-1.5, -1.5], [-0.6, -0.6]], dtype=torch.float64))
    assert_close(slope, torch.tensor([[0.0, 0.0], [-0.6, -0.6]], dtype=torch.float64))


def test_gspo_weighs_each_tokens_gradient_by_its_own_advantage():
    _, slope, _ = run("gspo", [[1.0, 1.0]], [[2.0, -1.0]])
    assert_close(slope, row(-2.0, 1.0))


def test_gspo_ignores_masked_tokens_in_its_mean():
    plain, _, _ = run("gspo", [[1.1, 0.8]], [1.0], clip_low=0.5, clip_high=0.5)
    padded, _, _ = run("gspo", [[1.1, 7.0, 0.8, 9.0]], [1.0], [[1, 0, 1, 0]], clip_low=0.5, clip_high=0.5)
    assert_close(padded[:, [0, 2]], plain)
    assert not padded[:, [1, 3]].any()


def test_cispo_matches_hand_computed_values():
    # weight clip(rho, 0.8, 1.28), gradient of A logp everywhere: rho 2 -> 1.28, 0.5 -> 0.8, 1.1 -> 1.1
    options = {"clip_low": 0.2, "clip_high": 0.28}
    loss, slope, _ = run("cispo", [[2.0, 0.5, 1.1]], [[1.0, 1.0, -2.0]], **options)
    assert_close(slope, row(-1.28, -0.8, 2.2))
    logp = OLD + row(2.0, 0.5, 1.1).log()
    assert_close(loss, row(-1.28, -0.8, 2.2) * logp)


def test_truncated_importance_sampling_matches_hand_computed_values():
    _, slope, _ = run("tis", [[2.0, 0.5, 0.01]], [[1.0, -1.0, 1.0]], lower=0.1, upper=1.0)
    assert_close(slope, row(-1.0, 0.5, -0.1))


def test_topr_tapers_bad_trajectories_by_their_whole_ratio():
    # row 0: A > 0, weight 1 whatever the ratio. Row 1: A < 0, 0.5 * 0.5 = 0.25. Row 2: A < 0, 4 * 1 is cut to 1.
    ratios = [[3.0, 0.1], [0.5, 0.5], [4.0, 1.0]]
    _, slope, _ = run("topr", ratios, [1.0, -1.0, -1.0])
    assert_close(slope, torch.tensor([[-1.0, -1.0], [0.25, 0.25], [1.0, 1.0]], dtype=torch.float64))


def test_the_token_variant_of_topr_is_another_algorithm():
    _, slope, _ = run("topr", [[0.5, 0.25]], [-1.0], level="token")
    assert_close(slope, row(0.5, 0.25))


def test_topr_weighs_good_and_bad_samples():
    _, slope, _ = run("topr", [[1.0], [1.0]], [1.0, -1.0], positive_weight=2.0, negative_weight=0.5)
    assert_close(slope, torch.tensor([[-2.0], [0.5]], dtype=torch.float64))


def test_reinforce_knows_no_ratio():
    loss, slope, _ = run("reinforce", [[5.0, 0.1]], [[2.0, -1.0]])
    assert_close(slope, row(-2.0, 1.0))
    assert_close(loss, row(-2.0, 1.0) * (OLD + row(5.0, 0.1).log()))


def test_kimi15_penalises_the_square_of_the_sequence_log_ratio():
    # log-ratios 0.3 and -0.1: S = 0.2. Sum over tokens of tau/2 S^2 / n = 0.5 * 0.04; slope per token tau S - A
    ratios = row(0.3, -0.1).exp()
    loss, slope, _ = run("kimi15", ratios, [2.0], tau=1.0)
    logp = OLD + row(0.3, -0.1)
    assert_close(loss, -2.0 * logp + 0.01)
    assert_close(slope, row(0.2 - 2.0, 0.2 - 2.0))


def test_kimi15_by_token_squares_each_log_ratio():
    # tau / 2 * 0.09 and * 0.01
    loss, slope, _ = run("kimi15", row(0.3, -0.1).exp(), [0.0], tau=1.0, level="token")
    assert_close(loss, row(0.045, 0.005))
    assert_close(slope, row(0.3, -0.1))


def test_gmpo_matches_hand_computed_values():
    # A = 2: log-ratios 0.2 and 0.6, of which 0.6 is cut to 0.4: s = e^0.3 on both tokens, slope -2 s; the cut one has
    # none. A = -1: log-ratios -0.6 (cut to -0.4) and 0.8 (stays): s = e^0.2.
    ratios = torch.tensor([[0.2, 0.6], [-0.6, 0.8]]).exp()
    loss, slope, metrics = run("gmpo", ratios, [2.0, -1.0])
    up, down = math.exp(0.3), math.exp(0.2)
    assert_close(loss, torch.tensor([[-2 * up] * 2, [down] * 2], dtype=torch.float64))
    assert_close(slope, torch.tensor([[-2 * up, 0.0], [0.0, down]], dtype=torch.float64))
    assert metrics["actor/clip_share"] == 0.5


def test_gmpo_is_the_geometric_mean_of_the_paper():
    """-(prod_t min(rho_t A, clip(rho_t) A) / A)^(1/n) A and its slope, straight from the definition."""
    ratios = torch.tensor([[1.3, 0.4, 2.5, 9.0]], dtype=torch.float64)
    for advantage in (1.5, -0.5):
        clipped = ratios.clamp(math.exp(-0.3), math.exp(0.2))
        bounded = torch.minimum(ratios * advantage, clipped * advantage)[0, :3] / advantage
        expected = -advantage * float(bounded.prod()) ** (1 / 3)
        mask = [[True, True, True, False]]
        loss, slope, _ = run("gmpo", ratios, [advantage], mask=mask, clip_low=0.3, clip_high=0.2)
        assert_close(loss, row(expected, expected, expected, 0.0))
        inside = torch.where(clipped * advantage >= ratios * advantage, 1.0, 0.0) * torch.tensor([[1.0, 1.0, 1.0, 0.0]])
        assert_close(slope, expected * inside.double())  # the mean over n tokens of n times s / n


def test_dppo_leaves_out_what_moves_further_away():
    # q = e^-1 = 0.368. rho 1.5: p - q = 0.184; 0.9: 0.037; 0.5: 0.184. Threshold 0.15.
    ratios = [[1.5, 1.5, 0.9, 0.5, 0.5]]
    loss, slope, metrics = run("dppo", ratios, [[1.0, -1.0, -1.0, -1.0, 1.0]])
    assert_close(loss, row(0.0, 1.5, 0.9, 0.0, -0.5))
    assert_close(slope, row(0.0, 1.5, 0.9, 0.0, -0.5))
    assert metrics["actor/clip_share"] == pytest.approx(0.4)


def test_dppo_by_kl_compares_two_events():
    # q = e^-1; p = 1.5 q: q ln(1/1.5) + (1 - q) ln((1 - q) / (1 - p)) = -0.1492 + 0.2175 = 0.0683
    q = math.exp(-1)
    kl = q * math.log(1 / 1.5) + (1 - q) * math.log((1 - q) / (1 - 1.5 * q))
    assert kl == pytest.approx(0.0683, abs=1e-3)
    above, _, _ = run("dppo", [[1.5]], [1.0], divergence="kl", threshold=kl - 1e-6)
    below, _, _ = run("dppo", [[1.5]], [1.0], divergence="kl", threshold=kl + 1e-6)
    assert (float(above), float(below)) == (0.0, -1.5)


def test_a_sequence_mask_leaves_out_bad_responses_that_have_become_unlikely():
    # mean of -log rho: row 1 (0.9 + 0.5) / 2 = 0.7 and row 2 0.1; delta 0.5. A good token of row 1 stays.
    ratios = torch.tensor([[-0.9, -0.5], [-0.1, -0.1]]).exp()
    loss, slope, metrics = run("ppo", ratios, [[-1.0, 1.0], [-1.0, -1.0]], clip_low=0.9, sequence_mask=0.5)
    kept = [[0.0, -math.exp(-0.5)], [math.exp(-0.1)] * 2]
    assert_close(loss, torch.tensor(kept, dtype=torch.float64))
    assert_close(slope, torch.tensor(kept, dtype=torch.float64))
    assert metrics["actor/sequence_mask_share"] == 0.25


def test_sapo_matches_hand_computed_values():
    # at rho = 1: gate 4 / tau * 1/2 = 2 / tau, slope of -A gate is -A * 4 * 1/4 = -A. At rho 2, tau 1: 4 sigmoid(1)
    loss, slope, _ = run("sapo", [[1.0, 1.0, 2.0]], [[1.0, -1.0, 1.0]], tau_pos=1.0, tau_neg=2.0)
    sigmoid = 1 / (1 + math.exp(-1))
    assert_close(loss, row(-2.0, 1.0, -4 * sigmoid))
    assert_close(slope, row(-1.0, 1.0, -4 * sigmoid * (1 - sigmoid) * 2))


def test_decoupled_ppo_weighs_ppo_by_proximal_over_behaviour():
    # rollout=[2, 8]: pi_prox / pi_behave. PPO's losses -1.2 (clipped) and -0.5, weights 2 and 8 (cap 5)
    loss, slope, metrics = run("decoupled_ppo", [[1.5, 0.5]], [[1.0, 1.0]], rollout=[[2.0, 8.0]], behave_cap=5.0)
    assert_close(loss, row(-2.4, -2.5))
    assert_close(slope, row(0.0, -2.5))
    assert metrics["actor/behave_weight_mean"] == pytest.approx(3.5)


def test_decoupled_ppo_without_rollout_logprobs_says_what_is_missing():
    inputs = PolicyLossInputs(
        logprobs=torch.zeros(1, 1), old_logprobs=torch.zeros(1, 1), advantages=torch.ones(1), mask=torch.ones(1, 1)
    )
    with pytest.raises(ValueError, match="rollout_logprobs"):
        policy_loss("decoupled_ppo", inputs)


@given(seed=SEEDS, name=st.sampled_from(NAMES))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_on_policy_every_loss_has_the_policy_gradient(seed, name):
    # at rho = 1 (and nothing to clip) the slope is -A for all of them; kimi15's penalty has slope 0 there
    adv, mask = draw(seed, 3, 4), draw_mask(seed, 3, 4)
    _, slope, _ = run(name, torch.ones(3, 4), adv, mask)
    assert_close(slope, torch.where(mask, -adv, torch.zeros(())), atol=1e-12, rtol=1e-12)


# ---- what holds for all of them ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_junk_under_the_mask_reaches_neither_losses_nor_gradients(name, junk):
    logp, old, adv, mask = draw(1, 3, 5, scale=0.1), draw(2, 3, 5, scale=0.1), draw(3, 3, 5), draw_mask(4, 3, 5)

    def go(fill):
        logprobs = poison(logp, mask, fill).requires_grad_()
        inputs = PolicyLossInputs(
            logprobs=logprobs,
            old_logprobs=poison(old, mask, fill),
            advantages=poison(adv, mask, fill),
            mask=mask,
            rollout_logprobs=poison(old, mask, fill),
        )
        found = policy_loss(name, inputs)
        found.loss.sum().backward()
        return found.loss.detach(), logprobs.grad, found.metrics.result()

    clean, dirty = go(0.0), go(junk)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert clean[2] == dirty[2]
    assert not dirty[0][~mask].any()
    assert not dirty[1][~mask].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [-1e4, -50.0, 50.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_policy_far_away_gives_finite_losses_and_gradients(name, gap, advantage):
    logprobs = torch.tensor([[gap]], requires_grad=True)
    zero = torch.zeros(1, 1)
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=zero,
        advantages=torch.tensor([advantage]),
        mask=torch.ones(1, 1),
        rollout_logprobs=zero,
    )
    found = policy_loss(name, inputs)
    found.loss.sum().backward()
    assert torch.isfinite(found.loss).all()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "width"), [(0, 3), (2, 0), (2, 3)])
def test_an_empty_mask_gives_zero_losses(name, rows, width):
    loss, slope, metrics = run(name, torch.ones(rows, width), torch.ones(rows), torch.zeros(rows, width))
    assert not loss.any()
    assert not slope.any()
    assert metrics == {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logprobs_are_computed_in_float32(name, dtype):
    loss, _, _ = run(name, [[1.0, 1.5]], [[1.0, -1.0]], dtype=dtype)
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss).all()


@pytest.mark.parametrize("name", NAMES)
def test_only_the_new_logprobs_get_a_gradient(name):
    tensors = {
        n: draw(i, 2, 3).requires_grad_() for i, n in enumerate(("logprobs", "old_logprobs", "rollout_logprobs"))
    }
    advantages = draw(9, 2, 3).requires_grad_()
    inputs = PolicyLossInputs(**tensors, advantages=advantages, mask=torch.ones(2, 3))
    policy_loss(name, inputs, {}).loss.sum().backward()
    assert tensors["logprobs"].grad is not None
    assert tensors["old_logprobs"].grad is None
    assert tensors["rollout_logprobs"].grad is None
    assert advantages.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_metrics_of_micro_batches_merge_to_those_of_the_batch(name):
    logp, old, adv, mask = draw(1, 4, 3), draw(2, 4, 3), draw(3, 4, 3), draw_mask(4, 4, 3)

    def metrics(rows):
        return policy_loss(
            name,
            PolicyLossInputs(
                logprobs=logp[rows],
                old_logprobs=old[rows],
                advantages=adv[rows],
                mask=mask[rows],
                rollout_logprobs=old[rows] + 0.1,
            ),
        ).metrics

    merged = Metrics.merged([metrics(slice(0, 1)), metrics(slice(1, 4))]).result()
    assert merged == pytest.approx(metrics(slice(None)).result())


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("old_logprobs", (2, 2)),
        ("advantages", (3,)),
        ("advantages", (2, 1)),
        ("mask", (2,)),
        ("rollout_logprobs", (2,)),
    ],
)
def test_inputs_of_the_wrong_shape_are_refused(field, shape):
    arguments = {"logprobs": (2, 3), "old_logprobs": (2, 3), "advantages": (2,), "mask": (2, 3), field: shape}
    with pytest.raises(ValueError, match=f"{field} has shape"):
        PolicyLossInputs(**{name: torch.zeros(size) for name, size in arguments.items()})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppoo", {}, "did you mean 'ppo'"),
        ("ppo", {"clip_low": 0.0}, "0 < clip_low"),
        ("ppo", {"dual_clip": 1.0}, "dual_clip must be > 1"),
        ("ppo", {"ratio_type": "turn"}, "unknown ratio level"),
        ("tis", {"lower": 2.0, "upper": 1.0}, "lower < upper"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg must be > 0"),
        ("decoupled_ppo", {"behave_cap": -1.0}, "behave_cap must be > 0"),
        ("ppo", {"sequence_mask": 0.0}, "sequence_mask must be > 0"),
        ("gmpo", {"clip_low": 0.0}, "clip_low must be > 0"),
        ("dppo", {"threshold": -1.0}, "threshold must be > 0"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        run(name, [[1.0]], [[1.0]], **options)


# ---- value, entropy, imitation -------------------------------------------------------------------------


def test_the_value_loss_matches_hand_computed_values():
    # V_old 0, clip 0.5. V 1, R 2: plain 1, clipped (0.5 - 2)^2 = 2.25 -> 1.125 without gradient.
    # V 1, R 0: plain 1, clipped 0.25 -> 0.5, slope 1. V 0.2, R 1: both 0.64 -> 0.32, slope -0.8.
    values = row(1.0, 1.0, 0.2).requires_grad_()
    loss, metrics = value_loss(values, row(0, 0, 0), row(2.0, 0.0, 1.0), torch.ones(1, 3), clip=0.5)
    loss.sum().backward()
    assert_close(loss.detach(), row(1.125, 0.5, 0.32))
    assert_close(values.grad, row(0.0, 1.0, -0.8))
    assert metrics.result()["critic/clip_share"] == pytest.approx(1 / 3)


def test_the_value_loss_without_a_clip_is_half_the_square():
    loss, _ = value_loss(row(1.0, 9.0), row(0, 0), row(3.0, 0.0), torch.tensor([[1, 0]]), clip=None)
    assert_close(loss, row(2.0, 0.0))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_ignores_junk_under_the_mask(clip):
    mask = torch.tensor([[True, False]])
    values = torch.tensor([[1.0, math.nan]], requires_grad=True)
    junk = torch.tensor([[0.5, math.inf]])
    loss, _ = value_loss(values, junk, junk, mask, clip=clip)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(values.grad).all()
    assert float(values.grad[0, 1]) == 0


def test_a_value_clip_of_zero_is_refused():
    with pytest.raises(ValueError, match="value_clip must be > 0"):
        value_loss(row(1.0), row(1.0), row(1.0), torch.ones(1, 1), clip=0.0)


@pytest.mark.parametrize("loss", [entropy_loss, sft_loss])
def test_entropy_and_imitation_masks_are_never_broadcast(loss):
    with pytest.raises(ValueError, match="mask has shape"):
        loss(torch.zeros(2, 3), torch.ones(2, 1))


def test_entropy_and_imitation_losses_are_negated_and_masked():
    mask = torch.tensor([[True, False]])
    assert torch.equal(entropy_loss(torch.tensor([[2.0, math.nan]]), mask), torch.tensor([[-2.0, 0.0]]))
    assert torch.equal(sft_loss(torch.tensor([[-3.0, -math.inf]]), mask), torch.tensor([[3.0, 0.0]]))
