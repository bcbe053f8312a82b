"""From scores to advantages, masks and weights: every key with numbers worked by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from rows import R, credited_by, fresh, make_config, make_rollouts, on_actions
from torch.testing import assert_close

from roll.configs.schema.policy_config import OverlongShaping, PfPpo, TrainInferCorrection
from roll.configs.schema.reward_config import RewardConfig, RewardPart
from roll.configs.schema.worker_config import ActorInferConfig, GeneratingArgs, ModelArgs
from roll.pipelines.credit.credit import credit_stages, reward_parts
from roll.strategies.training.micro import denominators

# Scores 1, 0, 0, 3 in two groups of two, one token each.
FOUR = ([R(1.0), R(0.0)], [R(0.0), R(3.0)])
HALF = math.sqrt(0.5)


def credited(rollouts, step=1, greedy_scores=None, **keys):
    rollouts = replace(fresh(rollouts, step), greedy_scores=greedy_scores)
    return credited_by(credit_stages(make_config(**keys)), rollouts, step=step)


def assigned(rollouts, **keys):
    found, metrics = credited(rollouts, **keys)
    return found.batch, metrics


def rewards_of(rollouts, **keys):
    found, _ = credited(rollouts, **keys)
    # `reinforce` with gamma 1 puts the row's reward on every action token.
    advantages = found.batch.pad("advantages")
    assert_close(advantages.sum(1), found.shaped_rewards * rollouts.response_lengths)
    return found.shaped_rewards.tolist()


def close(*values):
    return pytest.approx(values, abs=1e-5)


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_a_domain_weight_multiplies_rewards_and_leaves_scores_alone():
    rollouts = make_rollouts([R(1.0), R(0.5)], [R(1.0), R(-1.0)], domains="ab")
    assert credited(rollouts)[0].shaped_rewards.tolist() == [1.0, 0.5, 2.0, -2.0]
    assert rollouts.rewards.tolist() == [1.0, 0.5, 1.0, -1.0]


def test_overlong_shaping_begins_a_buffer_before_the_limit():
    # Limit 10, buffer 4, penalty 2: 6 tokens cost 0, 7 -> -1/4 * 2, 8 -> -1, 10 -> -2.
    rows = make_rollouts([R(1.0, 6), R(1.0, 7)], [R(1.0, 8), R(1.0, 10)])
    shaping = OverlongShaping(buffer=4, penalty=2.0)
    assert rewards_of(rows, overlong_shaping=shaping) == [1.0, 0.5, 0.0, -1.0]
    # The limit is max_new_tokens where that is lower: 8. 6 -> -1/2 * 2, 7 -> -1.5, from 8 on -2.
    shorter = ActorInferConfig(generating_args=GeneratingArgs(max_new_tokens=8))
    assert rewards_of(rows, overlong_shaping=shaping, actor_infer=shorter) == [0.0, -0.5, -1.0, -1.0]


def test_add_len_reward_prefers_the_short_and_never_pays_a_wrong_answer():
    # Lengths 2, 4, 6: lambda 0.5, 0, -0.5. Wrong ones get min(0, lambda). Right or wrong is the raw score's sign,
    # also in domain b, whose weight of 2 multiplies the score and not the bonus.
    rows = make_rollouts([R(1.0, 2), R(0.0, 4), R(1.0, 6)], [R(0.0, 2), R(1.0, 4), R(0.0, 6)], domains="ab")
    assert rewards_of(rows, add_len_reward=True) == [1.5, 0.0, 0.5, 0.0, 2.0, -0.5]


# Whole batch: mean 1, variance (0 + 1 + 1 + 4) / 3 = 2, std 1.41421.
# Groups: (1, 0) has mean 0.5, std 0.70711; (0, 3) has mean 1.5, std 2.12132.
NORMS = {
    "off": ({}, (1, 0, 0, 3)),
    "batch": ({"reward_norm": "batch"}, (0, -HALF, -HALF, 2 * HALF)),
    "group": ({"reward_norm": "group"}, (HALF, -HALF, -HALF, HALF)),
    "running": ({"reward_norm": "running"}, (0, -HALF, -HALF, 2 * HALF)),
    "shift only": ({"reward_norm": "group", "reward_shift": True}, (0.5, -0.5, -1.5, 1.5)),
    "scale only": ({"reward_norm": "batch", "reward_scale": True}, (HALF, 0, 0, 3 * HALF)),
    "both named": ({"reward_norm": "batch", "reward_shift": True, "reward_scale": True}, (0, -HALF, -HALF, 2 * HALF)),
    "scaling": ({"use_reward_scaling": True}, (HALF, 0, 0, 3 * HALF)),
    "scaling with norm": ({"use_reward_scaling": True, "use_reward_norm": True}, (0, -HALF, -HALF, 2 * HALF)),
    "clip": ({"reward_norm": "batch", "reward_clip": 0.7}, (0, -0.7, -0.7, 0.7)),
    "clip alone": ({"reward_clip": 2.0}, (1, 0, 0, 2)),
}


@pytest.mark.parametrize("name", NORMS)
def test_reward_normalisation(name):
    keys, expected = NORMS[name]
    assert rewards_of(make_rollouts(*FOUR), **keys) == close(*expected)


def test_running_statistics_remember_earlier_steps_and_a_checkpoint_holds_them():
    # 1, 0, 0, 3 and then 5, 5, 5, 5: mean 3, squares 10 + 100 - 8 * 9 = 38, std sqrt(38 / 7) = 2.32993: 2 / 2.32993.
    first, second = make_rollouts(*FOUR), make_rollouts([R(5.0), R(5.0)], [R(5.0), R(5.0)])
    credit = credit_stages(make_config(reward_norm="running"))
    credited_by(credit, fresh(first, 1), step=1)
    state = json.loads(json.dumps(credit.state_dict()))
    resumed = credit_stages(make_config(reward_norm="running"))
    resumed.load_state_dict(state)
    for assigner in (credit, resumed):
        assert credited_by(assigner, fresh(second, 2), step=2)[0].shaped_rewards.tolist() == close(*[0.858395] * 4)


def with_kl(*, step_coef=None, **keys):
    """Two rows of two tokens with log-ratios to the reference of 0.5, -0.2 and 0, 1."""
    rows = make_rollouts([R(1.0, 2)], [R(0.0, 2)], domains="ab")
    old = on_actions(rows, -1.0, -1.2, -2.0, -1.0)
    reference = on_actions(rows, -1.5, -1.0, -2.0, -2.0)
    rows = replace(rows, batch=rows.batch.with_columns(old_logprobs=old, ref_logprobs=reference))
    credit = credit_stages(make_config(add_token_level_kl=True, init_kl_coef=0.1, **keys))
    return credit, rows


# k1 is d; k2 d^2 / 2; k3 e^-d - 1 + d: e^-0.5 - 0.5 = 0.106531, e^0.2 - 1.2 = 0.021403, 0, e^-1 = 0.367879.
KL = {
    "kl": (0.5, -0.2, 0.0, 1.0),
    "abs": (0.5, 0.2, 0.0, 1.0),
    "mse": (0.125, 0.02, 0.0, 0.5),
    "low_var_kl": (0.106531, 0.021403, 0.0, 0.367879),
}


@pytest.mark.parametrize("kind", KL)
def test_the_kl_penalty_is_taken_off_every_token_and_the_score_stays_on_the_last(kind):
    credit, rows = with_kl(kl_penalty=kind)
    batch = credited_by(credit, fresh(rows, 1), step=1)[0].batch
    k = KL[kind]
    expected = (-0.1 * k[0], 1.0 - 0.1 * k[1], -0.1 * k[2], 0.0 - 0.1 * k[3])
    assert batch.token_rewards[batch.action_mask].tolist() == close(*expected)
    # reward-to-go
    assert batch.advantages[batch.action_mask].tolist() == close(
        expected[0] + expected[1], expected[1], expected[2] + expected[3], expected[3]
    )


@pytest.mark.parametrize("kind", KL)
def test_the_largest_kl_of_a_token_is_logged(kind):
    credit, rows = with_kl(kl_penalty=kind)
    metrics = credited_by(credit, fresh(rows, 1), step=1)[1].result()
    assert metrics["kl/token_max"] == pytest.approx(max(KL[kind]), abs=1e-5)


def test_one_token_far_from_the_reference_costs_k3_what_its_clamp_allows():
    # d = -12 is clamped to -10: e^10 - 1 - 10 = 22026.47 - 11; `kl` costs -10.
    for kind, largest in (("low_var_kl", 22015.47), ("kl", 1.0), ("mse", 50.0)):
        credit, rows = with_kl(kl_penalty=kind)
        far = on_actions(rows, -13.5, -1.2, -2.0, -1.0)
        rows = replace(rows, batch=rows.batch.with_columns(old_logprobs=far))
        metrics = credited_by(credit, fresh(rows, 1), step=1)[1].result()
        assert metrics["kl/token_max"] == pytest.approx(largest, rel=1e-6)
        assert metrics["kl/clamped_share"] == 0.25


def test_without_a_target_the_kl_coefficient_stays():
    credit, rows = with_kl()
    credited_by(credit, fresh(rows, 1), step=1)
    assert credit.state_dict()["kl_coef"] == 0.1


@pytest.mark.parametrize(
    ("target", "factor"),
    # The mean k1 per token is 1.3 / 4 = 0.325; two rows, horizon 10.
    [
        (0.1, 1 + 0.2 * 2 / 10),  # error 2.25, clipped to 0.2
        (0.3, 1 + (0.325 / 0.3 - 1) * 2 / 10),
        (10.0, 1 - 0.2 * 2 / 10),
    ],
)
def test_the_kl_coefficient_adapts_once_per_step_over_all_domains(target, factor):
    credit, rows = with_kl(target_kl=target, kl_horizon=10)
    batch = credited_by(credit, fresh(rows, 1), step=1)[0].batch
    # This step still uses the coefficient it began with.
    assert batch.token_rewards[batch.action_mask].tolist()[0] == pytest.approx(-0.1 * 0.5)
    assert credit.state_dict()["kl_coef"] == pytest.approx(0.1 * factor)
    batch = credited_by(credit, fresh(rows, 2), step=2)[0].batch
    assert batch.token_rewards[batch.action_mask].tolist()[0] == pytest.approx(-0.1 * factor * 0.5)


# --- advantages -------------------------------------------------------------------------------------------------------


def test_whitened_rewards_are_whitened_over_all_action_tokens_before_the_estimator():
    # Token rewards 0, 1, 0, 3: mean 1, variance (1 + 0 + 1 + 4) / 3 = 2 -> -0.70711, 0, -0.70711, 1.41421.
    batch, _ = assigned(make_rollouts([R(1.0, 2)], [R(3.0, 2)]), whiten_rewards=True)
    assert batch.token_rewards[batch.action_mask].tolist() == close(-HALF, 0, -HALF, 2 * HALF)
    assert batch.advantages[batch.action_mask].tolist() == close(-HALF, 0, HALF, 2 * HALF)


def test_whitened_advantages_have_mean_0_and_variance_1_over_action_tokens():
    # Advantages 1, 1, 4: mean 2, variance (1 + 1 + 4) / 2 = 3.
    batch, _ = assigned(make_rollouts([R(1.0, 2)], [R(4.0, 1)]), whiten_advantages=True)
    third = 1 / math.sqrt(3)
    assert batch.advantages[batch.action_mask].tolist() == close(-third, -third, 2 * third)
    assert batch.returns[batch.action_mask].tolist() == [1.0, 1.0, 4.0]


def test_advantage_clip_comes_last():
    keys = {"whiten_advantages": True, "advantage_clip": 1.0}
    batch, metrics = assigned(make_rollouts([R(1.0, 2)], [R(4.0, 1)]), **keys)
    assert batch.advantages[batch.action_mask].tolist() == close(-1 / math.sqrt(3), -1 / math.sqrt(3), 1.0)
    assert metrics.result()["advantage/clipped_share"] == pytest.approx(1 / 3)


def test_gamma_discounts_per_action_token_and_lambda_acts_in_gae():
    rows = make_rollouts([R(1.0, 3)])
    batch, _ = assigned(rows, gamma=0.5)
    assert batch.advantages[batch.action_mask].tolist() == close(0.25, 0.5, 1.0)
    # Values 0.2, 0.4, 0.6, gamma 0.5, lambda 0.5. delta = 0.2 - 0.2, 0.3 - 0.4, 1 - 0.6 = 0, -0.1, 0.4;
    # A = 0 + 0.25 * 0 = 0, -0.1 + 0.25 * 0.4 = 0, 0.4.
    rows = replace(rows, batch=rows.batch.with_columns(values=on_actions(rows, 0.2, 0.4, 0.6)))
    batch, metrics = assigned(rows, adv_estimator="gae", gamma=0.5, lambd=0.5)
    assert batch.advantages[batch.action_mask].tolist() == close(0, 0, 0.4)
    assert batch.returns[batch.action_mask].tolist() == close(0.2, 0.4, 1.0)
    # Errors 0, 0, 0.4 with squared deviations 0.106667 in all; the returns have 0.346667.
    assert metrics.result()["critic/explained_variance"] == pytest.approx(1 - 0.106667 / 0.346667, rel=1e-5)


def test_remax_subtracts_the_greedy_score_of_the_prompt_with_the_domains_weight():
    rows = make_rollouts([R(1.0), R(0.0)], [R(1.0), R(0.0)], domains="ab")
    batch, _ = assigned(rows, adv_estimator="remax", greedy_scores=torch.tensor([0.5, 0.5, 1.0, 1.0]))
    assert batch.pad("advantages")[:, 2].tolist() == [0.5, -0.5, 0.0, -2.0]


def test_remax_leaves_rows_out_whose_greedy_response_failed():
    nan = float("nan")
    greedy = torch.tensor([nan, nan, 1.0, 1.0])
    batch, metrics = assigned(make_rollouts(*FOUR), adv_estimator="remax", greedy_scores=greedy)
    assert batch.pad("loss_mask", False).any(1).tolist() == [False, False, True, True]
    assert batch.advantages.isfinite().all()
    assert batch.pad("advantages")[2:, 2].tolist() == [-1.0, 2.0]
    assert metrics.result()["rollout/failed_greedy"] == 2


def test_an_estimator_of_the_users_own_is_loaded_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from roll.algorithms.advantages import to_tokens\n\n\n"
        "def negated(inputs):\n    a = to_tokens(-inputs.rewards, inputs.action_mask)\n    return a, a\n"
    )
    batch, _ = assigned(make_rollouts(*FOUR), adv_estimator=f"{file}:negated")
    assert batch.advantages[batch.action_mask].tolist() == [-1.0, 0.0, 0.0, -3.0]


# --- masks ------------------------------------------------------------------------------------------------------------


def kept(rollouts, **keys):
    batch, metrics = assigned(rollouts, **keys)
    rows = batch.pad("loss_mask", False).any(1)
    assert metrics.result()["rollout/masked_share"] == pytest.approx(float((~rows).float().mean()))
    # A mask takes whole rows.
    assert torch.equal(batch.pad("loss_mask", False), batch.pad("action_mask", False) & rows[:, None])
    return rows.tolist()


def test_max_len_mask_leaves_out_what_was_cut_off_and_not_what_just_fits():
    rows = make_rollouts([R(1.0, 10, "truncated"), R(1.0, 10)], [R(1.0, 4, "truncated"), R(0.0, 1)])
    assert kept(rows) == [True] * 4
    assert kept(rows, max_len_mask=True) == [False, True, False, True]


def test_difficulty_mask_leaves_out_groups_at_and_beyond_its_thresholds():
    # Mean scores 0.25, 0.5, 0.75 against 0.25 and 0.75: both ends are out.
    rows = make_rollouts([R(0.25), R(0.25)], [R(1.0), R(0.0)], [R(0.5), R(1.0)])
    thresholds = {"difficulty_low_threshold": 0.25, "difficulty_high_threshold": 0.75}
    assert kept(rows, difficulty_mask=True, **thresholds) == [False, False, True, True, False, False]
    assert kept(rows, difficulty_mask=True) == [True] * 6
    assert kept(rows, **thresholds) == [True] * 6


def test_error_max_len_clip_leaves_out_wrong_and_long_answers():
    rows = make_rollouts([R(0.0, 5), R(0.0, 4)], [R(1.0, 5), R(-1.0, 9)])
    assert kept(rows, error_max_len_clip=True, error_max_len_threshold=5) == [False, True, True, False]


# --- weights ----------------------------------------------------------------------------------------------------------


def test_difficulty_loss_weight_favours_groups_that_fail():
    # Group means 0, 0.5, 1: weights 2, 1.25, 0.5 with mean 1.25 -> 1.6, 1, 0.4.
    rows = make_rollouts([R(0.0), R(0.0)], [R(1.0), R(0.0)], [R(1.0), R(1.0)])
    batch, _ = assigned(rows, difficulty_loss_weight=True)
    assert batch.loss_weight.tolist() == close(1.6, 1.6, 1.0, 1.0, 0.4, 0.4)


def test_length_loss_weight_favours_the_short():
    batch, _ = assigned(make_rollouts([R(0.0, 2), R(0.0, 4)], [R(0.0, 6)]), length_loss_weight=True)
    assert batch.loss_weight.tolist() == close(1.5, 1.0, 0.5)


def test_without_a_weight_there_is_none():
    assert assigned(make_rollouts(*FOUR))[0].loss_weight is None


def drawn(step=1, seed=42, mode="seq-mean-token-sum", lengths=(1, 1, 1, 1), **pf):
    # Scores 0, 1, 2, 2.
    scores = [R(s, n) for s, n in zip((0.0, 1.0, 2.0, 2.0), lengths, strict=True)]
    keys = {"pf_ppo": PfPpo(**pf), "seed": seed, "loss_agg_mode": mode}
    return assigned(make_rollouts(scores[:2], scores[2:]), step=step, **keys)[0]


def test_pf_ppo_draws_rows_by_their_score():
    counts = [[], [], [], []]
    for step in range(60):
        weights = drawn(step=step).loss_weight
        # Weights are counts of 4 draws, scaled to mean 1 over the rows that were drawn.
        assert float(weights[weights > 0].mean()) == pytest.approx(1.0)
        for row in range(4):
            counts[row].append(float(weights[row] > 0))
    share = [sum(c) / len(c) for c in counts]
    # |score|^2 is 0, 1, 4, 4 of 9: drawn at least once in 4 draws with 0, 1 - (8/9)^4 = 0.376, 1 - (5/9)^4 = 0.905.
    assert share[0] == 0.0
    assert 0.2 < share[1] < 0.55
    assert min(share[2:]) > 0.8


def test_pf_ppo_methods_and_exponent_act():
    steps = range(40)
    never = [all(drawn(step=s, reweight_method="max_min").loss_weight[row] == 0 for s in steps) for row in range(4)]
    assert never == [False, True, False, False]
    # 0.1, 0.1, 0.4, 0.4: the score of 0 is drawn too.
    assert any(drawn(step=s, reweight_method="max_random").loss_weight[0] > 0 for s in steps)
    # With an exponent of 20 a score of 1 is a million times less likely than one of 2.
    assert all(drawn(step=s, weight_pow=20.0).loss_weight[1] == 0 for s in steps)


def test_pf_ppo_draws_again_every_step_and_the_same_for_the_same_seed():
    assert torch.equal(drawn(step=3).loss_weight, drawn(step=3).loss_weight)
    assert len({tuple(drawn(step=s).loss_weight.tolist()) for s in range(10)}) > 1
    assert len({tuple(drawn(seed=s).loss_weight.tolist()) for s in range(10)}) > 1


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_pf_ppo_weighs_a_loss_as_if_drawn_rows_were_copied(mode):
    for step in range(5):
        lengths = torch.tensor([1.0, 2.0, 3.0, 4.0])
        batch = drawn(step=step, mode=mode, lengths=(1, 2, 3, 4), reweight_method="max_random")
        counts = batch.loss_weight / batch.loss_weight[batch.loss_weight > 0].min()
        counts = counts * (4 / counts.sum())  # four draws
        assert_close(counts, counts.round())
        sizes = denominators(batch)
        token = mode == "token-mean"
        # A loss of 1 on every token: the copied batch has counts * lengths tokens.
        copied = 1.0 if token else float((counts * lengths).sum()) / 4
        found = float((batch.loss_weight * lengths).sum()) / (sizes.tokens if token else sizes.sequences)
        assert found == pytest.approx(copied)


# --- parts of rewards -------------------------------------------------------------------------------------------------


def test_gdpo_gets_the_parts_of_weighted_and_what_is_left_over():
    """Domain a: right (1) and short (0.5) and a penalty of the length; domain b: one score, weight 2."""
    rollouts = make_rollouts([R(1.0), R(0.5)], [R(3.0), R(1.0)], domains="ab")
    named = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}, {"right": 9.0}, {}]
    rollouts = replace(
        rollouts,
        trajectories=tuple(
            replace(trajectory, reward_parts=parts)
            for trajectory, parts in zip(rollouts.trajectories, named, strict=True)
        ),
    )
    parts = {"right": RewardPart(name="gsm8k"), "short": RewardPart(name="length", weight=0.5)}
    rewards = {"a": RewardConfig(name="weighted", parts=parts), "b": RewardConfig(name="gsm8k", weight=2.0)}
    credit = credit_stages(make_config(adv_estimator="gdpo", rewards=rewards))
    shaped = torch.tensor([1.0, 0.5 - 0.25, 6.0, 2.0])  # the second response is 0.25 too long
    found, weights = reward_parts(make_config(adv_estimator="gdpo", rewards=rewards), rollouts, shaped)
    assert found.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, -0.25], [0.0, 0.0, 6.0], [0.0, 0.0, 2.0]]
    assert weights.tolist() == [[1.0, 0.5, 1.0]] * 2 + [[0.0, 0.0, 1.0]] * 2
    assert (found * weights).sum(1).tolist() == shaped.tolist()
    batch = credited_by(credit, fresh(rollouts, 4), step=4)[0].batch
    # a: +1 and -0.5 of 1/sqrt(2), nothing left over; b: +1 and -1 of 1/sqrt(2): over the batch's mean 0 and spread
    raw = [(1 - 0.5) / math.sqrt(2), -(1 - 0.5) / math.sqrt(2), 1 / math.sqrt(2), -1 / math.sqrt(2)]
    spread = math.sqrt(sum(x * x for x in raw) / 3)
    assert batch.advantages[batch.action_mask].tolist() == pytest.approx([x / spread for x in raw], abs=1e-4)


# --- train/infer correction -------------------------------------------------------------------------------------------


# Two optimizer steps, and a sampler that computes otherwise than the trainer: old log-probs have a pass of their own.
FORWARD = {"ppo_epochs": 2, "actor_infer": ActorInferConfig(model_args=ModelArgs(dtype="bf16"))}


def corrected(**rule):
    """Two rows of two tokens, sampled at log-prob -2; trained log-probs give the ratios 0.5, 2 and 4, 1."""
    rows = make_rollouts([R(1.0, 2), R(0.0, 2)])
    ratios = (0.5, 2.0, 4.0, 1.0)
    old, sampled = on_actions(rows, *(-2.0 + math.log(r) for r in ratios)), on_actions(rows, *[-2.0] * 4)
    rows = replace(rows, batch=rows.batch.with_columns(old_logprobs=old, sampling_logprobs=sampled))
    batch, metrics = assigned(rows, train_infer_correction=TrainInferCorrection(**rule) if rule else None, **FORWARD)
    inside = batch.action_mask
    weights = None if batch.importance_weights is None else batch.importance_weights[inside].tolist()
    return weights, batch.loss_mask[inside].tolist(), metrics.result()


def test_icepop_keeps_rejected_tokens_in_the_denominator_with_weight_0():
    weights, mask, metrics = corrected(importance_upper=None, ratio_high=3.0, rejection="icepop")
    assert weights == [1.0, 1.0, 0.0, 1.0]
    assert mask == [True] * 4
    assert metrics["mismatch/rejected_share"] == pytest.approx(1 / 4)


def test_without_a_correction_the_mismatch_is_only_measured():
    weights, mask, metrics = corrected()
    assert weights is None and mask == [True] * 4
    assert metrics["mismatch/ratio_max"] == pytest.approx(4.0)
    # mean |log ratio| = (ln 2 + ln 2 + ln 4 + 0) / 4 = ln 2
    assert metrics["mismatch/abs_log_ratio_mean"] == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("level", "expected"),
    # Row 1 has the product 1; row 2 the product 4 and the geometric mean 2. Capped at 3.
    [("token", (0.5, 2, 3, 1)), ("geometric", (1, 1, 2, 2)), ("segment", (1, 1, 2, 2)), ("sequence", (1, 1, 3, 3))],
)
def test_importance_weights_are_ratios_up_to_a_bound(level, expected):
    weights, mask, _ = corrected(level=level, importance_upper=3.0)
    assert weights == close(*expected)
    assert mask == [True] * 4


def test_importance_weights_have_a_lower_bound_and_a_mean_of_one():
    assert corrected(importance_upper=3.0, importance_lower=0.8)[0] == close(0.8, 2, 3, 1)
    # 0.5, 2, 3, 1 have the mean 1.625
    assert corrected(importance_upper=3.0, importance_mean_one=True)[0] == close(4 / 13, 16 / 13, 24 / 13, 8 / 13)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"ratio_low": 0.6}, (False, True, True, True)),
        ({"ratio_high": 3.0}, (True, True, False, True)),
        ({"ratio_low": 0.6, "ratio_high": 3.0}, (False, True, False, True)),
        ({"ratio_high": 3.0, "level": "sequence"}, (True, True, False, False)),
        ({"ratio_high": 1.5, "level": "geometric"}, (True, True, False, False)),
        # p_infer = e^-2 = 0.1353: differences -0.068, 0.135, 0.406, 0. Row means 0.034, 0.203.
        ({"difference_low": -0.05}, (False, True, True, True)),
        ({"difference_high": 0.3}, (True, True, False, True)),
        ({"difference_high": 0.1, "level": "geometric"}, (True, True, False, False)),
        ({"difference_high": 0.3, "ratio_low": 0.6}, (False, True, False, True)),
        # d = -ln 2, ln 2, ln 4, 0. k3: 0.193, 0.307, 1.614, 0; k2: 0.240, 0.240, 0.961, 0
        ({"divergence_high": 0.25}, (True, False, False, True)),
        ({"divergence_high": 0.25, "divergence": "k2"}, (True, True, False, True)),
        ({"divergence_high": 0.4, "level": "geometric"}, (True, True, False, False)),
        ({"divergence_high": 0.45, "level": "sequence"}, (False, False, False, False)),
        ({"divergence_high": 0.55, "level": "sequence"}, (True, True, False, False)),
        ({"row_divergence_high": 0.5}, (True, True, False, False)),
        ({"row_divergence_high": 0.3}, (False, False, False, False)),
        ({"row_divergence_high": 0.3, "divergence": "k2"}, (True, True, False, False)),
    ],
)
def test_filters_mask_tokens_by_ratio_and_by_difference(rule, expected):
    weights, mask, metrics = corrected(importance_upper=None, **rule)
    assert weights == [1.0] * 4
    assert tuple(mask) == expected
    assert metrics["mismatch/rejected_share"] == pytest.approx(1 - sum(expected) / 4)
