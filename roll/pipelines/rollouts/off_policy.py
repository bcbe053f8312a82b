"""Rows that other weights sampled than those being trained: how old they are, and what is done about it.

    staleness   of a token: training step - 1 - version; 0 is what the step's own weights sampled
    behaviour   the policy that sampled a token, engine and all: `sampling_logprobs`
    proximal    the policy before the step's first update: `old_logprobs` of source `forward`

docs/algorithms.md, "Off-policy data", says how to choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.corrections import Correction, Filter, Level, correct
from roll.configs.schema.policy_config import TrainInferCorrection
from roll.configs.schema.rl_config import RLConfig
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics
from roll.types.ragged import pad_flat


@dataclass(frozen=True, slots=True)
class OldLogprobs:
    """Where the log-probs that the loss takes its ratio to come from, and why."""

    source: str  # `update`: the update's own forward pass; `sampler`: the engine's; `forward`: a pass of their own
    reason: str


def old_logprobs_source(config: RLConfig) -> OldLogprobs:
    """Spend a forward pass on old log-probs only when nobody knows them already."""
    compares = []
    if config.loss.decouples:
        compares.append(f"policy_loss {config.policy_loss}")
    if config.train_infer_correction is not None:
        compares.append("train_infer_correction")
    if config.async_generation_ratio > 0 and not compares:
        why = "samples may be of older weights and the loss's own ratio is all that says so"
        return OldLogprobs("sampler", f"{why}: it is taken to the policy that sampled")
    steps = config.batch.of("actor_train").optimizer_steps
    readers = list(compares)
    if steps > 1:
        readers.append(f"{steps} optimizer steps per batch")
    if config.add_token_level_kl and config.uses_reference:
        readers.append("the KL in the reward")
    if config.loss.selects:
        readers.append(f"policy_loss {config.policy_loss}")
    if config.teacher_advantages:
        readers.append("the teacher's advantages")
    readers += [f"the stage {path}" for path, needed in config.stage_needs.items() if "old_logprobs" in needed]
    if "logit_gradients" in config.estimator.needs:  # which take the pass anyway
        return OldLogprobs("forward", f"adv_estimator {config.adv_estimator} reads the trainer's distributions")
    if not readers:
        return OldLogprobs("update", "one optimizer step per batch: they are those of the update's own forward pass")
    wanted = " and ".join(readers)
    infer, train = config.actor_infer, config.actor_train
    exact = (
        not compares
        and infer.strategy_args.strategy_name == "hf_infer"
        and infer.model_args.dtype == train.model_args.dtype == "fp32"
        and getattr(train.strategy_args.strategy_config, "param_dtype", None) in (None, "fp32")
        and infer.model_args.model_config_kwargs == train.model_args.model_config_kwargs
        and infer.generating_args.repetition_penalty == 1.0
    )
    if exact:
        return OldLogprobs("sampler", f"needed for {wanted}; hf_infer in fp32 computes the trainer's own log-probs")
    return OldLogprobs("forward", f"needed for {wanted}; the sampler's log-probs differ from the trainer's")


def staleness_of(batch: TokenBatch, step: int, ratio: float) -> Tensor:
    """Return each token's age in weight updates when this step trains it, int64 [N]; 0 on prompt tokens.

    Args:
        step: the training step, from 1; it trains weights of version step - 1.
        ratio: `async_generation_ratio`; no token may be older than ceil(ratio).

    Raises:
        RuntimeError: a token is older than that, or newer than the weights. Not the user's fault: whoever collected
            the rows let it through.
    """
    versions = batch.require("versions")
    staleness = torch.where(batch.action_mask, step - 1 - versions, 0)
    limit = math.ceil(ratio)
    wrong = ((staleness < 0) | (staleness > limit)).nonzero()[:, 0]
    if len(wrong):
        rows = torch.searchsorted(batch.offsets, wrong, right=True) - 1
        at, row = int(wrong[0]), int(rows[0])
        raise RuntimeError(
            f"internal error: row {batch.row_ids[row]!r} has a token (position {at - int(batch.offsets[row])}) of "
            f"weight version {int(versions[at])} in step {step}, which trains version {step - 1}: staleness "
            f"{int(staleness[at])}, expected 0 to {limit} (async_generation_ratio {ratio:g}); "
            f"{len(rows.unique())} row(s) are concerned"
        )
    return staleness


def staleness_metrics(staleness: Tensor, mask: Tensor) -> Metrics:
    """Return mean, largest value and shares of the action tokens' staleness."""
    metrics, counted = Metrics(), staleness[mask]
    if not len(counted):
        return metrics
    tokens = float(len(counted))
    metrics.add_mean("staleness/mean", float(counted.sum()), tokens)
    metrics.add_max("staleness/max", float(counted.max()))
    metrics.add_mean("staleness/share_0", float((counted == 0).sum()), tokens)
    metrics.add_mean("staleness/share_1", float((counted == 1).sum()), tokens)
    metrics.add_mean("staleness/share_2_or_more", float((counted >= 2).sum()), tokens)
    return metrics


def corrected(config: RLConfig, batch: TokenBatch, staleness: Tensor) -> Correction:
    """Return the configured weights and filters [B, T], from `old_logprobs` of a forward pass and `sampling_logprobs`.

    With `decoupled_ppo` the loss applies the weight itself: here it is only measured, and the weights are 1.
    """
    rule = config.train_infer_correction
    decoupled = config.loss.decouples
    level: Level = "token" if rule is None or decoupled else rule.level
    weighs, cap = decoupled, config.loss_options.get("behave_cap")
    mask = batch.pad("action_mask", False)
    more: dict[str, Any] = {}
    if rule is not None and not decoupled:
        weighs, cap = rule.importance_upper is not None, rule.importance_upper
        more = {"weight_lower": rule.importance_lower, "weight_mean_one": rule.importance_mean_one}
    correction = correct(
        batch.pad("old_logprobs"),
        batch.pad("sampling_logprobs"),
        mask,
        weight_level=level if weighs else None,
        weight_cap=math.inf if cap is None else cap,
        **more,
        filters=() if rule is None else _filters(rule),
        rejection="mask" if rule is None else rule.rejection,
        versions=batch.pad("versions", -1),
        fresh=pad_flat(staleness, batch.offsets) == 0 if config.async_generation_ratio > 0 else None,
    )
    if not decoupled:
        return correction
    rejected = mask & (correction.weights == 0)  # by `icepop`, or undefined
    return replace(correction, weights=torch.where(rejected, 0.0, torch.ones_like(correction.weights)))


def _filters(rule: TrainInferCorrection) -> tuple[Filter, ...]:
    filters = []
    if rule.ratio_low is not None or rule.ratio_high is not None:
        filters.append(Filter(rule.level, rule.ratio_low or 0.0, rule.ratio_high or math.inf))
    if rule.difference_low is not None or rule.difference_high is not None:
        low = -1.0 if rule.difference_low is None else rule.difference_low
        high = 1.0 if rule.difference_high is None else rule.difference_high
        filters.append(Filter(rule.level, low, high, on="difference"))
    for bound, row_max in ((rule.divergence_high, False), (rule.row_divergence_high, True)):
        if bound is not None:
            filters.append(Filter(rule.level, high=bound, on=rule.divergence, row_max=row_max))
    return tuple(filters)
