"""From scores to what the loss reads: shaped and normalised rewards, advantages, masks, weights. One stage for each.

Rewards are about trajectories [R]; so are shaping, normalisation, group statistics, draws, and the estimators, which
see a whole trajectory as one row of [R, T]. Only the last stage spreads all of it to the rows [B] that are trained on:
one per trajectory in RLVR, and one or more where an environment is played (`sample_unit`).

Two stages have a state, the reward statistics and the KL coefficient; both are part of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.advantages import AdvantageInputs, compute_advantages
from roll.algorithms.divergences import teacher_advantages
from roll.algorithms.groups import group_moments
from roll.algorithms.kl import AdaptiveKL, FixedKL, clamped_tokens, kl_divergence
from roll.algorithms.losses import explained_variance
from roll.algorithms.masking import zero_outside
from roll.algorithms.normalization import RunningMoments, clip_to, normalize_grouped, normalize_rewards, whiten
from roll.algorithms.shaping import (
    cosine_length_reward,
    difficulty_weights,
    length_reward,
    length_weights,
    mask_long_errors,
    overlong_penalty,
    pf_ppo_weights,
    place_on_last_token,
    resample_counts,
    within_difficulty,
)
from roll.algorithms.turns import place_on_turns, sum_over_turns
from roll.configs.catalog.entries import chosen
from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.rl_config import RLConfig
from roll.pipelines.credit.stages import Stage, Stages, StepData, checked_estimator, own_stages
from roll.pipelines.credit.turn_credit import comparison_groups, require_states, state_metrics, turn_inputs
from roll.pipelines.rollouts.assemble import Rollouts
from roll.pipelines.rollouts.off_policy import corrected, old_logprobs_source, staleness_metrics, staleness_of
from roll.types.ragged import unpad
from roll.utils.seeding import stable_hash


def credit_stages(config: RLConfig) -> Stages:
    """Return the stages that the configuration asks for, in the order in which they run."""
    own = own_stages(config)
    stages: list[Stage | bool] = [
        ShapedRewards(config),
        *own["shaped_rewards"],
        NormalisedRewards(config),
        *own["rewards"],
        config.add_token_level_kl and KLPenalty(config),
        isinstance(config, AgenticConfig) and PlayedTurns(config),
        TokenRewards(config, pays_turns=not own["rewards"]),
        *own["token_rewards"],
        Advantages(config),
        config.teacher is not None and TeacherAdvantages(config),
        (config.whiten_advantages or config.advantage_clip is not None) and BoundedAdvantages(config),
        *own["advantages"],
        (config.max_len_mask or config.difficulty_mask or config.error_max_len_clip) and Filters(config),
        (config.difficulty_loss_weight or config.length_loss_weight) and Weights(config),
        *own["trajectory_mask"],
        LossMask(config),
        config.pf_ppo is not None and DrawnAgain(config),
        Columns(),
    ]
    return Stages(stage for stage in stages if not isinstance(stage, bool))


class _ConfiguredStage(Stage):
    """A stage that is made of the configuration alone."""

    def __init__(self, config: RLConfig) -> None:
        self.config = config


def _domain_weights(config: RLConfig, rollouts: Rollouts) -> Tensor:
    """Return [R], the factors of scores."""
    return torch.tensor([config.domain_weight(task.domain) for task in rollouts.tasks])


# --- rewards ----------------------------------------------------------------------------------------------------------


class ShapedRewards(_ConfiguredStage):
    """Weigh scores by their domain, and add the configured penalties and bonuses, each logged on its own."""

    needs = ("scores",)
    gives = ("shaped_rewards",)

    def __call__(self, data: StepData) -> None:
        config, scores, lengths = self.config, data["scores"], data.response_lengths
        factor = _domain_weights(config, data.rollouts)
        shaped, metrics = scores * factor, data.metrics
        limit = config.actor_infer.generating_args.max_new_tokens or config.response_length
        if (cosine := config.cosine_length) is not None:
            shaped = factor * cosine_length_reward(
                lengths, scores > 0, maximum=limit, right=cosine.right, wrong=cosine.wrong, exceeded=cosine.exceeded
            )
            metrics.add_mean("reward/shaping/cosine_length", float(shaped.sum()), len(shaped))
        if config.overlong_shaping is not None:
            overlong = overlong_penalty(lengths, max_length=limit, buffer=config.overlong_shaping.buffer)
            shaped = shaped + config.overlong_shaping.penalty * overlong
            metrics.add_mean("reward/shaping/overlong", float(overlong.sum()), len(overlong))
        if config.add_len_reward:
            bonus = length_reward(lengths, scores > 0, data.group_index)
            shaped = shaped + bonus
            metrics.add_mean("reward/shaping/length", float(bonus.sum()), len(bonus))
        data.update(shaped_rewards=shaped)


class NormalisedRewards(_ConfiguredStage):
    """Compare rewards with those of the batch, the group, or all steps so far, and clip them."""

    needs = ("shaped_rewards",)
    gives = ("rewards",)

    def __init__(self, config: RLConfig) -> None:
        super().__init__(config)
        self._running = RunningMoments()

    def state_dict(self) -> dict[str, Any]:
        return {"running": self._running.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._running = RunningMoments(**state["running"])

    def __call__(self, data: StepData) -> None:
        config, rewards = self.config, data["shaped_rewards"]
        mean, std = config.reward_mean_over, config.reward_std_over
        if "running" in (mean, std):
            self._running = self._running.update(rewards)
        normed = normalize_rewards(rewards, data.group_index, mean=mean, std=std, running=self._running)
        if isinstance(config, AgenticConfig) and "turns" not in config.estimator.needs:
            compared = config.reward_normalization
            index = comparison_groups(data.rollouts, compared.grouping)
            normed = normalize_grouped(normed, index, method=compared.method)
        if config.reward_clip is not None:
            normed, share = clip_to(normed, config.reward_clip)
            data.metrics.update({"reward/clipped_share": share})
        data.update(rewards=normed)


class KLPenalty(_ConfiguredStage):
    """Take the KL towards the reference off the reward of each token; adapt its coefficient for the next step."""

    gives = ("kl_cost",)

    def __init__(self, config: RLConfig) -> None:
        super().__init__(config)
        self._coef = config.init_kl_coef
        target = config.target_kl
        self._controller = FixedKL() if target is None else AdaptiveKL(target, config.kl_horizon)

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self._coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._coef = state.get("kl_coef", self._coef)

    def __call__(self, data: StepData) -> None:
        batch, metrics = data.batch, data.metrics
        metrics.update({"kl/coef": self._coef})
        # A coefficient that starts at 0 can only grow from 0: then no reference was asked.
        if batch.ref_logprobs is None:
            return
        old, reference, mask = batch.require("old_logprobs"), batch.ref_logprobs, batch.action_mask
        exact, kind = batch.reference_kl, self.config.kl_penalty
        kl = kl_divergence(old, reference, mask, kind=kind) if exact is None else zero_outside(exact, mask)
        if not bool(kl.isfinite().all()):
            raise FloatingPointError(
                "the reference or the actor gives log-probs that are not a number, so there is no KL to take off the "
                "reward: look at the weights of both, and at `dtype` of the reference's model_args"
            )
        cost = self._coef * zero_outside(kl.detach(), mask)
        mean_kl = float(kl.sum()) / max(float(mask.sum()), 1.0)
        metrics.update({"kl/reference": mean_kl})
        metrics.add_max("kl/token_max", zero_outside(kl.detach(), mask).amax())
        if exact is None:
            share = int(clamped_tokens(old, reference, mask)) / max(float(mask.sum()), 1.0)
            metrics.update({"kl/clamped_share": share})
        self._coef = self._controller.update(self._coef, mean_kl, data.view.num_trajectories)
        data.update(kl_cost=data.view.pad(cost))


class PlayedTurns(_ConfiguredStage):
    """The turns of episodes, with their rewards and states."""

    needs = ("shaped_rewards",)

    def __call__(self, data: StepData) -> None:
        config, rollouts, mask = self.config, data.rollouts, data.action_mask
        assert isinstance(config, AgenticConfig), "only these have turns"
        if "states" in config.estimator.needs:
            require_states(rollouts, "adv_estimator: gigpo")
        factor = _domain_weights(config, rollouts)
        extra = data["shaped_rewards"] - data["scores"] * factor
        turns = turn_inputs(rollouts, mask, config, factor=factor, extra=extra)
        present = turns.turn_mask
        data.metrics.add_mean("reward/turn_mean", float(turns.turn_rewards[present].sum()), float(present.sum()))
        if "states" in config.estimator.needs:
            data.metrics.merge(state_metrics(turns, rollouts.group_index))
        data.turns = turns


class TokenRewards(_ConfiguredStage):
    """Put the rewards of turns at their ends, or that of the episode at the end of each branch; minus the KL's cost."""

    needs = ("rewards",)
    gives = ("token_rewards",)

    def __init__(self, config: RLConfig, *, pays_turns: bool) -> None:
        super().__init__(config)
        # A normalised reward is the episode's: it has no parts that belong to turns.
        normalised = config.reward_mean_over or config.reward_std_over or config.reward_clip is not None
        identity = isinstance(config, AgenticConfig) and config.reward_normalization.method == "identity"
        self._pays_turns = pays_turns and identity and not normalised and "token_rewards" in config.estimator.needs

    def __call__(self, data: StepData) -> None:
        rewards, mask = data["rewards"], data.action_mask
        turns, cost = data.turns, data.get("kl_cost")
        if self._pays_turns:
            assert turns is not None, "only set where there are turns"
            placed = place_on_turns(turns.turn_rewards, turns.turn_index, mask).to(rewards.dtype)
        elif data.branches is not None:
            placed = zero_outside(rewards.unsqueeze(1).expand(mask.shape), data.branches.ends())
        else:
            placed = place_on_last_token(rewards, mask)
        if cost is not None:
            placed = placed - cost
        data.update(token_rewards=whiten(placed, mask) if self.config.whiten_rewards else placed)
        if turns is not None and cost is not None:
            of_turns = sum_over_turns(cost, turns.turn_index, mask, turns.num_turns)
            data.turns = replace(turns, turn_rewards=turns.turn_rewards - of_turns)


# --- advantages -------------------------------------------------------------------------------------------------------


class Advantages(_ConfiguredStage):
    """Run the estimator."""

    gives = ("advantages", "returns")

    def __init__(self, config: RLConfig) -> None:
        super().__init__(config)
        self.needs = ("rewards", "token_rewards", *config.estimator.needs)
        self._estimator = chosen(ESTIMATORS, config.adv_estimator, config.adv_estimator_args, key="adv_estimator")
        if config.adv_estimator not in ESTIMATORS:
            self._estimator = checked_estimator(config.adv_estimator, self._estimator)

    def __call__(self, data: StepData) -> None:
        config, batch, greedy = self.config, data.batch, data.rollouts.greedy_scores
        if greedy is not None:
            # Where the greedy response failed there is nothing to compare with; `LossMask` leaves those rows out.
            greedy = (greedy * _domain_weights(config, data.rollouts)).nan_to_num()
        parts = reward_parts(config, data.rollouts, data["shaped_rewards"]) if "parts" in self.needs else (None, None)
        advantages, returns, signal = compute_advantages(
            self._estimator,
            AdvantageInputs(
                rewards=data["rewards"],
                token_rewards=data["token_rewards"],
                action_mask=data.action_mask,
                group_index=data.group_index,
                gamma=config.gamma,
                lam=config.lambd,
                discount_over=config.discount_over if isinstance(config, AgenticConfig) else "token",
                values=None if batch.values is None else data["values"],
                greedy_rewards=greedy,
                parts=parts[0],
                part_weights=parts[1],
                logit_gradients=None if batch.logit_gradients is None else data["logit_gradients"],
                steps=data.turns,
                branches=data.branches,
            ),
            config.estimator_options,
        )
        data.metrics.merge(signal)
        data.update(advantages=advantages, returns=returns)
        if batch.values is not None:
            explained = explained_variance(data["values"], returns, data.action_mask)
            data.metrics.update({} if explained is None else {"critic/explained_variance": explained})


def reward_parts(config: RLConfig, rollouts: Rollouts, shaped: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts that rewards are made of and their weights, both [R, K].

    The last column, of weight 1, is what the named parts of `weighted` leave over: other domains' scores, what a model
    adds, shaping. A domain has its parts in the first columns, whatever they are called.
    """
    terms = [config.reward_terms(task.domain) for task in rollouts.tasks]
    width = max(map(len, terms))
    parts, weights = torch.zeros(len(terms), width + 1), torch.zeros(len(terms), width + 1)
    for row, (trajectory, named) in enumerate(zip(rollouts.trajectories, terms, strict=True)):
        for column, (name, weight) in enumerate(named.items()):
            parts[row, column], weights[row, column] = trajectory.reward_parts.get(name, 0.0), weight
    rest = shaped - (parts * weights).sum(1)
    parts[:, -1] = torch.where(rest.abs() > 1e-5 * (1 + shaped.abs()), rest, 0.0)  # not the rounding of the sum
    weights[:, -1] = 1.0
    return parts, weights


class TeacherAdvantages(_ConfiguredStage):
    """Weigh advantages from rewards by `reward_coef`, and add those that the teacher gives."""

    needs = ("advantages", "teacher_logprobs")
    gives = ("advantages",)

    def __call__(self, data: StepData) -> None:
        distill, mask = self.config.distill, data.action_mask
        advantages = distill.reward_coef * data["advantages"]
        if self.config.teacher_advantages:
            teacher = data.view.pad(data.batch.require("teacher_logprobs")[:, 0])
            taught = teacher_advantages(data["old_logprobs"], teacher, mask)
            data.metrics.add_mean("distill/reverse_kl", -float(taught.double().sum()), float(mask.sum()))
            advantages = advantages + distill.coef * taught
        data.update(advantages=advantages)


class BoundedAdvantages(_ConfiguredStage):
    """Whiten advantages over the batch, and clip them."""

    needs = gives = ("advantages",)

    def __call__(self, data: StepData) -> None:
        advantages, mask = data["advantages"], data.action_mask
        if self.config.whiten_advantages:
            advantages = whiten(advantages, mask)
        if self.config.advantage_clip is not None:
            advantages, share = clip_to(advantages, self.config.advantage_clip, mask)
            data.metrics.update({"advantage/clipped_share": share})
        data.update(advantages=advantages)


# --- masks and weights ------------------------------------------------------------------------------------------------


class Filters(_ConfiguredStage):
    """Leave trajectories out of the loss: cut off, of groups too easy or too hard, wrong and long."""

    needs = ("scores",)
    gives = ("trajectory_mask",)

    def __call__(self, data: StepData) -> None:
        config, scores, keep = self.config, data["scores"], data["trajectory_mask"]
        if config.max_len_mask:
            keep &= ~data.rollouts.truncated
        if config.difficulty_mask:
            low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
            keep &= within_difficulty(scores, data.group_index, low=low, high=high)
        if config.error_max_len_clip:
            assert config.error_max_len_threshold is not None
            keep &= mask_long_errors(scores, data.response_lengths, max_error_length=config.error_max_len_threshold)
        data.update(trajectory_mask=keep)


class Weights(_ConfiguredStage):
    """Weigh trajectories by how rarely their group solves the task, and by how short they are."""

    needs = ("scores",)
    gives = ("trajectory_weights",)

    def __call__(self, data: StepData) -> None:
        config, weights = self.config, data["trajectory_weights"]
        if config.difficulty_loss_weight:
            weights = weights * difficulty_weights(1.0 - group_moments(data["scores"], data.group_index).mean)
        if config.length_loss_weight:
            weights = weights * length_weights(data.response_lengths)
        data.update(trajectory_weights=weights)


class LossMask(_ConfiguredStage):
    """Which tokens of the rows count in the loss, after the train/infer correction, and its weights; log staleness.

    Filters shrink numerator and denominators alike.
    """

    needs = ("trajectory_mask", "token_mask")

    def __init__(self, config: RLConfig) -> None:
        super().__init__(config)
        self._measures = old_logprobs_source(config).source == "forward"

    def __call__(self, data: StepData) -> None:
        config, batch, metrics, keep = self.config, data.batch, data.metrics, data["trajectory_mask"]
        metrics.add_mean("rollout/masked_share", float((~keep).sum()), len(keep))
        if (greedy := data.rollouts.greedy_scores) is not None:
            keep = keep & ~greedy.isnan()
            metrics.add_sum("rollout/failed_greedy", float(greedy.isnan().sum()))
        counted = batch.action_mask & data.view.to_rows(keep).repeat_interleave(batch.lengths)
        if (tokens := data.get("token_mask")) is not None:
            counted &= data.view.unpad(tokens)
        staleness = staleness_of(batch, data.step, config.async_generation_ratio)
        if config.async_generation_ratio > 0:
            metrics.merge(staleness_metrics(staleness, batch.action_mask))
        weights = None
        if self._measures:  # elsewhere the update measures the mismatch, in its first forward pass
            correction = corrected(config, batch, staleness)
            metrics.merge(correction.metrics)
            if config.train_infer_correction is not None:
                counted &= unpad(correction.keep, batch.offsets)
                weights = unpad(correction.weights, batch.offsets)
        data.add_columns(loss_mask=counted, importance_weights=weights)


class DrawnAgain(_ConfiguredStage):
    """Draw training rows again by their scores (`pf_ppo`): the rows of a trajectory together."""

    needs = ("scores", "trajectory_weights")
    gives = ("trajectory_weights",)

    def __call__(self, data: StepData) -> None:
        config, rule = self.config, self.config.pf_ppo
        assert rule is not None, "only made where it is asked for"
        drawn = pf_ppo_weights(data["scores"], method=rule.reweight_method, power=rule.weight_pow)
        generator = torch.Generator().manual_seed(stable_hash(config.seed, "pf_ppo", data.step, bits=56))
        counts = resample_counts(drawn, generator)
        # Rows that weren't drawn leave the denominators, in which the others count once, however often drawn.
        tokens, of_rows = data.view.row_sums(data.batch.require("loss_mask")), data.view.to_rows(counts)
        sizes = tokens if config.loss_agg_mode == "token-mean" else (tokens > 0).float()
        scale = (sizes * (of_rows > 0)).sum() / (sizes * of_rows).sum().clamp(min=1)
        data.update(trajectory_weights=data["trajectory_weights"] * counts * scale)


class Columns(Stage):
    """Write what trajectories were given into the columns of their rows."""

    needs = ("rewards", "token_rewards", "advantages", "returns")

    def __call__(self, data: StepData) -> None:
        weights = data.get("trajectory_weights")
        columns = {name: data.view.unpad(data[name]) for name in self.needs[1:]}
        data.add_columns(**columns, loss_weight=None if weights is None else data.view.to_rows(weights).float())
        data.rollouts = replace(data.rollouts, shaped_rewards=data["rewards"])
