"""From scores to what the loss needs: shaped and normalised rewards, advantages, masks, weights.

Rewards are about trajectories [R]; so are shaping, normalisation, group statistics, draws, and the estimators, which
see a whole trajectory as one row of [R, T]. Only then is all of it spread to the rows [B] that are trained on: one per
trajectory in RLVR, and one or more where an environment is played (`sample_unit`).

Keeps the only two running quantities of the maths, the reward statistics and the KL coefficient; both are part of every
checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.advantages import AdvantageInputs, compute_advantages
from roll.algorithms.branches import Branches
from roll.algorithms.divergences import teacher_advantages
from roll.algorithms.gigpo import StepInputs
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
from roll.pipelines.credit.turn_credit import (
    TrajectoryView,
    comparison_groups,
    require_states,
    state_metrics,
    token_branches,
    turn_inputs,
)
from roll.pipelines.rollouts.assemble import Rollouts
from roll.pipelines.rollouts.off_policy import corrected, old_logprobs_source, staleness_metrics, staleness_of
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics
from roll.types.ragged import unpad
from roll.utils.seeding import stable_hash


class CreditAssigner:
    """Fill a batch: `token_rewards`, `advantages`, `returns`, `loss_mask`, `loss_weight`, `importance_weights`."""

    def __init__(self, config: RLConfig) -> None:
        self._config = config
        self._turns = config if isinstance(config, AgenticConfig) else None
        self._running = RunningMoments()
        self._old_logprobs = old_logprobs_source(config).source
        self._kl_coef = config.init_kl_coef
        adaptive = config.add_token_level_kl and config.target_kl is not None
        self._controller = AdaptiveKL(config.target_kl or 0.0, config.kl_horizon) if adaptive else FixedKL()
        self._estimator = chosen(ESTIMATORS, config.adv_estimator, config.adv_estimator_args, key="adv_estimator")
        # A normalised reward is the episode's: it has no parts that belong to turns.
        normalised = config.reward_mean_over or config.reward_std_over or config.reward_clip is not None
        identity = self._turns is not None and self._turns.reward_normalization.method == "identity"
        self._places_turns = identity and not normalised and config.estimator.reads_tokens

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {"running": self._running.state(), "kl_coef": self._kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._running = RunningMoments(**state["running"])
        self._kl_coef = state["kl_coef"]

    def assign(self, rollouts: Rollouts, *, step: int, greedy_scores: Tensor | None = None) -> tuple[Rollouts, Metrics]:
        """Return the rollouts with a batch that is ready for the update, and what to log.

        Args:
            rollouts: rows with `ref_logprobs`, `old_logprobs`, `values` where the configuration reads them.
            step: of training, from 1: says how old tokens are, and draws for `pf_ppo`.
            greedy_scores: float32 [R], score of the greedy response to the trajectory's prompt, NaN where that failed;
                for `remax`.

        Raises:
            RuntimeError: a token is older than `async_generation_ratio` permits.
        """
        config, batch, metrics = self._config, rollouts.batch, Metrics()
        view = TrajectoryView.of(rollouts)
        factor = torch.tensor([config.domain_weight(task.domain) for task in rollouts.tasks])
        scores = rollouts.rewards
        shaped = self._shaped(scores, scores * factor, rollouts, metrics)
        rewards = self._normalised(shaped, rollouts, metrics)
        mask = view.pad(batch.action_mask, False)
        branches = token_branches(rollouts, mask)
        kl_cost = self._kl_cost(view, batch, metrics)
        steps = self._steps(rollouts, mask, factor, shaped - scores * factor, metrics)
        per_token = self._token_rewards(rewards, mask, branches, steps, kl_cost)
        if steps is not None and kl_cost is not None:
            cost = sum_over_turns(kl_cost, steps.turn_index, mask, steps.num_turns)
            steps = replace(steps, turn_rewards=steps.turn_rewards - cost)
        values = None if batch.values is None else view.pad(batch.values)
        parts, part_weights = self._parts(rollouts, shaped) if config.estimator.reads_parts else (None, None)
        advantages, returns, signal = compute_advantages(
            self._estimator,
            AdvantageInputs(
                rewards=rewards,
                token_rewards=per_token,
                action_mask=mask,
                group_index=rollouts.group_index,
                gamma=config.gamma,
                lam=config.lambd,
                discount_over="token" if self._turns is None else self._turns.discount_over,
                values=values,
                # Where the greedy response failed there is nothing to compare with; those rows leave the loss below.
                greedy_rewards=None if greedy_scores is None else (greedy_scores * factor).nan_to_num(),
                parts=parts,
                part_weights=part_weights,
                logit_gradients=None if batch.logit_gradients is None else view.pad(batch.logit_gradients),
                steps=steps,
                branches=branches,
            ),
            config.estimator_options,
        )
        metrics.merge(signal)
        advantages = self._with_teacher(advantages, view, mask, batch, metrics)
        explained = None if values is None else explained_variance(values, returns, mask)
        if explained is not None:
            metrics.update({"critic/explained_variance": explained})
        if config.whiten_advantages:
            advantages = whiten(advantages, mask)
        if config.advantage_clip is not None:
            advantages, share = clip_to(advantages, config.advantage_clip, mask)
            metrics.update({"advantage/clipped_share": share})
        keep = self._kept(rollouts, scores, metrics)
        if greedy_scores is not None:
            keep &= ~greedy_scores.isnan()
            metrics.add_sum("rollout/failed_greedy", float(greedy_scores.isnan().sum()))
        loss_mask, importance = self._loss_mask(batch, view.to_rows(keep), step, metrics)
        filled = batch.with_columns(
            token_rewards=view.unpad(per_token),
            advantages=view.unpad(advantages),
            returns=view.unpad(returns),
            loss_mask=loss_mask,
            importance_weights=importance,
            loss_weight=self._row_weights(rollouts, view, scores, loss_mask, step),
        )
        return replace(rollouts, batch=filled, shaped_rewards=rewards), metrics

    def _with_teacher(
        self, advantages: Tensor, view: TrajectoryView, mask: Tensor, batch: TokenBatch, metrics: Metrics
    ) -> Tensor:
        """Return [R, T]: advantages from rewards as `reward_coef` weighs them, plus those that the teacher gives."""
        config = self._config
        if config.teacher is None:
            return advantages
        advantages = config.distill.reward_coef * advantages
        if not config.teacher_advantages:
            return advantages
        taught = teacher_advantages(
            view.pad(batch.require("old_logprobs")), view.pad(batch.require("teacher_logprobs")[:, 0]), mask
        )
        metrics.add_mean("distill/reverse_kl", -float(taught.double().sum()), float(mask.sum()))
        return advantages + config.distill.coef * taught

    def _shaped(self, scores: Tensor, weighted: Tensor, rollouts: Rollouts, metrics: Metrics) -> Tensor:
        """Return weighted scores plus the configured penalties and bonuses, each logged on its own."""
        config, shaped, lengths = self._config, weighted, rollouts.response_lengths
        limit = config.actor_infer.generating_args.max_new_tokens or config.response_length
        if (cosine := config.cosine_length) is not None:
            factor = torch.tensor([config.domain_weight(task.domain) for task in rollouts.tasks])
            shaped = factor * cosine_length_reward(
                lengths, scores > 0, maximum=limit, right=cosine.right, wrong=cosine.wrong, exceeded=cosine.exceeded
            )
            metrics.add_mean("reward/shaping/cosine_length", float(shaped.sum()), len(shaped))
        if config.overlong_shaping is not None:
            overlong = overlong_penalty(lengths, max_length=limit, buffer=config.overlong_shaping.buffer)
            shaped = shaped + config.overlong_shaping.penalty * overlong
            metrics.add_mean("reward/shaping/overlong", float(overlong.sum()), len(overlong))
        if config.add_len_reward:
            bonus = length_reward(lengths, scores > 0, rollouts.group_index)
            shaped = shaped + bonus
            metrics.add_mean("reward/shaping/length", float(bonus.sum()), len(bonus))
        return shaped

    def _parts(self, rollouts: Rollouts, shaped: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts that rewards are made of and their weights, both [R, K].

        The last column, of weight 1, is what the named parts of `weighted` leave over: other domains' scores, what a
        model adds, shaping. A domain has its parts in the first columns, whatever they are called.
        """
        terms = [self._config.reward_terms(task.domain) for task in rollouts.tasks]
        width = max(map(len, terms))
        parts, weights = torch.zeros(len(terms), width + 1), torch.zeros(len(terms), width + 1)
        for row, (trajectory, named) in enumerate(zip(rollouts.trajectories, terms, strict=True)):
            for column, (name, weight) in enumerate(named.items()):
                parts[row, column], weights[row, column] = trajectory.reward_parts.get(name, 0.0), weight
        rest = shaped - (parts * weights).sum(1)
        parts[:, -1] = torch.where(rest.abs() > 1e-5 * (1 + shaped.abs()), rest, 0.0)  # not the rounding of the sum
        weights[:, -1] = 1.0
        return parts, weights

    def _normalised(self, rewards: Tensor, rollouts: Rollouts, metrics: Metrics) -> Tensor:
        config = self._config
        mean, std = config.reward_mean_over, config.reward_std_over
        if "running" in (mean, std):
            self._running = self._running.update(rewards)
        normed = normalize_rewards(rewards, rollouts.group_index, mean=mean, std=std, running=self._running)
        if self._turns is not None and not config.estimator.credits_turns:
            compared = self._turns.reward_normalization
            index = comparison_groups(rollouts, compared.grouping)
            normed = normalize_grouped(normed, index, method=compared.method)
        if config.reward_clip is not None:
            normed, share = clip_to(normed, config.reward_clip)
            metrics.update({"reward/clipped_share": share})
        return normed

    def _steps(
        self, rollouts: Rollouts, mask: Tensor, factor: Tensor, extra: Tensor, metrics: Metrics
    ) -> StepInputs | None:
        """Return the turns that were played; None where episodes are one response."""
        if self._turns is None:
            return None
        if self._config.estimator.compares_states:
            require_states(rollouts, "adv_estimator: gigpo")
        steps = turn_inputs(rollouts, mask, self._turns, factor=factor, extra=extra)
        present = steps.turn_mask
        metrics.add_mean("reward/turn_mean", float(steps.turn_rewards[present].sum()), float(present.sum()))
        if self._config.estimator.compares_states:
            metrics.merge(state_metrics(steps, rollouts.group_index))
        return steps

    def _kl_cost(self, view: TrajectoryView, batch: TokenBatch, metrics: Metrics) -> Tensor | None:
        """Return [R, T], what the KL takes off the reward of each token; adapt the coefficient for the next step."""
        config = self._config
        if not config.add_token_level_kl:
            return None
        metrics.update({"kl/coef": self._kl_coef})
        # A coefficient that starts at 0 can only grow from 0: then no reference was asked.
        if batch.ref_logprobs is None:
            return None
        old, reference, mask = batch.require("old_logprobs"), batch.ref_logprobs, batch.action_mask
        exact = batch.reference_kl
        kl = kl_divergence(old, reference, mask, kind=config.kl_penalty) if exact is None else zero_outside(exact, mask)
        if not bool(kl.isfinite().all()):
            raise FloatingPointError(
                "the reference or the actor gives log-probs that are not a number, so there is no KL to take off the "
                "reward: look at the weights of both, and at `dtype` of the reference's model_args"
            )
        cost = self._kl_coef * zero_outside(kl.detach(), mask)
        mean_kl = float(kl.sum()) / max(float(mask.sum()), 1.0)
        metrics.update({"kl/reference": mean_kl})
        metrics.add_max("kl/token_max", zero_outside(kl.detach(), mask).amax())
        if exact is None:
            share = int(clamped_tokens(old, reference, mask)) / max(float(mask.sum()), 1.0)
            metrics.update({"kl/clamped_share": share})
        self._kl_coef = self._controller.update(self._kl_coef, mean_kl, view.num_trajectories)
        return view.pad(cost)

    def _token_rewards(
        self, rewards: Tensor, mask: Tensor, branches: Branches | None, steps: StepInputs | None, cost: Tensor | None
    ) -> Tensor:
        """Return [R, T]: rewards of turns at their ends, or that of the episode at the end of each branch; minus the
        KL's cost."""
        if self._places_turns:
            assert steps is not None, "only set where there are turns"
            placed = place_on_turns(steps.turn_rewards, steps.turn_index, mask).to(rewards.dtype)
        elif branches is not None:
            placed = zero_outside(rewards.unsqueeze(1).expand(mask.shape), branches.ends())
        else:
            placed = place_on_last_token(rewards, mask)
        if cost is not None:
            placed = placed - cost
        return whiten(placed, mask) if self._config.whiten_rewards else placed

    def _kept(self, rollouts: Rollouts, scores: Tensor, metrics: Metrics) -> Tensor:
        """Return bool [R], trajectories that count in the loss."""
        config, lengths = self._config, rollouts.response_lengths
        keep = torch.ones(len(scores), dtype=torch.bool)
        if config.max_len_mask:
            keep &= ~rollouts.truncated
        if config.difficulty_mask:
            low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
            keep &= within_difficulty(scores, rollouts.group_index, low=low, high=high)
        if config.error_max_len_clip:
            assert config.error_max_len_threshold is not None
            keep &= mask_long_errors(scores, lengths, max_error_length=config.error_max_len_threshold)
        metrics.add_mean("rollout/masked_share", float((~keep).sum()), len(keep))
        return keep

    def _loss_mask(self, batch: TokenBatch, keep: Tensor, step: int, metrics: Metrics) -> tuple[Tensor, Tensor | None]:
        """Return (bool [N], the tokens that count in the loss; float [N], importance weights); log staleness.

        Filters shrink numerator and denominators alike.
        """
        config, counted = self._config, batch.action_mask & keep.repeat_interleave(batch.lengths)
        staleness = staleness_of(batch, step, config.async_generation_ratio)
        if config.async_generation_ratio > 0:
            metrics.merge(staleness_metrics(staleness, batch.action_mask))
        if self._old_logprobs != "forward":
            return counted, None  # the update measures the mismatch in its first forward pass
        correction = corrected(config, batch, staleness)
        metrics.merge(correction.metrics)
        if config.train_infer_correction is None:
            return counted, None
        return counted & unpad(correction.keep, batch.offsets), unpad(correction.weights, batch.offsets)

    def _row_weights(
        self, rollouts: Rollouts, view: TrajectoryView, scores: Tensor, loss_mask: Tensor, step: int
    ) -> Tensor | None:
        """Return [B]: the rows of a trajectory have the same weight, and are drawn together."""
        config = self._config
        weights = torch.ones(len(scores))
        if config.difficulty_loss_weight:
            weights = weights * difficulty_weights(1.0 - group_moments(scores, rollouts.group_index).mean)
        if config.length_loss_weight:
            weights = weights * length_weights(rollouts.response_lengths)
        weights = view.to_rows(weights)
        if config.pf_ppo is not None:
            drawn = pf_ppo_weights(scores, method=config.pf_ppo.reweight_method, power=config.pf_ppo.weight_pow)
            generator = torch.Generator().manual_seed(stable_hash(config.seed, "pf_ppo", step, bits=56))
            counts = view.to_rows(resample_counts(drawn, generator))
            # Rows that weren't drawn leave the denominators, in which the others count once, however often drawn.
            tokens = view.row_sums(loss_mask)
            sizes = tokens if config.loss_agg_mode == "token-mean" else (tokens > 0).float()
            weights = weights * counts * ((sizes * (counts > 0)).sum() / (sizes * counts).sum().clamp(min=1))
        uses = config.difficulty_loss_weight or config.length_loss_weight or config.pf_ppo is not None
        return weights.float() if uses else None
