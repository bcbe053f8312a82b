"""From scores to what the loss needs: shaped and normalised rewards, advantages, masks, weights.

Keeps the only two running quantities of the maths, the reward statistics and the KL coefficient; both are part of every
checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roll.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute_advantages
from roll.algorithms.groups import group_moments
from roll.algorithms.kl import AdaptiveKL, FixedKL, kl_divergence
from roll.algorithms.normalization import RunningMoments, clip_to, normalize_rewards, whiten
from roll.algorithms.shaping import (
    difficulty_weights,
    length_reward,
    length_weights,
    overlong_penalty,
    pf_ppo_weights,
    resample_counts,
    short_or_right,
    token_rewards,
    within_difficulty,
)
from roll.configs.rlvr import RLVRConfig
from roll.pipelines.assemble import Rollouts
from roll.pipelines.off_policy import corrected, old_logprobs_source, staleness_metrics, staleness_of
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics
from roll.types.ragged import unpad
from roll.utils.importing import load_object
from roll.utils.seeding import stable_hash


class CreditAssigner:
    """Fills `rewards`, `token_rewards`, `advantages`, `returns`, `loss_mask`, `loss_weight`, `importance_weights`."""

    def __init__(self, config: RLVRConfig) -> None:
        self._config = config
        self._running = RunningMoments()
        self._old_logprobs = old_logprobs_source(config).source
        self._kl_coef = config.init_kl_coef
        adaptive = config.add_token_level_kl and config.target_kl is not None
        self._controller = AdaptiveKL(config.target_kl or 0.0, config.kl_horizon) if adaptive else FixedKL()
        name = config.adv_estimator
        own = name not in ADVANTAGES and ":" in name
        self._estimator = load_object(name, key="adv_estimator") if own else name

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"running": self._running.state(), "kl_coef": self._kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self._running = RunningMoments(**state["running"])
        self._kl_coef = state["kl_coef"]

    def assign(
        self, rollouts: Rollouts, *, step: int, greedy_scores: Tensor | None = None
    ) -> tuple[TokenBatch, Metrics]:
        """The batch ready for the update.

        Args:
            rollouts: rows with `scores`, and with `ref_logprobs`, `old_logprobs`, `values` where the configuration
                reads them.
            step: of training, from 1: says how old tokens are, and draws for `pf_ppo`.
            greedy_scores: float32 [B], score of the greedy response to the row's prompt, NaN where that failed; for
                `remax`.

        Raises:
            RuntimeError: a token is older than `async_generation_ratio` permits.
        """
        config, batch, metrics = self._config, rollouts.batch, Metrics()
        weights = torch.tensor([config.rewards[task.domain].weight for task in rollouts.tasks])
        scores = batch.require("scores")
        rewards = self._normalised(self._shaped(scores * weights, rollouts, metrics), rollouts, metrics)
        mask = batch.pad("action_mask", False)
        per_token = self._token_rewards(rewards, mask, rollouts, metrics)
        advantages, returns, signal = compute_advantages(
            self._estimator,
            AdvantageInputs(
                rewards=rewards,
                token_rewards=per_token,
                action_mask=mask,
                group_index=rollouts.group_index,
                gamma=config.gamma,
                lam=config.lambd,
                values=None if batch.values is None else batch.pad("values"),
                # Rows whose greedy response failed have nothing to be compared with; they leave the loss below.
                greedy_rewards=None if greedy_scores is None else (greedy_scores * weights).nan_to_num(),
            ),
        )
        metrics.merge(signal)
        if config.whiten_advantages:
            advantages = whiten(advantages, mask)
        if config.advantage_clip is not None:
            advantages, share = clip_to(advantages, config.advantage_clip, mask)
            metrics.update({"advantage/clipped_share": share})
        loss_mask, importance = self._masks(rollouts, mask, step, metrics)
        if greedy_scores is not None:
            compared = ~greedy_scores.isnan()
            loss_mask = loss_mask & compared[:, None]
            metrics.add_sum("rollout/failed_greedy", float((~compared).sum()))
        filled = batch.with_columns(
            rewards=rewards,
            token_rewards=unpad(per_token, batch.offsets),
            advantages=unpad(advantages, batch.offsets),
            returns=unpad(returns, batch.offsets),
            loss_mask=unpad(loss_mask, batch.offsets),
            importance_weights=None if importance is None else unpad(importance, batch.offsets),
            loss_weight=self._row_weights(rollouts, loss_mask, step),
        )
        return filled, metrics

    def _shaped(self, scores: Tensor, rollouts: Rollouts, metrics: Metrics) -> Tensor:
        """Scores plus the configured penalties and bonuses, each logged on its own."""
        config, shaped, lengths = self._config, scores, rollouts.response_lengths
        if config.overlong_shaping is not None:
            limit = config.actor_infer.generating_args.max_new_tokens or config.response_length
            overlong = overlong_penalty(lengths, max_length=limit, buffer=config.overlong_shaping.buffer)
            shaped = shaped + config.overlong_shaping.penalty * overlong
            metrics.add_mean("reward/shaping/overlong", float(overlong.sum()), len(overlong))
        if config.add_len_reward:
            right = rollouts.batch.require("scores") > 0
            bonus = length_reward(lengths, right, rollouts.group_index)
            shaped = shaped + bonus
            metrics.add_mean("reward/shaping/length", float(bonus.sum()), len(bonus))
        return shaped

    def _normalised(self, rewards: Tensor, rollouts: Rollouts, metrics: Metrics) -> Tensor:
        config = self._config
        mean, std = config.reward_mean_over, config.reward_std_over
        if "running" in (mean, std):
            self._running = self._running.update(rewards)
        normed = normalize_rewards(rewards, rollouts.group_index, mean=mean, std=std, running=self._running)
        if config.reward_clip is not None:
            normed, share = clip_to(normed, config.reward_clip)
            metrics.update({"reward/clipped_share": share})
        return normed

    def _token_rewards(self, rewards: Tensor, mask: Tensor, rollouts: Rollouts, metrics: Metrics) -> Tensor:
        config, batch = self._config, rollouts.batch
        kl = None
        if config.add_token_level_kl:
            metrics.update({"kl/coef": self._kl_coef})
            # A coefficient that starts at 0 can only grow from 0: then no reference was asked.
            if batch.ref_logprobs is not None:
                old, reference = batch.pad("old_logprobs"), batch.pad("ref_logprobs")
                kl = kl_divergence(old, reference, mask, kind=config.kl_penalty)
        placed = token_rewards(rewards, mask, kl=kl, kl_coef=self._kl_coef)
        if kl is not None:
            mean_kl = float(kl.sum()) / max(float(mask.sum()), 1.0)
            metrics.update({"kl/reference": mean_kl})
            self._kl_coef = self._controller.update(self._kl_coef, mean_kl, len(rewards))
        return whiten(placed, mask) if config.whiten_rewards else placed

    def _masks(
        self, rollouts: Rollouts, mask: Tensor, step: int, metrics: Metrics
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens that count in the loss, importance weights): filters shrink numerator and denominators alike."""
        config, batch = self._config, rollouts.batch
        keep = torch.ones(len(batch), dtype=torch.bool)
        lengths, scores = rollouts.response_lengths, batch.require("scores")
        if config.max_len_mask:
            keep &= ~rollouts.truncated
        if config.difficulty_mask:
            low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
            keep &= within_difficulty(scores, rollouts.group_index, low=low, high=high)
        if config.error_max_len_clip:
            assert config.error_max_len_threshold is not None
            keep &= short_or_right(scores, lengths, max_error_length=config.error_max_len_threshold)
        metrics.add_mean("rollout/masked_share", float((~keep).sum()), len(batch))
        counted = mask & keep[:, None]
        keeps, weights = self._correction(batch, mask, step, metrics)
        return counted if keeps is None else counted & keeps, weights

    def _correction(
        self, batch: TokenBatch, mask: Tensor, step: int, metrics: Metrics
    ) -> tuple[Tensor | None, Tensor | None]:
        """(tokens that the filters keep, importance weights), None where there are none; and how old the tokens are."""
        config = self._config
        staleness = staleness_of(batch, step, config.async_generation_ratio)
        if config.async_generation_ratio > 0:
            metrics.merge(staleness_metrics(staleness, mask))
        if self._old_logprobs != "forward":
            return None, None  # the update measures the mismatch in its first forward pass
        found = corrected(config, batch, mask, staleness)
        metrics.merge(found.metrics)
        if config.train_infer_correction is None:
            return None, None
        return found.keep, found.weights

    def _row_weights(self, rollouts: Rollouts, loss_mask: Tensor, step: int) -> Tensor | None:
        config, scores = self._config, rollouts.batch.require("scores")
        weights = torch.ones(len(rollouts.batch))
        if config.difficulty_loss_weight:
            weights = weights * difficulty_weights(1.0 - group_moments(scores, rollouts.group_index).mean)
        if config.length_loss_weight:
            weights = weights * length_weights(rollouts.response_lengths)
        if config.pf_ppo is not None:
            drawn = pf_ppo_weights(scores, method=config.pf_ppo.reweight_method, power=config.pf_ppo.weight_pow)
            generator = torch.Generator().manual_seed(stable_hash(config.seed, "pf_ppo", step, bits=56))
            counts = resample_counts(drawn, generator)
            # Rows that weren't drawn leave the denominators, in which the others count once, however often drawn.
            tokens = loss_mask.sum(1).float()
            sizes = tokens if config.loss_agg_mode == "token-mean" else (tokens > 0).float()
            weights = weights * counts * ((sizes * (counts > 0)).sum() / (sizes * counts).sum().clamp(min=1))
        uses = config.difficulty_loss_weight or config.length_loss_weight or config.pf_ppo is not None
        return weights.float() if uses else None
