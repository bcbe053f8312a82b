"""Policy and value losses per token; `aggregation.aggregate` makes one number of them.

With rho = exp(logp - old_logp), A the advantage and sg a stop-gradient. Every loss returns [B, T], zero outside the
mask, and metrics that add up over micro-batches and ranks. To add a loss, write a function `(PolicyLossInputs, *,
options...) -> PolicyLoss`, and an entry in `roll/configs/catalog/loss_table.py`; its keyword options are its
hyper-parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from roll.algorithms.corrections import at_level
from roll.algorithms.masking import as_bool, bounded_exp, masked_moments, masked_sum, require_shape, zero_outside
from roll.types.metrics import Metrics


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyLossInputs:
    """One micro-batch. Whatever lies outside the mask, NaN included, has no effect on losses or gradients."""

    logprobs: Tensor
    """[B, T], of the sampled tokens under the weights being trained; carries the gradient."""
    old_logprobs: Tensor
    """[B, T], what the ratio is taken to: before this step's updates (the proximal policy), or as sampled; constant."""
    advantages: Tensor
    """[B, T], or [B] for one number per response; constant."""
    mask: Tensor
    """bool [B, T], the tokens that count."""
    rollout_logprobs: Tensor | None = None
    """[B, T], under the policy that sampled (the behaviour policy), version by version; `decoupled_ppo` needs them."""
    selected: Tensor | None = None
    """bool [B, T], tokens that `clip_cov` and `kl_cov` treat apart, see covariance.py. None: none."""

    def __post_init__(self) -> None:
        shape = tuple(self.logprobs.shape)
        mask, per_token = as_bool(self.mask), self.advantages
        if per_token.dim() == 1:
            require_shape("advantages", per_token, shape[:1], "[B]")
            per_token = per_token.unsqueeze(1).expand(shape)
        require_shape("mask", mask, shape, "[B, T]")
        require_shape("old_logprobs", self.old_logprobs, shape, "[B, T]")
        require_shape("advantages", per_token, shape, "[B, T] or [B]")
        clean = {
            "logprobs": zero_outside(self.logprobs, mask),
            "old_logprobs": zero_outside(self.old_logprobs.detach(), mask),
            "advantages": zero_outside(per_token.detach(), mask),
            "mask": mask,
        }
        if self.rollout_logprobs is not None:
            require_shape("rollout_logprobs", self.rollout_logprobs, shape, "[B, T]")
            clean["rollout_logprobs"] = zero_outside(self.rollout_logprobs.detach(), mask)
        for name, tensor in clean.items():
            object.__setattr__(self, name, tensor)

    @property
    def log_ratio(self) -> Tensor:
        """Return logp - old_logp, [B, T], zero outside the mask."""
        return self.logprobs - self.old_logprobs


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """A loss per token and what to log about it."""

    loss: Tensor
    """[B, T], zero outside the mask."""
    metrics: Metrics


PolicyLossFn: TypeAlias = Callable[..., PolicyLoss]
"""(inputs, *, options...) -> PolicyLoss"""

RatioType = Literal["token", "segment"]


def ppo(
    inputs: PolicyLossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_type: RatioType = "token",
    sequence_mask: float | None = None,
) -> PolicyLoss:
    """Return PPO: max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) (arXiv:1707.06347).

    DAPO's clip-higher (arXiv:2503.14476) is 0.2 / 0.28. With `dual_clip` c > 1 the loss for A < 0 is at most -c A
    (arXiv:1912.09729), usually 3. `ratio_type: segment` takes the geometric mean ratio of each turn's response.
    With `sequence_mask` delta the tokens with A < 0 of a response whose mean of -log rho is above delta are left out
    (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556); they still count in the denominators.
    """
    ratio = bounded_exp(at_level(inputs.log_ratio, inputs.mask, ratio_type))
    policy_loss = _clipped(inputs, ratio, clip_low, clip_high, dual_clip)
    if sequence_mask is None:
        return policy_loss
    gone = -at_level(inputs.log_ratio.detach(), inputs.mask, "geometric") > _positive("sequence_mask", sequence_mask)
    left_out = gone & (inputs.advantages < 0) & inputs.mask
    _add_mean(policy_loss.metrics, "sequence_mask_share", left_out, inputs.mask)
    return PolicyLoss(zero_outside(policy_loss.loss, ~left_out), policy_loss.metrics)


def clip_cov(
    inputs: PolicyLossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_ratio: float = 2e-4,  # noqa: ARG001 - select the tokens, see covariance.py
    cov_low: float = 1.0,  # noqa: ARG001
    cov_high: float = 5.0,  # noqa: ARG001
) -> PolicyLoss:
    """Return PPO's loss, 0 for the selected tokens, which still count in the denominators (arXiv:2505.22617, eq. 11).

    Selected is, by chance, a share `cov_ratio` of tokens out of those whose covariance of log-prob and advantage lies
    between `cov_low` and `cov_high`.
    """
    policy_loss, chosen = ppo(inputs, clip_low=clip_low, clip_high=clip_high), _selected(inputs)
    _add_mean(policy_loss.metrics, "cov_share", chosen, inputs.mask)
    return PolicyLoss(zero_outside(policy_loss.loss, ~chosen), policy_loss.metrics)


def kl_cov(
    inputs: PolicyLossInputs,
    *,
    cov_ratio: float = 2e-4,  # noqa: ARG001 - selects the tokens, see covariance.py
    kl_coef: float = 1.0,
) -> PolicyLoss:
    """Return -A rho, plus `kl_coef` |log rho| for the selected tokens (arXiv:2505.22617, eq. 12).

    Selected is the share `cov_ratio` of tokens with the highest covariances of log-prob and advantage.
    """
    ratio, chosen = bounded_exp(inputs.log_ratio), _selected(inputs)
    metrics = _ratio_metrics(ratio, inputs.mask)
    _add_mean(metrics, "cov_share", chosen, inputs.mask)
    loss = -inputs.advantages * ratio + kl_coef * zero_outside(inputs.log_ratio.abs(), chosen)
    return PolicyLoss(zero_outside(loss, inputs.mask), metrics)


def _selected(inputs: PolicyLossInputs) -> Tensor:
    return torch.zeros_like(inputs.mask) if inputs.selected is None else as_bool(inputs.selected) & inputs.mask


def gmpo(inputs: PolicyLossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLoss:
    """Return GMPO (arXiv:2507.20673) in a token form: -A s_t with s_t = sg(s) exp(c_t - sg(c_t)), s = exp(mean_t c_t).

    c_t is the log-ratio, at most clip_high for A >= 0, at least -clip_low for A < 0; a clipped token has no gradient.
    The paper aggregates with `seq-mean-token-mean`, and with one advantage for a response both are the same.
    """
    high, low = _positive("clip_high", clip_high), _positive("clip_low", clip_low)
    up = inputs.advantages >= 0
    clipped = torch.where(up, inputs.log_ratio.clamp(max=high), inputs.log_ratio.clamp(min=-low))
    mean = at_level(zero_outside(clipped.detach(), inputs.mask), inputs.mask, "geometric")
    ratio = bounded_exp(mean + (clipped - clipped.detach()))
    metrics = _ratio_metrics(bounded_exp(inputs.log_ratio), inputs.mask)
    _add_mean(metrics, "clip_share", clipped.detach() != inputs.log_ratio.detach(), inputs.mask)
    return PolicyLoss(zero_outside(-inputs.advantages * ratio, inputs.mask), metrics)


def dppo(inputs: PolicyLossInputs, *, divergence: Literal["tv", "kl"] = "tv", threshold: float = 0.15) -> PolicyLoss:
    """Return DPPO: -A rho, but 0 for tokens that leave the trust region (arXiv:2602.04879, binary divergences).

    Left out is a token that the update would carry further away (rho > 1 with A > 0, rho < 1 with A < 0) and whose
    divergence is above the threshold already. With p = exp(logp), q = exp(old_logp): `tv` is |p - q|, `kl` that of the
    two events "this token" and "another one", q log(q / p) + (1 - q) log((1 - q) / (1 - p)).
    """
    log_p, log_q = inputs.logprobs.detach().double(), inputs.old_logprobs.double()
    p, q = log_p.exp(), log_q.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        rest_p, rest_q = ((1 - each).clamp(min=torch.finfo(torch.float64).tiny) for each in (p, q))
        distance = q * (log_q - log_p) + rest_q * (rest_q.log() - rest_p.log())
    away = torch.where(inputs.advantages > 0, log_p > log_q, (inputs.advantages < 0) & (log_p < log_q))
    left_out = (distance > _positive("threshold", threshold)) & away & inputs.mask
    ratio = bounded_exp(inputs.log_ratio)
    metrics = _ratio_metrics(ratio, inputs.mask)
    _add_mean(metrics, "clip_share", left_out, inputs.mask)
    return PolicyLoss(zero_outside(-inputs.advantages * ratio, inputs.mask & ~left_out), metrics)


def gspo(inputs: PolicyLossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLoss:
    """Return GSPO (arXiv:2507.18071) in its token form: PPO's clip on s_t = sg(s) exp(logp_t - sg(logp_t)).

    s = exp(mean log-ratio of the response).
    The sequence ratio decides clipping and scale, each token's gradient is weighed by its own advantage; the
    paper aggregates with `seq-mean-token-mean` and clips by about 3e-4 / 4e-4, for s stays close to 1.
    """
    sequence = at_level(inputs.log_ratio.detach(), inputs.mask, "geometric")
    ratio = bounded_exp(sequence + (inputs.logprobs - inputs.logprobs.detach()))
    return _clipped(inputs, ratio, clip_low, clip_high, dual_clip=None)


def decoupled_ppo(
    inputs: PolicyLossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_type: RatioType = "token",
    behave_cap: float | None = None,
) -> PolicyLoss:
    """Return PPO around the proximal policy, times min(pi_prox / pi_behave, behave_cap) (arXiv:2505.24298).

    `old_logprobs` are the proximal policy's, `rollout_logprobs` the behaviour policy's. The clip bounds how far this
    step moves, the weight how much a token counts that older weights sampled; PPO with the behaviour policy in both
    places would clip away what earlier steps have learnt. `behave_cap` None: no cap.
    """
    if inputs.rollout_logprobs is None:
        raise ValueError("policy loss 'decoupled_ppo' needs rollout_logprobs (of the policy that sampled), got none")
    log_weight = inputs.old_logprobs - inputs.rollout_logprobs
    weight = zero_outside(bounded_exp(log_weight), ~log_weight.isnan())  # 0 where both policies give probability 0
    if behave_cap is not None:
        weight = weight.clamp(max=_positive("behave_cap", behave_cap))
    clipped = ppo(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, ratio_type=ratio_type)
    _add_mean(clipped.metrics, "behave_weight_mean", weight, inputs.mask)
    return PolicyLoss(clipped.loss * weight, clipped.metrics)


def cispo(inputs: PolicyLossInputs, *, clip_low: float = 1.0, clip_high: float = 0.28) -> PolicyLoss:
    """Return CISPO: -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logp (arXiv:2506.13585).

    No token loses its gradient. The paper sets no lower bound, which is `clip_low: 1`.
    """
    ratio = bounded_exp(inputs.log_ratio)
    return _weighted_reinforce(inputs, ratio, ratio.clamp(1 - clip_low, 1 + clip_high))


def tis(inputs: PolicyLossInputs, *, lower: float = 0.0, upper: float = 1.0) -> PolicyLoss:
    """Return truncated importance sampling as a policy loss: -sg(clip(rho, lower, upper)) A logp."""
    if not 0 <= lower < upper:
        raise ValueError(f"policy loss 'tis' needs 0 <= lower < upper, got lower={lower}, upper={upper}")
    ratio = bounded_exp(inputs.log_ratio)
    return _weighted_reinforce(inputs, ratio, ratio.clamp(lower, upper))


def topr(
    inputs: PolicyLossInputs,
    *,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
    level: Literal["sequence", "token"] = "sequence",
) -> PolicyLoss:
    """Return tapered off-policy REINFORCE (arXiv:2503.14286): -w sg(taper) A logp.

    The taper is 1 for A >= 0, and for A < 0 the ratio of the whole trajectory, prod_t rho_t, clamped to [0,
    1]. With `level: token` it is each token's own ratio, a different algorithm of the same shape.
    """
    ratio = bounded_exp(at_level(inputs.log_ratio, inputs.mask, level))
    negative = inputs.advantages < 0
    taper = torch.where(negative, negative_weight * ratio.clamp(max=1.0), torch.full_like(ratio, positive_weight))
    return _weighted_reinforce(inputs, ratio, taper)


def reinforce(inputs: PolicyLossInputs) -> PolicyLoss:
    """Return -A logp, the plain policy gradient without any ratio (also the loss of GPG, arXiv:2504.02546)."""
    return _weighted_reinforce(inputs, bounded_exp(inputs.log_ratio), torch.ones_like(inputs.logprobs))


def kimi15(
    inputs: PolicyLossInputs, *, tau: float = 0.1, level: Literal["sequence", "token"] = "sequence"
) -> PolicyLoss:
    """Return Kimi k1.5's mirror descent: -A logp + tau / 2 (log-ratio)^2 (arXiv:2501.12599, equation 3).

    The paper's log-ratio is the whole response's; its square is spread evenly over the response's n tokens,
    so `seq-mean-token-sum` gives the paper's loss. With `level: token` each token has its own square.
    """
    log_ratio = at_level(inputs.log_ratio, inputs.mask, level)
    penalty = tau / 2 * log_ratio.square()
    if level == "sequence":
        penalty = penalty / inputs.mask.sum(1, keepdim=True).clamp(min=1)
    loss = zero_outside(penalty - inputs.advantages * inputs.logprobs, inputs.mask)
    metrics = _ratio_metrics(bounded_exp(inputs.log_ratio), inputs.mask)
    _add_mean(metrics, "kimi15_penalty_mean", penalty, inputs.mask)
    return PolicyLoss(loss, metrics)


def sapo(inputs: PolicyLossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> PolicyLoss:
    """Return SAPO: -A (4 / tau) sigmoid(tau (rho - 1)), tau_pos for A > 0, else tau_neg (arXiv:2511.20347).

    A soft gate instead of a clip: the gradient is that of -A rho at rho = 1 and fades smoothly away from it.
    """
    _positive("tau_pos", tau_pos)
    _positive("tau_neg", tau_neg)
    ratio = bounded_exp(inputs.log_ratio)
    tau = torch.where(inputs.advantages > 0, torch.full_like(ratio, tau_pos), torch.full_like(ratio, tau_neg))
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return PolicyLoss(zero_outside(-inputs.advantages * gate, inputs.mask), _ratio_metrics(ratio, inputs.mask))


def _clipped(
    inputs: PolicyLossInputs, ratio: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    if not 0 < clip_low <= 1 or clip_high <= 0:
        raise ValueError(f"clipping needs 0 < clip_low <= 1 and clip_high > 0, got {clip_low} and {clip_high}")
    plain = -inputs.advantages * ratio
    bounded = -inputs.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    metrics = _ratio_metrics(ratio, inputs.mask)
    _add_mean(metrics, "clip_share", bounded > plain, inputs.mask)
    _add_mean(metrics, "clip_high_share", (bounded > plain) & (inputs.advantages > 0), inputs.mask)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1, got {dual_clip}; null disables it")
        ceiling = -dual_clip * inputs.advantages
        limited = (inputs.advantages < 0) & (loss > ceiling)
        loss = torch.where(limited, ceiling, loss)
        _add_mean(metrics, "dual_clip_share", limited, inputs.mask)
    return PolicyLoss(zero_outside(loss, inputs.mask), metrics)


def _weighted_reinforce(inputs: PolicyLossInputs, ratio: Tensor, weight: Tensor) -> PolicyLoss:
    """Return -sg(weight) A logp."""
    metrics = _ratio_metrics(ratio, inputs.mask)
    _add_mean(metrics, "loss_weight_mean", weight.detach(), inputs.mask)
    loss = -weight.detach() * inputs.advantages * inputs.logprobs
    return PolicyLoss(zero_outside(loss, inputs.mask), metrics)


def _positive(name: str, value: float) -> float:
    if value <= 0:
        raise ValueError(f"{name} must be > 0, got {value}")
    return value


def _add_mean(metrics: Metrics, name: str, values: Tensor, mask: Tensor) -> None:
    metrics.add_mean(f"actor/{name}", masked_sum(values.detach(), mask), mask.sum())


def _ratio_metrics(ratio: Tensor, mask: Tensor) -> Metrics:
    metrics, ratio = Metrics(), ratio.detach()
    _add_mean(metrics, "ratio_mean", ratio, mask)
    if ratio.numel():
        metrics.add_max("actor/ratio_max", torch.where(mask, ratio, -math.inf).amax())
        metrics.add_min("actor/ratio_min", torch.where(mask, ratio, math.inf).amin())
    _add_mean(metrics, "ppo_kl", ratio - 1 - ratio.log(), mask)
    return metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Metrics]:
    """Return 0.5 max((V - R)^2, (clip(V, V_old +- clip) - R)^2) per token, PPO's value clipping, and metrics.

    All tensors are [B, T], and the loss is zero outside `mask`. `clip` None is the plain squared error.
    """
    mask = as_bool(mask)
    for name, tensor in (("old_values", old_values), ("returns", returns), ("mask", mask)):
        require_shape(name, tensor, tuple(values.shape), "[B, T]")
    values = zero_outside(values, mask)
    old, target = zero_outside(old_values.detach(), mask), zero_outside(returns.detach(), mask)
    loss, metrics = (values - target).square(), Metrics()
    if clip is not None:
        _positive("value_clip", clip)
        moved = torch.maximum(torch.minimum(values, old + clip), old - clip)
        limited = (moved - target).square()
        metrics.add_mean("critic/clip_share", masked_sum(limited > loss, mask), mask.sum())
        loss = torch.maximum(loss, limited)
    metrics.add_mean("critic/value_mean", masked_sum(values.detach(), mask), mask.sum())
    return zero_outside(0.5 * loss, mask), metrics


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that knows only the mean.

    None where the returns have no spread. All arguments are [B, T].
    """
    _, spread = masked_moments(returns, mask)
    _, unexplained = masked_moments(returns - values, mask)
    return float(1 - unexplained / spread) if spread > 0 else None


def entropy_loss(entropy: Tensor, mask: Tensor) -> Tensor:
    """Return -entropy per token: minimising it keeps the policy random. [B, T], zero outside `mask`."""
    require_shape("mask", mask, tuple(entropy.shape), "[B, T]")
    return -zero_outside(entropy, mask)


def sft_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return -logp per token: imitate these tokens. [B, T], zero outside `mask`."""
    require_shape("mask", mask, tuple(logprobs.shape), "[B, T]")
    return -zero_outside(logprobs, mask)
