"""KL divergence to a reference: estimators with finite gradients, and the coefficient's controllers.

With d = logp - ref_logp of the sampled token, clamped to +-10 (joschu.net/blog/kl-approx):
    kl (k1) d      abs |d|      mse (k2) d^2/2      low_var_kl (k3) e^-d - 1 + d      full  sum_v p (log p - log q)

A name with `+` is an estimator with the gradient of `mse` (straight through).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from roll.algorithms.divergences import reverse_kl
from roll.algorithms.masking import as_bool, bounded_exp, require_shape, zero_outside

KLKind = Literal["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "low_var_kl+", "full"]
KLGradient = Literal["own", "unbiased"]

CLAMP = 10.0
"""Log-ratios to the reference are clamped to +- this, for the value and for the gradient of every estimator: where the
two are further apart the gradient stays what it is at the bound."""


def kl_divergence(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: KLKind, gradient: KLGradient = "own"
) -> Tensor:
    """Estimate KL(policy || reference) per token; gradients flow into `logprobs` only.

    `logprobs` and `ref_logprobs` are [B, T] of the sampled tokens, for `full` [B, T, K] of the same K tokens: all of
    the vocabulary, or fewer, and all others count as one outcome, a lower bound. Returns [B, T], 0 outside `mask`.

    `gradient: own` differentiates the estimator. `unbiased`, which names with `+` always have, keeps its value and
    takes the gradient of `mse`, d * dlogp, whose expectation under the policy is the gradient of the KL; that of `kl`
    itself has mean 0, so a loss made of `kl` needs `unbiased` to do anything. `full` is exact and ignores it.
    """
    if kind not in get_args(KLKind):
        raise ValueError(f"unknown KL estimator {kind!r}; expected one of {get_args(KLKind)}")
    if gradient not in get_args(KLGradient):
        raise ValueError(f"unknown KL gradient {gradient!r}; expected one of {get_args(KLGradient)}")
    if kind == "full":
        return _full(logprobs, ref_logprobs, mask)
    diff = _log_ratio(logprobs, ref_logprobs, mask).clamp(-CLAMP, CLAMP)
    value, slope = _estimate(diff, kind)
    unbiased = gradient == "unbiased" or kind.endswith("+")
    return _with_gradient(value, logprobs, slope=diff if unbiased else slope, mask=mask)


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: KLKind,
    sampled_logprobs: Tensor | None = None,
    cap: float = math.inf,
) -> Tensor:
    """Return the KL as a term of the loss: `kl_divergence` with a gradient towards the reference; [B, T].

    With `sampled_logprobs` each token's estimate is multiplied by min(pi / pi_sampled, cap), and the ratio's gradient
    counts. Averaged over the sampler that is the KL of the policy (`mse`, `abs`: the mean of d^2 / 2, |d|) and, for
    `kl`, `mse`, `low_var_kl` and every name with `+`, its gradient: w d dlogp. `low_var_kl` has that gradient, the
    others are given it: k3 + dk3/dd = d. At the cap w is the cap, in both.

    Without them the gradient is the estimator's own, but for `kl`, whose own is zero on average, and names with `+`:
    these have that of `mse`. That of `low_var_kl` is biased, and for tokens of an older policy all are. `full` has no
    ratio: it doesn't depend on which token was sampled.
    """
    if kind == "full" or sampled_logprobs is None:
        gradient: KLGradient = "unbiased" if kind == "kl" else "own"
        return kl_divergence(logprobs, ref_logprobs, mask, kind=kind, gradient=gradient)
    if cap <= 0:
        raise ValueError(f"the cap of the ratio to the sampler must be > 0, got {cap}")
    diff = _log_ratio(logprobs, ref_logprobs, mask).clamp(-CLAMP, CLAMP)
    value, slope = _estimate(diff, kind)
    weight = bounded_exp(_log_ratio(logprobs, sampled_logprobs, mask)).clamp(max=cap)
    slope = value + slope if kind == "abs" else diff  # of `abs+`, too
    return _with_gradient(weight * value, logprobs, slope=weight * slope, mask=mask)


def clamped_tokens(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Count the tokens of `mask` whose log-ratio to the reference is beyond the clamp, int64 []."""
    return (_log_ratio(logprobs, ref_logprobs, mask).abs() > CLAMP).sum()


def _log_ratio(logprobs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Return logprobs - other, constant; 0 outside `mask` and where both give probability 0. What is no number stays
    NaN."""
    require_shape("ref_logprobs", other, tuple(logprobs.shape), "the shape of logprobs")
    require_shape("mask", mask, tuple(logprobs.shape), "[B, T]")
    mine, theirs = zero_outside(logprobs.detach(), mask), zero_outside(other.detach(), mask)
    both_impossible = (mine == -torch.inf) & (theirs == -torch.inf)
    return zero_outside(mine - theirs, ~both_impossible)


def _estimate(diff: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return (value, d value / d diff) of a clamped log-ratio."""
    kind = kind.removesuffix("+")
    if kind == "kl":
        return diff, torch.ones_like(diff)
    if kind == "abs":
        return diff.abs(), diff.sign()
    if kind == "mse":
        return diff.square() / 2, diff
    # expm1 keeps the digits that exp - 1 loses near 0, where most tokens are.
    return (-diff).expm1() + diff, -(-diff).expm1()


def _with_gradient(value: Tensor, logprobs: Tensor, slope: Tensor, mask: Tensor) -> Tensor:
    """Return `value` with d value / d logprobs = `slope`: clamping would zero the gradient where it is needed most."""
    moving = zero_outside(logprobs, as_bool(mask) & logprobs.isfinite())
    return zero_outside(value + slope * (moving - moving.detach()), mask)


def _full(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    if logprobs.dim() != 3:
        raise ValueError(
            f"KL `full` needs log-probs over the vocabulary, [B, T, V], got shape {tuple(logprobs.shape)}; "
            "with log-probs of the sampled tokens use `low_var_kl`"
        )
    require_shape("ref_logprobs", ref_logprobs, tuple(logprobs.shape), "the shape of logprobs")
    return reverse_kl(logprobs, ref_logprobs, as_bool(mask))


@dataclass(frozen=True, slots=True)
class FixedKL:
    """A KL coefficient that never moves."""

    def update(self, coef: float, kl: float, n: int) -> float:  # noqa: ARG002
        """Return the same coefficient."""
        return coef


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """Steers the KL towards `target` (arXiv:1909.08593). Pure: the caller keeps the coefficient."""

    target: float
    """KL to aim at, nats per token, > 0."""
    horizon: float
    """Samples over which the coefficient may move by a factor of about 1.2, > 0."""

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(
                f"adaptive KL needs target_kl > 0 and kl_horizon > 0, got {self.target} and {self.horizon}"
            )

    def update(self, coef: float, kl: float, n: int) -> float:
        """Return coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon), never below 0, after a step.

        `kl` is the mean per token over the whole step, all domains together, `n` the samples in the step.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}; the coefficient can't be adapted to it")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return max(coef * (1 + error * n / self.horizon), 0.0)
