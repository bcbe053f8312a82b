"""Rollout correction: importance weights and rejection filters between the trainer's log-probs and the sampler's.

The two differ where the engine computes otherwise than the trainer, and where it sampled under older weights; one
ratio covers both. TIS (fengyao.notion.site/off-policy-rl) truncates the weight at a cap; MIS and IcePop
(arXiv:2510.18855) reject what lies outside [low, high]. The log-ratio is taken at one of four levels:

    token      log pi_train(t) - log pi_infer(t)
    segment    mean over a run of consecutive action tokens that one version of the weights sampled: a turn's
               response, or one piece of it where new weights arrived in the middle
    geometric  mean over the row's action tokens
    sequence   sum over the row's action tokens, whichever weights sampled them: the policy that sampled the row is
               the one which changed on the way

Everything is constant in the loss (detached). A filter returns the tokens to keep. What becomes of the others is
`Rejection`: the rejection mask takes them out of the loss mask, and so out of numerator and denominators; IcePop
gives them weight 0 and leaves them in the denominators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from roll.algorithms.masking import LOG_RATIO_BOUND, as_bool, bounded_exp, masked_sum, require_shape, zero_outside
from roll.types.metrics import Metrics

Level = Literal["token", "segment", "geometric", "sequence"]
Rejection = Literal["mask", "icepop"]
Divergence = Literal["k2", "k3"]


def log_ratio_of(train_logprobs: Tensor, infer_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log pi_train - log pi_infer, [B, T], zero outside `mask`."""
    require_shape("infer_logprobs", infer_logprobs, tuple(train_logprobs.shape), "[B, T]")
    require_shape("mask", mask, tuple(train_logprobs.shape), "[B, T]")
    return zero_outside(train_logprobs, mask) - zero_outside(infer_logprobs, mask)


def at_level(log_ratio: Tensor, mask: Tensor, level: Level, versions: Tensor | None = None) -> Tensor:
    """Return the log-ratio of each token's unit at `level`, on every token of the unit; [B, T], zero outside `mask`.

    Differentiable, so the policy losses use it too. With `versions` (int [B, T]) a segment also ends where the version
    changes; without, where the action tokens do.
    """
    if level not in get_args(Level):
        raise ValueError(f"unknown ratio level {level!r}; expected one of {', '.join(get_args(Level))}")
    require_shape("mask", mask, tuple(log_ratio.shape), "[B, T]")
    mask = as_bool(mask)
    log_ratio = zero_outside(log_ratio, mask)
    if level == "token":
        return log_ratio
    if level == "segment":
        return _segment_mean(log_ratio, mask, versions)
    total = log_ratio.sum(1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(1, keepdim=True).clamp(min=1)
    return zero_outside(total.expand(log_ratio.shape), mask)


def _segment_mean(log_ratio: Tensor, mask: Tensor, versions: Tensor | None) -> Tensor:
    begins = mask & ~_previous(mask)
    if versions is not None:
        require_shape("versions", versions, tuple(mask.shape), "[B, T]")
        begins |= mask & (versions != _previous(versions))
    segment = begins.cumsum(1)  # [B, T]; tokens after a segment keep its number but are masked
    sums = log_ratio.new_zeros(mask.shape[0], mask.shape[1] + 1)
    counts = sums.scatter_add(1, segment, mask.to(sums.dtype))
    sums = sums.scatter_add(1, segment, log_ratio)
    return zero_outside((sums / counts.clamp(min=1)).gather(1, segment), mask)


def _previous(column: Tensor) -> Tensor:
    return torch.nn.functional.pad(column, (1, 0))[:, :-1]


def importance_weights(
    log_ratio: Tensor, mask: Tensor, *, level: Level, cap: float, lower: float = 0.0, versions: Tensor | None = None
) -> Tensor:
    """Return max(lower, min(ratio, cap)) at `level`, truncated importance sampling; [B, T], zero outside `mask`.

    Detached. An undefined ratio, of a token that both sides give probability 0 or of a unit with ratios 0 and infinity,
    weighs 0.
    """
    if cap <= 0:
        raise ValueError(f"the cap of the importance weight must be > 0, got {cap}")
    if not 0 <= lower <= cap:
        raise ValueError(f"the lower bound of the importance weight must be from 0 to its cap {cap}, got {lower}")
    unit = at_level(log_ratio.detach(), mask, level, versions)
    return zero_outside(bounded_exp(unit).clamp(min=lower, max=cap), as_bool(mask) & ~unit.isnan())


def mean_one(weights: Tensor, mask: Tensor) -> Tensor:
    """Return weights [B, T] over their mean on the tokens of `mask`; as they are where that mean is 0.

    The step's size is then that without weights; a cap alone makes it smaller.
    """
    mean = masked_sum(weights.double(), mask) / as_bool(mask).sum().clamp(min=1)
    return weights if mean <= 0 else (weights / mean).to(weights.dtype)


def keep_by_ratio(
    log_ratio: Tensor, mask: Tensor, *, level: Level, low: float, high: float, versions: Tensor | None = None
) -> Tensor:
    """Return the tokens whose unit has low <= ratio <= high; bool [B, T], a subset of `mask`."""
    _check_bounds(low, high)
    unit = at_level(log_ratio.detach(), mask, level, versions)
    at_least = -math.inf if low <= 0 else math.log(low)
    return as_bool(mask) & (unit >= at_least) & (unit <= math.log(high))


def keep_by_difference(
    train_logprobs: Tensor,
    infer_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Level,
    low: float,
    high: float,
    versions: Tensor | None = None,
) -> Tensor:
    """Return the tokens whose unit has low <= pi_train - pi_infer <= high; bool [B, T], a subset of `mask`.

    Levels other than `token` compare the unit's mean difference (a product of probabilities has no difference).
    """
    _check_bounds(low, high)
    inside = as_bool(mask)
    difference = (
        zero_outside(train_logprobs.detach(), inside).exp() - zero_outside(infer_logprobs.detach(), inside).exp()
    )
    unit = at_level(difference, inside, "geometric" if level == "sequence" else level, versions)
    return inside & (unit >= low) & (unit <= high)


def keep_by_divergence(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    estimator: Divergence,
    level: Level,
    high: float,
    row_max: bool = False,
    versions: Tensor | None = None,
) -> Tensor:
    """Return the tokens whose unit diverges by at most `high`; bool [B, T], a subset of `mask`.

    Of a token with the log-ratio d: `k2` is d^2 / 2, `k3` exp(d) - 1 - d (joschu.net/blog/kl-approx), which estimates
    KL(sampler || trainer). A segment and `geometric` have the mean of their tokens, `sequence` the sum. With `row_max`
    a row is judged by its largest token, whatever the level. An undefined ratio diverges.
    """
    if high <= 0:
        raise ValueError(f"a divergence to reject by must be > 0, got {high}")
    if estimator not in get_args(Divergence):
        raise ValueError(f"unknown divergence {estimator!r}; expected one of {', '.join(get_args(Divergence))}")
    inside, bound = as_bool(mask), LOG_RATIO_BOUND
    undefined = log_ratio.isnan() & inside
    d = zero_outside(log_ratio.detach(), inside & ~undefined).clamp(-bound, bound)
    of_token = d.square() / 2 if estimator == "k2" else d.expm1() - d
    of_token = torch.where(undefined, torch.full_like(of_token, math.inf), of_token)
    if row_max:
        unit = zero_outside(of_token, inside).amax(1, keepdim=True).expand(of_token.shape)
    else:
        unit = at_level(of_token, inside, level, versions)
    return inside & (unit <= high)


def _check_bounds(low: float, high: float) -> None:
    if not low < high or high <= 0:
        raise ValueError(f"a rejection filter needs low < high and high > 0, got low={low}, high={high}")


@dataclass(frozen=True, slots=True)
class Filter:
    """One rejection rule."""

    level: Level
    low: float = -math.inf
    high: float = math.inf
    on: Literal["ratio", "difference", "k2", "k3"] = "ratio"
    row_max: bool = False
    """Of a divergence: judge a row by its largest token."""


@dataclass(frozen=True, eq=False)
class Correction:
    """What to do with each token."""

    weights: Tensor
    """[B, T], multiplies the per-token loss; 1 where no weight is asked for, 0 outside the mask and where `icepop`
    rejects."""
    keep: Tensor
    """bool [B, T], the loss mask: all of the mask with `icepop`, else what the filters keep."""
    metrics: Metrics = field(default_factory=Metrics)


def correct(
    train_logprobs: Tensor,
    infer_logprobs: Tensor,
    mask: Tensor,
    *,
    weight_level: Level | None = None,
    weight_cap: float = 2.0,
    weight_lower: float = 0.0,
    weight_mean_one: bool = False,
    filters: tuple[Filter, ...] = (),
    rejection: Rejection = "mask",
    versions: Tensor | None = None,
    fresh: Tensor | None = None,
) -> Correction:
    """Compute weights and keep-mask of a batch, and measure the mismatch.

    `train_logprobs` [B, T] are the trainer's before the update, `infer_logprobs` [B, T] as sampled. `weight_level` None
    leaves all weights 1; `weight_mean_one`: see `mean_one`. All `filters` must agree to keep a token. `versions`, int
    [B, T], are the weights that sampled each token: where they change, a segment ends. `fresh`: see `mismatch_metrics`.
    """
    if rejection not in get_args(Rejection):
        raise ValueError(f"unknown rejection {rejection!r}; expected one of {', '.join(get_args(Rejection))}")
    inside = as_bool(mask)
    log_ratio = log_ratio_of(train_logprobs.detach(), infer_logprobs.detach(), inside)
    weights = inside.to(log_ratio.dtype)
    metrics = mismatch_metrics(log_ratio, inside, fresh)
    tokens = float(inside.sum())
    if weight_level is not None:
        bounds: dict[str, Any] = {"level": weight_level, "cap": weight_cap, "lower": weight_lower}
        weights = importance_weights(log_ratio, inside, **bounds, versions=versions)
        metrics.add_mean("mismatch/weight_mean", float(masked_sum(weights, inside)), tokens)
        undefined = inside & (weights == 0)  # a ratio that is defined is at least e^-20
        bounded = inside & ~undefined & ((weights >= weight_cap) | (weights <= weight_lower))
        metrics.add_mean("mismatch/weight_capped_share", float(bounded.sum()), tokens)
        if bool(undefined.any()):
            metrics.add_sum("mismatch/undefined_weights", float(undefined.sum()))
        if weight_mean_one:
            weights = mean_one(weights, inside)
    keep = inside
    for rule in filters:
        bounds = {"level": rule.level, "high": rule.high, "versions": versions}
        if rule.on == "ratio":
            keep = keep & keep_by_ratio(log_ratio, inside, low=rule.low, **bounds)
        elif rule.on == "difference":
            keep = keep & keep_by_difference(train_logprobs, infer_logprobs, inside, low=rule.low, **bounds)
        else:
            keep = keep & keep_by_divergence(log_ratio, inside, estimator=rule.on, row_max=rule.row_max, **bounds)
    if filters:
        metrics.add_mean("mismatch/rejected_share", float((inside & ~keep).sum()), tokens)
        rows = inside.any(1)
        metrics.add_mean("mismatch/rejected_row_share", float((rows & ~keep.any(1)).sum()), float(rows.sum()))
    retained = zero_outside(weights, keep)
    if weight_level is not None or filters:
        metrics.add_mean("mismatch/ess", effective_share(retained, inside) * tokens, tokens)
    if rejection == "icepop":
        return Correction(weights=retained, keep=inside, metrics=metrics)
    return Correction(weights=weights, keep=keep, metrics=metrics)


def effective_share(weights: Tensor, mask: Tensor) -> float:
    """Return Kish's effective sample size of the weights, as a share of the tokens: (sum w)^2 / (n sum w^2).

    1 if all weights are equal, 1/n if one has all the weight; 0 if there is none.
    """
    inside = weights.double()[as_bool(mask)]
    squares = float(inside.square().sum())
    return float(inside.sum()) ** 2 / (len(inside) * squares) if squares > 0 else 0.0


def mismatch_metrics(log_ratio: Tensor, mask: Tensor, fresh: Tensor | None = None) -> Metrics:
    """Measure how far the sampler is from the trainer: KL(sampler || trainer) by k3 and k1, log-ratios, extreme ratios.

    A token that both give probability 0 has no ratio and isn't counted; an infinite log-ratio counts as +-20.

    `fresh`, bool [B, T], are tokens that were sampled under the trainer's very weights. Only they count in
    `mismatch/<name>`, the difference between two computations of the same thing; with the stale ones, whose difference
    is learning as well, they make `mismatch/all_<name>`. None: all are, and there is no `all_`.
    """
    inside = as_bool(mask)
    if fresh is None:
        return _distances(_FRESH, log_ratio, inside)
    require_shape("fresh", fresh, tuple(inside.shape), "[B, T]")
    metrics = _distances(_FRESH, log_ratio, inside & as_bool(fresh))
    return metrics.merge(_distances(_ALL, log_ratio, inside))


def perplexity_metrics(
    train_logprobs: Tensor, infer_logprobs: Tensor, mask: Tensor, fresh: Tensor | None = None
) -> Metrics:
    """Measure perplexities of the rows under both policies: exp of minus the mean log-prob of a row's tokens.

    All [B, T]; `fresh` as in `mismatch_metrics`, of a row only these tokens then count. Means over the rows that have
    any: `ppl_train`, `ppl_infer`, `ppl_ratio` (train to infer, exp of the difference of the row's mean log-probs) and
    `log_ppl_abs_diff` (the size of that difference). Perplexities are bounded by e^20.
    """
    inside = as_bool(mask)
    if fresh is None:
        return _perplexities(_FRESH_PPL, train_logprobs, infer_logprobs, inside)
    metrics = _perplexities(_FRESH_PPL, train_logprobs, infer_logprobs, inside & as_bool(fresh))
    return metrics.merge(_perplexities(_ALL_PPL, train_logprobs, infer_logprobs, inside))


_FRESH_PPL = ("mismatch/ppl_train", "mismatch/ppl_infer", "mismatch/ppl_ratio", "mismatch/log_ppl_abs_diff")
_ALL_PPL = (
    "mismatch/all_ppl_train", "mismatch/all_ppl_infer", "mismatch/all_ppl_ratio", "mismatch/all_log_ppl_abs_diff",
)  # fmt: skip


def _perplexities(names: tuple[str, str, str, str], train: Tensor, infer: Tensor, inside: Tensor) -> Metrics:
    metrics = Metrics()
    inside = inside & ~train.isnan() & ~infer.isnan()
    counts = inside.sum(1)
    rows, bound = counts > 0, LOG_RATIO_BOUND
    surprise = [
        (-zero_outside(of.detach(), inside).double().sum(1) / counts.clamp(min=1)).clamp(-bound, bound)
        for of in (train, infer)
    ]
    log_ratio, number = surprise[0] - surprise[1], rows.sum()
    of_train, of_infer, ratio, of_difference = names
    metrics.add_mean(of_train, masked_sum(surprise[0].exp(), rows), number)
    metrics.add_mean(of_infer, masked_sum(surprise[1].exp(), rows), number)
    metrics.add_mean(ratio, masked_sum(log_ratio.exp(), rows), number)
    metrics.add_mean(of_difference, masked_sum(log_ratio.abs(), rows), number)
    return metrics


_FRESH = (
    "mismatch/kl", "mismatch/chi2", "mismatch/abs_log_ratio_mean", "mismatch/above_2_share",
    "mismatch/below_half_share", "mismatch/ratio_max", "mismatch/ratio_min", "mismatch/kl_k1",
)  # fmt: skip
_ALL = (
    "mismatch/all_kl", "mismatch/all_chi2", "mismatch/all_abs_log_ratio_mean", "mismatch/all_above_2_share",
    "mismatch/all_below_half_share", "mismatch/all_ratio_max", "mismatch/all_ratio_min", "mismatch/all_kl_k1",
)  # fmt: skip
_FAR = math.log(2.0)


def _distances(names: tuple[str, ...], log_ratio: Tensor, inside: Tensor) -> Metrics:
    metrics = Metrics()
    inside = inside & ~log_ratio.isnan()
    bound = LOG_RATIO_BOUND
    log_ratio = zero_outside(log_ratio.detach(), inside).nan_to_num(posinf=bound, neginf=-bound)
    kl, chi2, distance, above, below, largest, smallest, plain = names
    tokens = inside.sum()
    # Tokens were drawn from the sampler: E[ratio - 1 - log ratio] under it is KL(sampler || trainer).
    bounded = log_ratio.clamp(-bound, bound)
    metrics.add_mean(kl, (bounded.expm1() - bounded).sum(), tokens)
    # The same without its control variate, as other systems log it: unbiased as well, but noisy and of either sign.
    metrics.add_mean(plain, -bounded.sum(), tokens)
    # Likewise E[ratio^2] - 1: how much noise importance weights without a cap would add.
    metrics.add_mean(chi2, (2 * bounded.double()).expm1().sum(), tokens)
    metrics.add_mean(distance, log_ratio.abs().sum(), tokens)
    metrics.add_mean(above, (bounded > _FAR).sum(), tokens)
    metrics.add_mean(below, (bounded < -_FAR).sum(), tokens)
    if bounded.numel():
        ratio = bounded.exp()
        metrics.add_max(largest, torch.where(inside, ratio, -math.inf).amax())
        metrics.add_min(smallest, torch.where(inside, ratio, math.inf).amin())
    return metrics
