"""Parts of the reward other than correctness, and weights and masks of samples.

Each function gives one named part, [B], to be added to the reward and logged on its own, before normalisation.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from roll.algorithms.groups import group_moments
from roll.algorithms.masking import as_bool, at_least_float32, require_shape, zero_outside

PFMethod = Literal["pow", "max_min", "max_random"]


def place_on_last_token(rewards: Tensor, action_mask: Tensor) -> Tensor:
    """Put the row's reward on its last action token, [B] -> [B, T]; 0 elsewhere and in a row without any."""
    mask = as_bool(action_mask)
    require_shape("rewards", rewards, (mask.shape[0],), "[B]")
    later = mask.flip(1).cumsum(1).flip(1)  # action tokens from here on
    return zero_outside(rewards.unsqueeze(1).expand(mask.shape), mask & (later == 1))


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Return DAPO's overlong punishment (arXiv:2503.14476): 0 up to L - c, linear to -1 at L, -1 beyond; [B].

    `max_length` is L, `buffer` is c, 0 < c <= L.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the overlong buffer must be in 1..{max_length} (max_length), got {buffer}")
    excess = at_least_float32(lengths) - (max_length - buffer)
    return -(excess / buffer).clamp(0.0, 1.0)


def length_reward(lengths: Tensor, correct: Tensor, group_index: Tensor) -> Tensor:
    """Return Kimi k1.5's length reward (arXiv:2501.12599), lambda = 0.5 - (l - min_g) / (max_g - min_g); [B].

    A right answer gets lambda, a wrong one min(0, lambda). 0 in a group whose responses are all equally long.
    """
    require_shape("lengths", lengths, tuple(group_index.shape), "[B]")
    require_shape("correct", correct, tuple(group_index.shape), "[B]")
    lengths = at_least_float32(lengths)
    _, inverse, size = torch.unique(group_index, return_inverse=True, return_counts=True)
    empty = lengths.new_zeros(len(size))
    low = empty.scatter_reduce(0, inverse, lengths, "amin", include_self=False)[inverse]
    high = empty.scatter_reduce(0, inverse, lengths, "amax", include_self=False)[inverse]
    spread = high - low
    reward = torch.where(spread > 0, 0.5 - (lengths - low) / spread.clamp(min=1e-6), torch.zeros_like(lengths))
    return torch.where(as_bool(correct), reward, reward.clamp(max=0.0))


def cosine_length_reward(
    lengths: Tensor,
    correct: Tensor,
    *,
    maximum: int,
    right: tuple[float, float],
    wrong: tuple[float, float],
    exceeded: float,
) -> Tensor:
    """Return the cosine reward (arXiv:2502.03373, section 4.2): end + (start - end) (1 + cos(pi l / maximum)) / 2; [B].

    (start, end) is `right` for correct answers, which are best when short, and `wrong` for others, which are best when
    long; a response of `maximum` tokens or more gets `exceeded`.
    """
    require_shape("correct", correct, tuple(lengths.shape), "[B]")
    lengths, good = at_least_float32(lengths), as_bool(correct)
    start, end = (torch.where(good, right[side], wrong[side]).to(lengths) for side in (0, 1))
    value = end + (start - end) * (1 + torch.cos(torch.pi * lengths / maximum)) / 2
    return torch.where(lengths >= maximum, torch.full_like(value, exceeded), value)


def difficulty_weights(difficulty: Tensor) -> Tensor:
    """Return 0.5 + 1.5 * difficulty (clamped to [0, 1]), scaled to mean 1: hard prompts count more; [B]."""
    return mean_one(0.5 + 1.5 * at_least_float32(difficulty).clamp(0.0, 1.0))


def length_weights(lengths: Tensor) -> Tensor:
    """Return 1.5 for the shortest response of the batch, linear to 0.5 for the longest, scaled to mean 1; [B]."""
    lengths = at_least_float32(lengths)
    if lengths.numel() == 0:
        return lengths
    spread = lengths.max() - lengths.min()
    position = (lengths - lengths.min()) / spread if spread > 0 else torch.full_like(lengths, 0.5)
    return mean_one(1.5 - position)


def mean_one(weights: Tensor) -> Tensor:
    """Scale weights >= 0 so that their mean is 1; all zeros stay zeros."""
    weights = at_least_float32(weights)
    total = weights.sum()
    return weights * (weights.numel() / total) if total > 0 else weights


def within_difficulty(scores: Tensor, group_index: Tensor, *, low: float, high: float) -> Tensor:
    """Return bool [B], True for rows of groups with low < mean score < high (`difficulty_mask`)."""
    if not low < high:
        raise ValueError(f"difficulty_mask needs low < high, got {low} and {high}")
    mean = group_moments(scores, group_index).mean
    return (mean > low) & (mean < high)


def mask_long_errors(scores: Tensor, lengths: Tensor, *, max_error_length: int) -> Tensor:
    """Return bool [B], False for a wrong answer (score <= 0) that is too long (`error_max_len_clip`)."""
    require_shape("lengths", lengths, tuple(scores.shape), "[B]")
    return (scores > 0) | (lengths < max_error_length)


def pf_ppo_weights(scores: Tensor, *, method: PFMethod, power: float = 2.0) -> Tensor:
    """Return the sampling weights of PF-PPO (arXiv:2409.06957), scaled to mean 1; [B].

    `pow` |score|^power; `max_min` 1 for the best and the worst scores, else 0; `max_random` 0.4 for the best,
    else 0.1. Where all weights are 0 there is nothing to prefer: all become 1.
    """
    if method not in get_args(PFMethod):
        raise ValueError(f"unknown pf_ppo method {method!r}; expected one of {', '.join(get_args(PFMethod))}")
    scores = at_least_float32(scores)
    if scores.numel() == 0:
        return scores
    best = scores == scores.max()
    if method == "pow":
        weights = scores.abs().pow(power)
    elif method == "max_min":
        weights = (best | (scores == scores.min())).to(scores.dtype)
    else:
        weights = torch.where(best, torch.full_like(scores, 0.4), torch.full_like(scores, 0.1))
    return mean_one(weights) if weights.sum() > 0 else torch.ones_like(weights)


def resample_counts(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw B rows with replacement; return how often each was drawn, float32 [B], as weights of the loss.

    The same as training on the resampled batch, without copies of rows.
    """
    drawn = torch.multinomial(weights, weights.numel(), replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=weights.numel()).to(torch.float32)
