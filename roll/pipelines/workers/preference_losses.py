"""What a policy or a reward model learns from preferences, as pure functions of model outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from roll.algorithms.preference import bradley_terry, squared_error
from roll.configs.catalog.entries import chosen
from roll.configs.catalog.preference_table import PREFERENCE_LOSSES
from roll.configs.schema.preference_config import DPOConfig, RewardTrainingConfig
from roll.strategies.base import LossFn, LossTerms
from roll.types.batch import Denominators, TokenBatch, TokenOutputs
from roll.types.metrics import Metrics

UnitLoss: TypeAlias = Callable[[TokenOutputs, TokenBatch], tuple[Tensor, dict[str, Tensor]]]
"""(outputs, rows) -> (loss of each unit [U], what to log: a mean over the entries of each tensor)."""


def dpo_objective(config: DPOConfig, kind: Literal["policy", "value", "reward"]) -> LossFn:
    """Return the mean over the pairs, or the labelled rows, of the loss that the configuration names."""
    assert kind == "policy", "only a policy learns by its log-probs"
    return _mean_over_units(dpo_loss(config), "logprobs")


def reward_objective(config: RewardTrainingConfig, kind: Literal["policy", "value", "reward"]) -> LossFn:
    """Return the mean over the pairs, or rows, of what the scores lack."""
    assert kind == "reward", "only a reward model learns by its scores"
    return _mean_over_units(reward_loss(config), "values")


def _mean_over_units(loss_of: UnitLoss, needs: Literal["logprobs", "values"]) -> LossFn:
    def compute(outputs: TokenOutputs, batch: TokenBatch, sizes: Denominators) -> LossTerms:
        losses, logged = loss_of(outputs, batch)
        metrics = Metrics()
        for name, values in {"loss": losses, **logged}.items():
            metrics.add_mean(f"preference/{name}", values.detach().double().sum(), len(values))
        metrics.add_sum("preference/tokens", batch.require("loss_mask").sum())
        return LossTerms(loss=losses.sum() / sizes.units, metrics=metrics)

    return LossFn(compute=compute, needs=(needs,))


def dpo_loss(config: DPOConfig) -> UnitLoss:
    """Return the loss of pairs or labelled rows. Reads `loss_mask`, `preferred`, with a reference `ref_logprobs`, and
    for labelled rows `targets` (the KL)."""
    entry, options = config.loss, config.loss_options
    loss_fn = chosen(PREFERENCE_LOSSES, config.loss_type, config.loss_type_args, key="loss_type", skip=2)

    def of_pairs(outputs: TokenOutputs, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = pairs_of(batch)
        scores = sequence_scores(outputs, batch, reference=entry.reference, per_token=entry.per_token)
        losses = loss_fn(scores[first], scores[second], **options)
        rewards = config.beta * scores.detach()
        return losses, {**_compared(rewards[first], rewards[second]), **_logprobs(outputs, batch)}

    def of_rows(outputs: TokenOutputs, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        liked, baseline = batch.require("preferred"), batch.require("targets")
        ratios = sequence_scores(outputs, batch, reference=True, per_token=False)
        losses = loss_fn(ratios, liked, baseline.to(ratios), **options)
        rewards = config.beta * ratios.detach()
        right = (rewards > config.beta * baseline.to(ratios)) == liked
        sides = {"chosen_reward": rewards[liked], "rejected_reward": rewards[~liked]}
        return losses, {"accuracy": right.double(), "kl": baseline, **sides, **_logprobs(outputs, batch)}

    return of_pairs if entry.pairs else of_rows


def reward_loss(config: RewardTrainingConfig) -> UnitLoss:
    """Return the loss of a reward model. Reads `loss_mask` (one token per row), `preferred`, `targets`."""

    def of_pairs(outputs: TokenOutputs, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = pairs_of(batch)
        scores = sequence_scores(outputs, batch, column="values")
        losses = bradley_terry(scores[first], scores[second], batch.require("targets")[first].to(scores))
        losses = losses + config.center_rewards_coefficient * (scores[first] + scores[second]) ** 2
        return losses, _compared(scores[first].detach(), scores[second].detach())

    def of_rows(outputs: TokenOutputs, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        scores = sequence_scores(outputs, batch, column="values")
        return squared_error(scores, batch.require("targets").to(scores)), {"score": scores.detach()}

    return of_pairs if config.pairs else of_rows


def pairs_of(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return (rows of the chosen responses, rows of the rejected ones), int64 [P] each."""
    preferred = batch.require("preferred").tolist()
    pairs = [sorted(unit, key=lambda row: not preferred[row]) for unit in batch.units()]
    torn = [batch.unit_ids[unit[0]] for unit in pairs if [preferred[row] for row in unit] != [True, False]]
    assert not torn, f"not a chosen and a rejected row: {torn}"
    first, second = torch.tensor(pairs, device=batch.token_ids.device).T
    return first, second


def sequence_scores(
    outputs: TokenOutputs,
    batch: TokenBatch,
    *,
    column: Literal["logprobs", "values"] = "logprobs",
    reference: bool = False,
    per_token: bool = False,
) -> Tensor:
    """Return the sum over a row's loss tokens, or with `per_token` their mean, [B].

    `reference`: of log p - log p_ref. Raises `ValueError` where `ref_logprobs` lacks.
    """
    mask = batch.pad("loss_mask", False)
    values = outputs.pad(column)
    if reference:
        values = values - batch.pad("ref_logprobs").to(values)
    sums = (values * mask).sum(1)
    return sums / mask.sum(1) if per_token else sums


def _compared(chosen_rewards: Tensor, rejected_rewards: Tensor) -> dict[str, Tensor]:
    return {
        "accuracy": (chosen_rewards > rejected_rewards).double(),
        "margin": chosen_rewards - rejected_rewards,
        "chosen_reward": chosen_rewards,
        "rejected_reward": rejected_rewards,
    }


def _logprobs(outputs: TokenOutputs, batch: TokenBatch) -> dict[str, Tensor]:
    sums, liked = sequence_scores(outputs, batch).detach(), batch.require("preferred")
    return {"chosen_logprob": sums[liked], "rejected_logprob": sums[~liked]}
