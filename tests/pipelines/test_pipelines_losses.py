"""The configured losses against a float64 computation by loops: every key shows in the value and in the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from rows import make_config
from torch.testing import assert_close

from roll.configs.catalog.loss_table import LOSSES as POLICY_LOSSES
from roll.configs.schema.policy_config import TrainInferCorrection
from roll.pipelines.workers.worker_losses import actor_loss, critic_loss, with_mismatch_metrics
from roll.strategies.training.micro import denominators
from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.metrics import Metrics

LENGTHS = (3, 1, 4, 2)
"""Response tokens of each row; every row has a prompt of two."""

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def draws(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS) + 2 * len(LENGTHS), generator=generator, dtype=torch.float64)


SAMPLED = -1.5 + 0.8 * draws(10)


def make_batch(**columns) -> TokenBatch:
    """Four rows; the advantages are positive in the first two and negative in the others."""
    offsets = torch.tensor([0, *[n + 2 for n in LENGTHS]]).cumsum(0)
    acting = torch.cat([torch.tensor([False] * 2 + [True] * n) for n in LENGTHS])
    sign = torch.cat([torch.full((n + 2,), s) for n, s in zip(LENGTHS, (1.0, 1.0, -1.0, -1.0), strict=True)])
    columns = {
        "old_logprobs": -1 + 0.5 * draws(1),
        "sampling_logprobs": SAMPLED,
        "ref_logprobs": -1 + 0.5 * draws(2),
        "advantages": draws(3).abs() * sign,
        "values": draws(4),
        "returns": draws(5),
        "loss_mask": acting,
        **columns,
    }
    return TokenBatch(
        row_ids=tuple("wxyz"),
        group_ids=("g",) * 4,
        offsets=offsets,
        token_ids=torch.zeros(len(acting), dtype=torch.int64),
        action_mask=acting,
        **columns,
    )


def outputs_of(batch: TokenBatch, **columns) -> TokenOutputs:
    return TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, **columns)


def evaluate(loss_fn, batch, column="logprobs", parts=None, entropy=None):
    """(loss, gradient by token, metrics), summed over micro-batches of these rows."""
    source = (draws(7) if column == "values" else -1 + 0.5 * draws(6)).requires_grad_()
    whole = outputs_of(batch, **{column: source}, **({} if entropy is None else {"entropy": entropy}))
    terms = [
        loss_fn.compute(whole.select(rows), batch.select(rows), denominators(batch))
        for rows in parts or [list(range(len(batch)))]
    ]
    loss = torch.stack([term.loss for term in terms]).sum()
    (gradient,) = torch.autograd.grad(loss, source)
    metrics = terms[0].metrics
    for term in terms[1:]:
        metrics.merge(term.metrics)
    return loss.detach(), gradient, metrics.result()


# --- the reference ----------------------------------------------------------------------------------------------------


def ppo(low, high, dual=None):
    def token(lp, old, a, row):
        return clipped(math.exp(lp - old), a, low, high, dual)

    return token


def decoupled(low, high, cap, dual=None):
    """PPO's token times min(p_old / p_sampled, cap); the batch's sampled log-probs are those of `SAMPLED`."""
    plain, weight = ppo(low, high, dual), {}
    for old, sampled in zip((-1 + 0.5 * draws(1)).tolist(), SAMPLED.tolist(), strict=True):
        weight[old] = min(math.exp(old - sampled), math.inf if cap is None else cap)

    def token(lp, old, a, row):
        loss, slope = plain(lp, old, a, row)
        return weight[old] * loss, weight[old] * slope

    return token


def gspo(low, high):
    def token(lp, old, a, row):
        return clipped(math.exp(sum(p - o for p, o in row) / len(row)), a, low, high, None)

    return token


def clipped(ratio, a, low, high, dual):
    """(loss, gradient): d ratio / d logp is the ratio itself, and nothing where the clip holds."""
    plain, bounded = -a * ratio, -a * min(max(ratio, 1 - low), 1 + high)
    loss, slope = (plain, plain) if plain >= bounded else (bounded, 0.0)
    if dual is not None and a < 0 and loss > -dual * a:
        return -dual * a, 0.0
    return loss, slope


def weighted(weight):
    """-w A logp, w constant."""

    def token(lp, old, a, row):
        w = weight(math.exp(lp - old), a, math.exp(sum(p - o for p, o in row)))
        return -w * a * lp, -w * a

    return token


def between(low, high):
    return lambda ratio, a, product: min(max(ratio, low), high)


def tapered(positive, negative, level):
    def weight(ratio, a, product):
        return positive if a >= 0 else negative * min(product if level == "sequence" else ratio, 1.0)

    return weight


def kimi(tau, level):
    def token(lp, old, a, row):
        total = sum(p - o for p, o in row)
        if level == "sequence":
            # The square of the sum is in the loss n times, divided by n; each token moves every copy of it.
            return -a * lp + tau / 2 * total**2 / len(row), -a + tau * total
        return -a * lp + tau / 2 * (lp - old) ** 2, -a + tau * (lp - old)

    return token


def sapo(positive, negative):
    def token(lp, old, a, row):
        ratio, tau = math.exp(lp - old), positive if a > 0 else negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * ratio

    return token


def reference(token, batch, mode="token-mean", norm=10.0):
    """Loss and gradient of a per-token (loss, slope) by plain loops."""
    logprobs = -1 + 0.5 * draws(6)
    masks = [batch.row("loss_mask", i).tolist() for i in range(len(batch))]
    weights = [1.0] * len(batch) if batch.loss_weight is None else batch.loss_weight.tolist()
    tokens = sum(sum(mask) for mask, w in zip(masks, weights, strict=True) if w)
    rows = sum(1 for mask, w in zip(masks, weights, strict=True) if w and any(mask))
    total, gradient = 0.0, torch.zeros_like(logprobs)
    for i, mask in enumerate(masks):
        start = int(batch.offsets[i])
        picked = [start + t for t, counts in enumerate(mask) if counts]
        row = [(float(logprobs[t]), float(batch.old_logprobs[t])) for t in picked]
        share = (
            weights[i]
            / {
                "token-mean": tokens,
                "seq-mean-token-sum": rows,
                "seq-mean-token-mean": rows * max(len(picked), 1),
                "seq-mean-token-sum-norm": rows * norm,
            }[mode]
        )
        for t, (lp, old) in zip(picked, row, strict=True):
            importance = 1.0 if batch.importance_weights is None else float(batch.importance_weights[t])
            loss, slope = token(lp, old, float(batch.advantages[t]), row)
            total += share * importance * loss
            gradient[t] = share * importance * slope
    return torch.tensor(total, dtype=torch.float64), gradient


# --- policy losses ----------------------------------------------------------------------------------------------------

LOSSES = {
    "ppo": ({}, ppo(0.2, 0.2)),
    "ppo, pg_clip": ({"pg_clip": 0.4}, ppo(0.4, 0.4)),
    "ppo, pg_clip_low": ({"pg_clip_low": 0.5}, ppo(0.5, 0.2)),
    "ppo, pg_clip_high": ({"pg_clip_high": 0.6}, ppo(0.2, 0.6)),
    "ppo, dual clip": ({"dual_clip_loss": True, "dual_clip_c": 1.1}, ppo(0.2, 0.2, 1.1)),
    "decoupled": ({"policy_loss": "decoupled_ppo"}, decoupled(0.2, 0.2, 5.0)),
    "decoupled, cap": ({"policy_loss": "decoupled_ppo", "decoupled_ppo_cap": 1.2}, decoupled(0.2, 0.2, 1.2)),
    "decoupled, no cap": ({"policy_loss": "decoupled_ppo", "decoupled_ppo_cap": None}, decoupled(0.2, 0.2, None)),
    "decoupled, clip": (
        {"policy_loss": "decoupled_ppo", "pg_clip_low": 0.5, "pg_clip_high": 0.1},
        decoupled(0.5, 0.1, 5.0),
    ),
    "decoupled, dual clip": (
        {"policy_loss": "decoupled_ppo", "dual_clip_loss": True, "dual_clip_c": 1.1},
        decoupled(0.2, 0.2, 5.0, 1.1),
    ),
    "gspo": ({"policy_loss": "gspo"}, gspo(0.2, 0.2)),
    "gspo, pg_clip": ({"policy_loss": "gspo", "pg_clip": 0.05}, gspo(0.05, 0.05)),
    "gspo, both ends": ({"policy_loss": "gspo", "pg_clip_low": 0.01, "pg_clip_high": 0.5}, gspo(0.01, 0.5)),
    "cispo": ({"policy_loss": "cispo"}, weighted(between(0.0, 1.28))),
    "cispo, low": ({"policy_loss": "cispo", "cispo_epsilon_low": 0.1}, weighted(between(0.9, 1.28))),
    "cispo, no low": ({"policy_loss": "cispo", "cispo_epsilon_low": 5.0}, weighted(between(0.0, 1.28))),
    "cispo, high": ({"policy_loss": "cispo", "cispo_epsilon_high": 0.01}, weighted(between(0.0, 1.01))),
    "topr": ({"policy_loss": "topr"}, weighted(tapered(1, 1, "sequence"))),
    "topr, positive": ({"policy_loss": "topr", "topr_positive_weight": 2.0}, weighted(tapered(2, 1, "sequence"))),
    "topr, negative": ({"policy_loss": "topr", "topr_negative_weight": 0.3}, weighted(tapered(1, 0.3, "sequence"))),
    "topr, level": ({"policy_loss": "topr", "topr_level": "token"}, weighted(tapered(1, 1, "token"))),
    "reinforce": ({"policy_loss": "reinforce"}, weighted(lambda *_: 1.0)),
    "tis": ({"policy_loss": "tis"}, weighted(between(0.0, 1.0))),
    "tis, low": ({"policy_loss": "tis", "tis_lower_bound": 0.9}, weighted(between(0.9, 1.0))),
    "tis, high": ({"policy_loss": "tis", "tis_upper_bound": 1.5}, weighted(between(0.0, 1.5))),
    "kimi15": ({"policy_loss": "kimi15"}, kimi(0.1, "sequence")),
    "kimi15, tau": ({"policy_loss": "kimi15", "kimi15_tau": 0.7}, kimi(0.7, "sequence")),
    "kimi15, level": ({"policy_loss": "kimi15", "kimi15_level": "token"}, kimi(0.1, "token")),
    "sapo": ({"policy_loss": "sapo"}, sapo(1.0, 1.05)),
    "sapo, positive": ({"policy_loss": "sapo", "sapo_tau_positive": 2.0}, sapo(2.0, 1.05)),
    "sapo, negative": ({"policy_loss": "sapo", "sapo_tau_negative": 3.0}, sapo(1.0, 3.0)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_loss_and_its_constants(name):
    keys, token = LOSSES[name]
    loss, gradient, metrics = evaluate(actor_loss(make_config(**keys)), make_batch())
    expected, slopes = reference(token, make_batch())
    assert_close(loss, expected, rtol=0, atol=1e-10)
    assert_close(gradient, slopes, rtol=0, atol=1e-10)
    assert metrics["actor/loss"] == pytest.approx(float(expected))


def test_every_constant_of_a_policy_loss_changes_it():
    found = {}
    for name, (keys, _) in LOSSES.items():
        loss, gradient, _ = evaluate(actor_loss(make_config(**keys)), make_batch())
        found.setdefault((float(loss), tuple(gradient.tolist())), []).append(name)
    same = [names for names in found.values() if len(names) > 1]
    assert same == [["cispo", "cispo, no low"]]


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_modes_with_masks_row_weights_and_importance_weights(mode):
    mask = make_batch().loss_mask.clone()
    mask[2] = False  # the first response token of row w
    mask[make_batch().offsets[1] : make_batch().offsets[2]] = False  # all of row x
    batch = make_batch(
        loss_mask=mask,
        loss_weight=torch.tensor([2.0, 1.0, 0.0, 0.5], dtype=torch.float64),
        importance_weights=draws(8).abs(),
    )
    config = make_config(loss_agg_mode=mode, policy_loss="reinforce", response_length=7)
    loss, gradient, _ = evaluate(actor_loss(config), batch)
    expected, slopes = reference(weighted(lambda *_: 1.0), batch, mode, norm=7.0)
    assert_close(loss, expected, rtol=0, atol=1e-10)
    assert_close(gradient, slopes, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo"])
@pytest.mark.parametrize("mode", MODES)
def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_metrics(mode, name):
    batch = make_batch(loss_weight=torch.tensor([2.0, 1.0, 0.0, 0.5], dtype=torch.float64))
    keys = {"loss_agg_mode": mode, "use_kl_loss": True, "kl_loss_coef": 0.3, "sft_loss_coef": 0.2}
    keys |= {"entropy_loss_coef": 0.1, "policy_loss": name}
    loss_fn, entropy = actor_loss(make_config(**keys)), draws(9).abs()
    whole, slopes, metrics = evaluate(loss_fn, batch, entropy=entropy)
    for parts in ([[0], [1], [2], [3]], [[3, 1], [0, 2]], [[2], [0, 1, 3]]):
        loss, gradient, merged = evaluate(loss_fn, batch, parts=parts, entropy=entropy)
        assert_close(loss, whole, rtol=0, atol=1e-10)
        assert_close(gradient, slopes, rtol=0, atol=1e-10)
        assert merged == pytest.approx(metrics, abs=1e-10)
    critic = critic_loss(make_config(loss_agg_mode=mode))
    assert_close(
        evaluate(critic, batch, "values")[:2],
        evaluate(critic, batch, "values", parts=[[2, 0], [3], [1]])[:2],
        rtol=0,
        atol=1e-10,
    )


def test_without_old_logprobs_those_of_the_pass_itself_count_and_the_ratio_is_1():
    loss, gradient, metrics = evaluate(actor_loss(make_config()), make_batch(old_logprobs=None))
    batch = make_batch()
    assert_close(loss, -(batch.advantages * batch.loss_mask).sum() / 10, rtol=0, atol=1e-10)
    assert_close(gradient, -batch.advantages * batch.loss_mask / 10, rtol=0, atol=1e-10)
    assert metrics["actor/ratio_max"] == 1.0


def test_a_policy_loss_of_the_users_own_is_loaded_from_a_file(tmp_path):
    file = tmp_path / "own_loss.py"
    file.write_text(
        "from roll.algorithms.losses import PolicyLoss\nfrom roll.types.metrics import Metrics\n\n\n"
        "def cubed(inputs):\n    return PolicyLoss(inputs.log_ratio ** 3, Metrics())\n"
    )
    loss, gradient, _ = evaluate(actor_loss(make_config(policy_loss=f"{file}:cubed")), make_batch())
    expected, slopes = reference(lambda lp, old, a, row: ((lp - old) ** 3, 3 * (lp - old) ** 2), make_batch())
    assert_close(loss, expected, rtol=0, atol=1e-10)
    assert_close(gradient, slopes, rtol=0, atol=1e-10)


# --- terms ------------------------------------------------------------------------------------------------------------


def logprobs_and_mask():
    batch = make_batch()
    return -1 + 0.5 * draws(6), batch.loss_mask, batch


def test_rl_loss_coef_scales_the_policy_loss_alone():
    one, slopes, _ = evaluate(actor_loss(make_config()), make_batch())
    loss, gradient, metrics = evaluate(actor_loss(make_config(rl_loss_coef=0.25)), make_batch())
    assert_close(loss, 0.25 * one)
    assert_close(gradient, 0.25 * slopes)
    assert metrics["actor/pg_loss"] == pytest.approx(float(one))
    both, _, _ = evaluate(actor_loss(make_config(rl_loss_coef=0.0, sft_loss_coef=1.0)), make_batch())
    sft, _, _ = evaluate(actor_loss(make_config(rl_loss_coef=0.0, sft_loss_coef=2.0)), make_batch())
    assert_close(sft, 2 * both)


# d = logp - ref: (value, slope) of each estimator; the plain one has the slope of d^2 / 2, on average that of the KL.
KL = {
    "kl": lambda d: (d, d),
    "abs": lambda d: (d.abs(), d.sign()),
    "mse": lambda d: (d**2 / 2, d),
    "low_var_kl": lambda d: (torch.exp(-d) - 1 + d, 1 - torch.exp(-d)),
}


@pytest.mark.parametrize("kind", KL)
@pytest.mark.parametrize("coef", [0.3, 1.0])
def test_use_kl_loss_adds_the_estimators_mean_times_its_coefficient(kind, coef):
    logprobs, mask, batch = logprobs_and_mask()
    keys = {"use_kl_loss": True, "kl_loss_coef": coef, "kl_loss_type": kind, "rl_loss_coef": 0.0}
    keys["kl_loss_ratio"] = False
    loss, gradient, metrics = evaluate(actor_loss(make_config(**keys)), batch)
    value, slope = KL[kind](logprobs - batch.ref_logprobs)
    assert_close(loss, coef * (value * mask).sum() / 10, rtol=0, atol=1e-10)
    assert_close(gradient, coef * slope * mask / 10, rtol=0, atol=1e-10)
    assert metrics["actor/kl_loss"] == pytest.approx(float(loss) / coef)


@pytest.mark.parametrize(
    ("keys", "cap"),
    [
        ({}, 5.0),
        ({"decoupled_ppo_cap": 1.5}, 1.5),
        ({"decoupled_ppo_cap": None}, math.inf),
        ({"train_infer_correction": TrainInferCorrection(importance_upper=1.1)}, 1.1),
        ({"train_infer_correction": TrainInferCorrection(importance_upper=None)}, 5.0),
    ],
)
def test_the_kl_term_has_the_ratio_to_the_sampler_with_the_cap_of_the_importance_weight(keys, cap):
    logprobs, mask, batch = logprobs_and_mask()
    config = make_config(use_kl_loss=True, kl_loss_coef=1.0, rl_loss_coef=0.0, **keys)
    loss, gradient, metrics = evaluate(actor_loss(config), batch)
    weight = (logprobs - SAMPLED).exp().clamp(max=cap)
    d = logprobs - batch.ref_logprobs
    assert_close(loss, (weight * (torch.exp(-d) - 1 + d) * mask).sum() / 10, rtol=0, atol=1e-10)
    assert_close(gradient, weight * d * mask / 10, rtol=0, atol=1e-10)
    assert metrics["actor/kl_clamped_share"] == 0.0
    largest = (weight * (torch.exp(-d) - 1 + d))[mask].max()
    assert metrics["actor/kl_token_max"] == pytest.approx(float(largest))
    shifted = batch.with_columns(ref_logprobs=torch.where(torch.arange(len(mask)) == 2, 99.0, batch.ref_logprobs))
    assert evaluate(actor_loss(config), shifted)[2]["actor/kl_clamped_share"] == pytest.approx(1 / 10)


def test_without_use_kl_loss_its_keys_do_nothing():
    plain = evaluate(actor_loss(make_config()), make_batch())[0]
    assert_close(evaluate(actor_loss(make_config(kl_loss_coef=9.0)), make_batch(ref_logprobs=None))[0], plain)
    assert_close(
        evaluate(actor_loss(make_config(use_kl_loss=True, kl_loss_coef=0.0)), make_batch(ref_logprobs=None))[0], plain
    )


def test_entropy_loss_coef_rewards_entropy_and_only_then_asks_for_it():
    _, mask, batch = logprobs_and_mask()
    assert actor_loss(make_config()).needs == ("logprobs",)
    loss_fn = actor_loss(make_config(entropy_loss_coef=0.1))
    assert loss_fn.needs == ("logprobs", "entropy")
    entropy = draws(9).abs()
    plain = evaluate(actor_loss(make_config()), batch)[0]
    found, _, metrics = evaluate(loss_fn, batch, entropy=entropy)
    assert_close(found, plain - 0.1 * (entropy * mask).sum() / 10, rtol=0, atol=1e-10)
    assert metrics["actor/entropy_loss"] == pytest.approx(-float((entropy * mask).sum()) / 10)


@pytest.mark.parametrize("junk", [-math.inf, math.nan])
def test_the_logged_entropy_is_of_the_loss_tokens_alone(junk):
    logprobs, mask, batch = logprobs_and_mask()
    outputs = outputs_of(batch, logprobs=torch.where(mask, logprobs, torch.full_like(logprobs, junk)))
    terms = actor_loss(make_config()).compute(outputs, batch, denominators(batch))
    assert terms.metrics.result()["actor/entropy"] == pytest.approx(-float(logprobs[mask].mean()))


def test_sft_loss_coef_imitates_responses_with_positive_advantage():
    logprobs, mask, batch = logprobs_and_mask()
    good = mask & (batch.advantages > 0)
    assert int(good.sum()) == 4
    loss, gradient, _ = evaluate(actor_loss(make_config(rl_loss_coef=0.0, sft_loss_coef=0.5)), batch)
    assert_close(loss, -0.5 * (logprobs * good).sum() / 10, rtol=0, atol=1e-10)
    assert_close(gradient, -0.5 * good.double() / 10, rtol=0, atol=1e-10)


def test_rows_said_to_have_no_gradient_have_none():
    advantages = make_batch().advantages.clone()
    advantages[: int(make_batch().offsets[1])] = 0.0
    batch = make_batch(advantages=advantages, loss_weight=torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    for keys, _ in LOSSES.values():
        for extra in ({}, {"use_kl_loss": True}, {"sft_loss_coef": 0.5}):
            loss_fn = actor_loss(make_config(**keys, **extra))
            if loss_fn.has_gradient is None:
                continue
            computed = loss_fn.has_gradient(batch)
            assert computed.tolist() == [False, True, False, True]
            _, gradient, _ = evaluate(loss_fn, batch)
            rows = torch.repeat_interleave(torch.arange(4), batch.lengths)
            assert not gradient[~computed[rows]].any()
    assert actor_loss(make_config(use_kl_loss=True)).has_gradient is None
    assert actor_loss(make_config(policy_loss="kimi15")).has_gradient is None


def test_a_mini_batch_without_any_token_has_loss_0_and_no_nan():
    batch = make_batch(loss_mask=torch.zeros_like(make_batch().loss_mask))
    for mode in MODES:
        loss, gradient, metrics = evaluate(actor_loss(make_config(loss_agg_mode=mode)), batch)
        assert float(loss) == 0.0
        assert not gradient.any()
        assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize("kl", [False, True])
def test_an_actors_loss_and_all_it_measures_never_wait_for_the_device(name, kl):
    """A tensor on the meta device has no numbers: whatever would read one, raises."""
    config = make_config(policy_loss=name, use_kl_loss=kl, kl_loss_coef=0.1, sft_loss_coef=0.1)
    loss_fn = with_mismatch_metrics(actor_loss(config), 1, mixed_versions=kl)
    batch = make_batch(versions=torch.ones(sum(LENGTHS) + 2 * len(LENGTHS), dtype=torch.int64))
    source = torch.zeros(batch.num_tokens, device="meta", requires_grad=True)
    terms = loss_fn.compute(outputs_of(batch, logprobs=source), batch.to("meta"), denominators(batch))
    terms.loss.backward()
    assert source.grad is not None
    Metrics().merge(terms.metrics)


def test_a_critics_loss_never_waits_for_the_device():
    batch = make_batch()
    source = torch.zeros(batch.num_tokens, device="meta", requires_grad=True)
    loss_fn = critic_loss(make_config(value_clip=0.2))
    loss_fn.compute(outputs_of(batch, values=source), batch.to("meta"), denominators(batch)).loss.backward()
    assert source.grad is not None


def test_the_mismatch_is_measured_where_it_is_asked_for():
    logprobs, mask, batch = logprobs_and_mask()
    sampled = batch.with_columns(sampling_logprobs=logprobs - 0.5 * mask)
    plain = actor_loss(make_config())
    loss, gradient, metrics = evaluate(plain, sampled)
    assert "mismatch/kl" not in metrics
    # ratio e^0.5 on every token: k3 of it is e^0.5 - 1 - 0.5
    found = evaluate(with_mismatch_metrics(plain, 3, mixed_versions=False), sampled)
    assert found[2]["mismatch/kl"] == pytest.approx(math.exp(0.5) - 1.5)
    assert found[2]["mismatch/ppl_ratio"] == pytest.approx(math.exp(-0.5))
    assert found[2].items() > metrics.items()
    assert not [name for name in found[2] if name.startswith("mismatch/all_")]
    assert torch.equal(found[0], loss)
    assert torch.equal(found[1], gradient)


def test_tokens_of_older_weights_are_measured_apart_from_those_of_these():
    logprobs, mask, batch = logprobs_and_mask()
    # Rows w (3 tokens) and x (1) are of version 3, y (4) and z (2) of version 2: ratio e^0.5 and e^-1.
    version = torch.repeat_interleave(torch.tensor([3, 3, 2, 2]), batch.lengths)
    shift = torch.where(version == 3, 0.5, -1.0)
    stale = batch.with_columns(sampling_logprobs=logprobs - shift * mask, versions=torch.where(mask, version, -1))
    new, old = math.exp(0.5) - 1.5, math.exp(-1.0)
    for parts in (None, [[0], [1], [2], [3]], [[3, 1], [0, 2]], [[0, 1], [2, 3]]):
        measured = with_mismatch_metrics(actor_loss(make_config()), 3, mixed_versions=True)
        metrics = evaluate(measured, stale, parts=parts)[2]
        assert metrics["mismatch/kl"] == pytest.approx(new)
        assert metrics["mismatch/all_kl"] == pytest.approx((4 * new + 6 * old) / 10)
        assert metrics["mismatch/all_abs_log_ratio_mean"] == pytest.approx((4 * 0.5 + 6 * 1.0) / 10)
        assert metrics["mismatch/ratio_min"] == pytest.approx(math.exp(0.5))
        assert metrics["mismatch/all_ratio_min"] == pytest.approx(math.exp(-1.0))
        assert metrics["mismatch/all_ratio_max"] == pytest.approx(math.exp(0.5))


# --- critic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.2, 0.7])
def test_value_clip_bounds_how_far_the_critic_moves(clip):
    batch = make_batch()
    loss, gradient, metrics = evaluate(critic_loss(make_config(value_clip=clip)), batch, "values")
    total, slopes, limited = 0.0, torch.zeros_like(gradient), 0
    for t in batch.loss_mask.nonzero()[:, 0].tolist():
        value, old, target = float(draws(7)[t]), float(batch.values[t]), float(batch.returns[t])
        plain, slope = (value - target) ** 2, value - target
        if clip is not None:
            moved = min(max(value, old - clip), old + clip)
            if (moved - target) ** 2 > plain:
                plain, slope, limited = (moved - target) ** 2, 0.0, limited + 1
        total += plain / 2 / 10
        slopes[t] = slope / 10
    assert float(loss) == pytest.approx(total, abs=1e-10)
    assert_close(gradient, slopes, rtol=0, atol=1e-10)
    assert limited > 0 or clip is None
    assert metrics["critic/loss"] == pytest.approx(total)


def test_the_critic_weighs_rows_like_the_actor():
    # Only row x, one token: 0.5 (V - R)^2 * 3 / 1 token.
    weights = torch.tensor([0.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    batch = make_batch(loss_weight=weights)
    loss, _, _ = evaluate(critic_loss(make_config(value_clip=None)), batch, "values")
    t = int(batch.offsets[1]) + 2
    assert float(loss) == pytest.approx(1.5 * float((draws(7)[t] - batch.returns[t]) ** 2))
