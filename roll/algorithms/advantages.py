"""Advantage estimators: how good was each token (or response) compared with what was to be expected?

The functions take plain tensors and can be called on their own. B rows (responses), T tokens; `action_mask`
is True where the policy chose the token; rows of one prompt share a number in `group_index`. A group whose
members all have the same reward, a group of one included, has advantage 0.

What `adv_estimator` names in YAML are the functions of `roll/algorithms/estimators.py`, which call these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.algorithms.branches import Branches, over_branches
from roll.algorithms.gigpo import StepInputs
from roll.algorithms.groups import batch_index, group_moments, group_sum
from roll.algorithms.masking import as_bool, at_least_float32, masked_sum, require_shape, zero_outside
from roll.algorithms.normalization import normalize_rewards, whiten
from roll.algorithms.turns import at_first_tokens, sum_over_turns, turns_present, turns_to_tokens
from roll.configs.catalog.entries import implementation
from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.types.metrics import Metrics

_CHUNK = 64
"""Tokens that one matrix product sums; the loop runs over chunks."""


def gae(rewards: Tensor, values: Tensor, action_mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Estimate advantages over action tokens by GAE (arXiv:1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}

    t + 1 is the next *action* token: padding and environment replies are stepped over and cost no discount.
    After the last action comes a terminal state of value 0. Returns are A + V, before any whitening. Sums are float64.

    `values` [B, T] are V before token t is chosen. Returns (advantages, returns), both [B, T], zero outside the mask.
    """
    require_shape("values", values, tuple(rewards.shape), "the shape of rewards, [B, T]")
    require_shape("action_mask", action_mask, tuple(rewards.shape), "the shape of rewards, [B, T]")
    mask = as_bool(action_mask)
    rewards, values = at_least_float32(rewards), at_least_float32(values)
    packed = _PackedRows(mask)
    value = packed.pack(values)
    next_value = F.pad(value, (0, 1))[:, 1:]
    delta = packed.pack(rewards) + gamma * next_value - value
    advantages = _discounted_sums(delta, gamma * lam)
    return packed.unpack(advantages, rewards.dtype), packed.unpack(advantages + value, rewards.dtype)


class _PackedRows:
    """Puts the masked entries of [B, T] side by side, [B, n] in float64, and back; n is the longest row's number."""

    def __init__(self, mask: Tensor) -> None:
        self._mask, lengths = mask, mask.sum(1)
        self._width = int(lengths.max()) if len(lengths) else 0
        self._source = mask.flatten().nonzero()[:, 0]
        shift = torch.arange(len(lengths), device=mask.device) * self._width - (lengths.cumsum(0) - lengths)
        ranks = torch.arange(len(self._source), device=mask.device)
        self._target = ranks + shift.repeat_interleave(lengths)

    def pack(self, values: Tensor) -> Tensor:
        """Move the masked entries of [B, T] to [B, n], zeros behind each row's last entry."""
        packed = values.new_zeros(len(self._mask) * self._width, dtype=torch.float64)
        packed.index_copy_(0, self._target, values.flatten()[self._source].to(torch.float64))
        return packed.view(len(self._mask), self._width)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Move [B, n] back to [B, T], zeros outside the mask."""
        values = torch.zeros(self._mask.numel(), dtype=dtype, device=packed.device)
        values[self._source] = packed.flatten()[self._target].to(dtype)
        return values.view(self._mask.shape)


def _discounted_sums(terms: Tensor, factor: float) -> Tensor:
    """Return sum_{s >= t} factor^(s - t) terms_s along each row, [B, n]; chunk by chunk, from right to left."""
    rows, width = terms.shape
    chunks = -(-width // _CHUNK)
    padded = F.pad(terms, (0, chunks * _CHUNK - width)).view(rows, chunks, _CHUNK)
    offset = torch.arange(_CHUNK, device=terms.device)
    distance = offset[:, None] - offset[None, :]
    base = torch.tensor(factor, dtype=terms.dtype, device=terms.device)
    sums = padded @ (base ** distance.clamp(min=0)).tril()
    to_next_chunk = base ** (_CHUNK - offset)
    carried = terms.new_zeros(rows, 1)
    for chunk in reversed(range(chunks)):
        sums[:, chunk] += carried * to_next_chunk
        carried = sums[:, chunk, :1].clone()
    return sums.view(rows, chunks * _CHUNK)[:, :width]


def optimal_token_baseline(
    returns: Tensor,
    gradients: Tensor,
    action_mask: Tensor,
    group_index: Tensor,
    *,
    handle_zero_tail: bool = False,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Subtract from each token's return the group's mean at that place, weighted by gradients so far
    (arXiv:2602.07078):

    B_t = sum_i G_t^i W_t^i / sum_i W_t^i,   W_t = sum_{s <= t} w_s,   w = 1 - 2 p + sum of all p^2

    over the responses i of the group that have a t-th action token. w is the squared length of the gradient of the
    token's log-prob in the logits, so W stands for that of all so far, and B makes the variance of the gradient least.
    Where a response is the only one left there is nothing to compare with, and A is 0; with `handle_zero_tail` B is 0
    there.

    `returns` and `gradients` [B, T]; `row_weights` [B] says how much a row counts in B, None: all alike. Returns
    A = G - B, [B, T], zero outside the mask.
    """
    require_shape("gradients", gradients, tuple(returns.shape), "the shape of returns, [B, T]")
    mask = as_bool(action_mask)
    packed = _PackedRows(mask)
    value, weight = packed.pack(at_least_float32(returns)), packed.pack(gradients).cumsum(1)
    there = packed.pack(torch.ones_like(at_least_float32(returns))) > 0
    _, inverse = torch.unique(group_index, return_inverse=True)
    groups = int(inverse.max()) + 1 if len(inverse) else 0

    def total(of: Tensor) -> Tensor:
        """Return [B, n], the sum over the row's group, of sorted values: the same in any order of the rows."""
        order = of.argsort(dim=0)
        return of.new_zeros(groups, of.shape[1]).scatter_add_(0, inverse[order], of.gather(0, order))[inverse]

    shares = there.double() if row_weights is None else there * row_weights.double()[:, None]
    weight = weight * shares
    # Tokens that were certain have no gradient: then all count alike.
    weight = torch.where(total(weight) > 0, weight, shares)
    count = total(there.double())
    # Relative to the largest, so that equal returns give exactly 0.
    largest = value.new_full((groups, value.shape[1]), -torch.inf)
    candidates = torch.where(there, value, -torch.inf)
    center = largest.scatter_reduce(0, inverse[:, None].expand_as(value), candidates, "amax")[inverse]
    centered = torch.where(there, value - center, 0.0)
    baseline = center + total(weight * centered) / total(weight)
    advantages = torch.where(there, value - baseline, 0.0)
    if handle_zero_tail:
        advantages = torch.where(there & (count == 1), value, advantages)
    return packed.unpack(advantages, at_least_float32(returns).dtype)


def reinforce_return(rewards: Tensor, action_mask: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted reward-to-go over action tokens, G_t = r_t + gamma G_{t+1}; [B, T], zero elsewhere."""
    advantages, _ = gae(rewards, torch.zeros_like(at_least_float32(rewards)), action_mask, gamma=gamma, lam=1.0)
    return advantages


def turn_gae(
    token_rewards: Tensor, values: Tensor, steps: StepInputs, action_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by GAE over turns: gamma and lam act once per turn, however many tokens it has.

    delta_n = r_n + gamma V_{n+1} - V_n,   A_n = delta_n + gamma lam A_{n+1}

    r_n is the sum of the turn's token rewards (undiscounted), V_n the value at its first action token; after the last
    turn comes a terminal state of value 0. Of `steps` only the turns themselves are read.

    Returns (advantages, returns), both [B, T]: all tokens of a turn have its A_n, and its return A_n + V_n, so that a
    critic needs no mask of its own.
    """
    index, turns = steps.turn_index, steps.num_turns
    rewards = sum_over_turns(token_rewards, index, action_mask, turns)
    starts = at_first_tokens(values, index, action_mask, turns)
    advantages, returns = over_branches(
        steps.branches,
        turns_present(index, action_mask, turns),
        lambda rewards, starts, present: gae(rewards, starts, present, gamma=gamma, lam=lam),
        rewards,
        starts,
    )
    return turns_to_tokens(advantages, index, action_mask), turns_to_tokens(returns, index, action_mask)


def turn_return(token_rewards: Tensor, steps: StepInputs, action_mask: Tensor, *, gamma: float) -> Tensor:
    """Return the reward-to-go over turns, G_n = r_n + gamma G_{n+1}; [B, T], the same on all tokens of a turn."""
    values = torch.zeros_like(at_least_float32(token_rewards))
    return turn_gae(token_rewards, values, steps, action_mask, gamma=gamma, lam=1.0)[0]


def grpo(rewards: Tensor, group_index: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return (r - mean_g) / (std_g + eps), unbiased std (arXiv:2402.03300); `rewards`, `group_index` [B] -> [B]."""
    group = group_moments(rewards, group_index)
    return _like((rewards - group.mean) / (group.std + eps), rewards)


def gdpo(parts: Tensor, weights: Tensor, group_index: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return GDPO's advantages (arXiv:2601.05242): each reward normalised in its group by itself, then summed, [B].

    `parts` [B, K] are the rewards of a response, `weights` [B, K] their factors: A = sum_k w_k grpo(r_k), then
    (A - mean) / (std + eps) over the batch. In `grpo` of the sum the part with the largest spread would decide.
    """
    require_shape("weights", weights, tuple(parts.shape), "the shape of parts, [B, K]")
    columns = [weights[:, k] * grpo(parts[:, k], group_index, eps=eps) for k in range(parts.shape[1])]
    total = torch.stack(columns).sum(0)
    return _like(normalize_rewards(total, batch_index(total), mean="batch", std="batch", eps=eps), parts)


def dr_grpo(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Return r - mean_g without the std (arXiv:2503.20783), [B]; its loss goes with `seq-mean-token-sum-norm`."""
    return _like(rewards - group_moments(rewards, group_index).mean, rewards)


def rloo(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Return r_i - mean of the others of the group (arXiv:2402.14740), [B]; 0 in a group of one."""
    group = group_moments(rewards, group_index)
    # r_i - (n mean - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
    return _like((rewards - group.mean) * group.size / (group.size - 1).clamp(min=1), rewards)


def rloo_std(rewards: Tensor, group_index: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return (r_i - mean) / (std + eps), mean and unbiased std of the *others* of the group, [B].

    In `grpo` a response is part of the spread it is measured by, which bounds it by (n - 1) / sqrt(n); here a rare one
    stands out as far as it is rare. Where the others have no spread (all alike, or only one) nothing is divided, as in
    `normalize_rewards`; a group of one has 0. `rewards`, `group_index` are [B].
    """
    _, inverse, size = torch.unique(group_index, return_inverse=True, return_counts=True)
    members = inverse.argsort(stable=True).split(size.tolist())
    pairs = torch.cat([inverse.new_zeros(0, 2), *(torch.cartesian_prod(rows, rows) for rows in members)])
    row, other = pairs[pairs[:, 0] != pairs[:, 1]].unbind(1)
    others = group_moments(rewards[other], row)
    wide = rewards.to(torch.float64)
    mean, std = wide.clone(), torch.zeros_like(wide)
    mean[row], std[row] = others.mean, others.std
    return _like(torch.where(std > 0, (wide - mean) / (std + eps), wide - mean), rewards)


def pass_at_k(rewards: Tensor, group_index: Tensor, *, k: int, threshold: float = 0.5) -> Tensor:
    """Return the advantage of each response when k of its group are drawn and one right answer is enough, [B].

    With N responses, m of them wrong (reward below `threshold`), and R = 1 - C(m, k) / C(N, k), the chance of at least
    one right answer, s = sqrt(R (1 - R)): (1 - R) / s for a right one, (1 - R - C(m - 1, k - 1) / C(N - 1, k - 1)) / s
    for a wrong one (arXiv:2508.10751, analytical form). They add up to 0; a group with R = 0 or 1 has none. A group of
    fewer than k responses is compared as if k were its size.
    """
    if k < 1:
        raise ValueError(f"pass_at_k needs k >= 1, got {k}")
    _, inverse, size = torch.unique(group_index, return_inverse=True, return_counts=True)
    right = rewards >= threshold
    wrong = group_sum((~right).to(torch.float64), inverse, len(size))
    advantage = torch.zeros(len(size), 2, dtype=torch.float64, device=rewards.device)
    for group, (n, m) in enumerate(zip(size.tolist(), wrong.to(torch.int64).tolist(), strict=True)):
        drawn = min(k, n)
        fails = math.comb(m, drawn) / math.comb(n, drawn)
        if 0 < fails < 1:
            spread = math.sqrt(fails * (1 - fails))
            others_fail = math.comb(m - 1, drawn - 1) / math.comb(n - 1, drawn - 1)
            advantage[group, 0], advantage[group, 1] = (fails - others_fail) / spread, fails / spread
    return _like(advantage[inverse, right.long()], rewards)


def best_of_n(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Return 1 / m for the m best responses of a group, 0 for the others and for groups whose rewards are equal, [B].

    With `rl_loss_coef: 0` and `sft_loss_coef: 1` the best responses are learnt as if they were written; ties all are.
    """
    _, inverse = torch.unique(group_index, return_inverse=True)
    best = rewards.new_full((int(inverse.max()) + 1 if len(inverse) else 0,), -torch.inf)
    best = best.scatter_reduce(0, inverse, rewards, "amax")
    worst = torch.full_like(best, torch.inf).scatter_reduce(0, inverse, rewards, "amin")
    chosen = (rewards == best[inverse]) & (best > worst)[inverse]
    shared = group_sum(chosen.to(torch.float64), inverse, len(best)).clamp(min=1)
    return _like(chosen / shared[inverse], rewards)


def length_adaptive_gae(rewards: Tensor, values: Tensor, action_mask: Tensor, *, gamma: float, alpha: float) -> Tensor:
    """Return GAE's advantages with lambda = 1 - 1 / (alpha l), at least 0, for a response of l tokens.

    Long responses carry their reward further back (VAPO, arXiv:2504.05118). All tensors are [B, T].
    """
    if alpha <= 0:
        raise ValueError(f"vapo needs alpha > 0, got {alpha}")
    lengths = as_bool(action_mask).sum(1)
    advantages = torch.zeros_like(at_least_float32(rewards))
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0]
        lam = max(0.0, 1 - 1 / (alpha * length)) if length else 0.0
        advantages[rows] = gae(rewards[rows], values[rows], action_mask[rows], gamma=gamma, lam=lam)[0]
    return advantages


def opo(rewards: Tensor, lengths: Tensor, group_index: Tensor) -> Tensor:
    """Return r - sum(l r) / sum(l), a baseline weighted by length over the group (arXiv:2505.23585).

    `rewards`, `lengths` (action tokens), `group_index` are [B]. A group of empty responses uses the plain mean.
    """
    require_shape("lengths", lengths, tuple(rewards.shape), "[B]")
    _, inverse, size = torch.unique(group_index, return_inverse=True, return_counts=True)
    group, wide = group_moments(rewards, group_index), lengths.to(torch.float64)
    total = group_sum(wide, inverse, len(size))
    weighted = group_sum(wide * rewards, inverse, len(size)) / total.clamp(min=1)
    use_plain = (total[inverse] == 0) | ~group.has_signal
    return _like(rewards - torch.where(use_plain, group.mean, weighted[inverse]), rewards)


def gpg(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Return alpha (r - mean_g), alpha = rows / rows in groups with signal (arXiv:2504.02546), [B].

    The factor makes up for the groups whose members all agree and so add nothing to the batch's gradient.
    """
    group = group_moments(rewards, group_index)
    alpha = rewards.shape[0] / max(int(group.has_signal.sum()), 1)
    return _like(alpha * (rewards - group.mean), rewards)


def reinforce_plus_plus_baseline(rewards: Tensor, action_mask: Tensor, group_index: Tensor) -> Tensor:
    """Return r - mean_g on the action tokens, whitened over the batch (arXiv:2501.03262).

    A group of one has no baseline: it gets 0 and doesn't count in the whitening. `rewards` [B] -> [B, T].
    """
    compared = as_bool(action_mask) & (group_moments(rewards, group_index).size > 1).unsqueeze(1)
    return whiten(to_tokens(dr_grpo(rewards, group_index), action_mask), compared)


def to_tokens(per_row: Tensor, action_mask: Tensor) -> Tensor:
    """Spread [B] to [B, T]: the row's number on each of its action tokens, 0 elsewhere."""
    require_shape("per_row", per_row, (action_mask.shape[0],), "[B]")
    return zero_outside(per_row.unsqueeze(1).expand(action_mask.shape), action_mask)


def _like(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Group statistics are float64; advantages have the precision of the rewards, at least float32."""
    return advantages.to(at_least_float32(rewards).dtype)


DiscountOver = Literal["token", "turn"]


@dataclass(frozen=True, eq=False, kw_only=True)
class AdvantageInputs:
    """What an estimator may use; hyper-parameters that only some estimators read are theirs to ignore."""

    rewards: Tensor
    """[B], after shaping and normalisation."""
    token_rewards: Tensor
    """[B, T], the row's reward on its last action token, or each turn's on the turn's last; minus the KL penalty per
    token when asked for."""
    action_mask: Tensor
    """bool [B, T]"""
    group_index: Tensor
    """int64 [B]"""
    gamma: float = 1.0
    """Discount of `gae`, `reinforce` and `reinforce_plus_plus`, from one action token to the next or from one turn to
    the next."""
    lam: float = 1.0
    """Lambda of `gae`, likewise."""
    discount_over: DiscountOver = "token"
    """What `gamma` and `lam` count in; `turn` needs `steps`."""
    values: Tensor | None = None
    """[B, T], from the critic; `gae` needs them."""
    greedy_rewards: Tensor | None = None
    """[B], reward of the greedy response to the row's prompt; `remax` needs them."""
    parts: Tensor | None = None
    """[B, K], rewards of a response that are compared one by one; `gdpo` needs them."""
    part_weights: Tensor | None = None
    """[B, K], their factors in the sum."""
    logit_gradients: Tensor | None = None
    """[B, T], squared length of the gradient of each token's log-prob in the logits; `optimal_token_baseline` needs
    them."""
    steps: StepInputs | None = None
    """Turns, their rewards and states; `gigpo`, `step_reinforce` and a discount over turns need them."""
    branches: Branches | None = None
    """Of the action tokens, where an episode branches: what goes from token to token has to follow them
    (`over_branches`). None: each row is one sequence."""

    def __post_init__(self) -> None:
        rows, shape = (self.action_mask.shape[0],), tuple(self.action_mask.shape)
        require_shape("rewards", self.rewards, rows, "[B]")
        require_shape("group_index", self.group_index, rows, "[B]")
        require_shape("token_rewards", self.token_rewards, shape, "[B, T]")
        for name in ("values", "logit_gradients"):
            if (tensor := getattr(self, name)) is not None:
                require_shape(name, tensor, shape, "[B, T]")
        broken = (~torch.isfinite(at_least_float32(self.rewards))).nonzero().flatten().tolist()
        if broken:
            raise ValueError(f"rewards of rows {broken[:8]} are not finite; a failed reward is a status: drop the row")

    @property
    def episode_rewards(self) -> Tensor:
        """Return [B], sums of token rewards, KL penalty included, the mean of those of its branches where there are
        some; a row without action tokens has its reward."""
        if self.branches is not None:
            return self.branches.mean_total(self.token_rewards)
        totals = masked_sum(self.token_rewards, self.action_mask, dim=1)
        return torch.where(as_bool(self.action_mask).any(1), totals, self.rewards.to(totals.dtype))

    @property
    def lengths(self) -> Tensor:
        """Return int64 [B], the action tokens per row."""
        return as_bool(self.action_mask).sum(1)


AdvantageFn: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
"""(inputs, *, options...) -> (advantages, returns), both [B, T]."""


def compute_advantages(
    estimator: str | AdvantageFn, inputs: AdvantageInputs, options: Mapping[str, Any] | None = None
) -> tuple[Tensor, Tensor, Metrics]:
    """Run an estimator, given by its name in the catalog or itself, and measure how much signal there was.

    Returns:
        (advantages, returns, metrics); both tensors [B, T] without gradient, zero outside `action_mask`.
    """
    with torch.no_grad():
        if isinstance(estimator, str):
            compute: AdvantageFn = implementation(ESTIMATORS, estimator, key="adv_estimator")
        else:
            compute = estimator
        advantages, returns = compute(inputs, **(options or {}))
    shape = tuple(inputs.action_mask.shape)
    require_shape(f"advantages of {estimator!r}", advantages, shape, "[B, T]")
    require_shape(f"returns of {estimator!r}", returns, shape, "[B, T]")
    dtype = at_least_float32(inputs.token_rewards).dtype  # group statistics are float64; that stays inside
    return advantages.to(dtype), returns.to(dtype), _signal_metrics(advantages, inputs)


def _signal_metrics(advantages: Tensor, inputs: AdvantageInputs) -> Metrics:
    metrics, mask = Metrics(), as_bool(inputs.action_mask)
    group = group_moments(inputs.rewards, inputs.group_index)
    share_of_group = 1 / group.size.to(torch.float64)  # a group's rows add up to 1
    groups = float(share_of_group.sum())
    metrics.add_mean("advantage/zero_signal_share", float((share_of_group * ~group.has_signal).sum()), groups)
    metrics.add_mean("advantage/group_of_one_share", float((group.size == 1).sum()), groups)
    tokens = int(mask.sum())
    if tokens:
        metrics.add_mean("advantage/mean", float(masked_sum(advantages, mask)), tokens)
        metrics.add_max("advantage/max", float(advantages[mask].max()))
        metrics.add_min("advantage/min", float(advantages[mask].min()))
    return metrics
