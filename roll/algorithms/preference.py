"""Losses of preferences: a response that is liked more than another, or liked or not by itself.

P pairs, B rows. `chosen` and `rejected` are what a pair's responses are compared by: sums over response tokens of
log p - log p_ref, their means per token, or without a reference those of log p. Which one, the entry of a loss in
`roll/configs/catalog/preference_table.py` says.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Compute DPO (arXiv:2305.18290, eq. 7): -log sigmoid(beta d), d = chosen - rejected. [P].

    `label_smoothing` (conservative DPO: labels are wrong with that probability):
    -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d).
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def robust(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Robust DPO (arXiv:2403.00409, eq. 12): unbiased for DPO's loss where labels are flipped at rate s. [P].

    (-(1 - s) log sigmoid(beta d) + s log sigmoid(-beta d)) / (1 - 2 s), s < 1/2.
    """
    margin = beta * (chosen - rejected)
    clean, flipped = -(1 - label_smoothing) * F.logsigmoid(margin), -label_smoothing * F.logsigmoid(-margin)
    return (clean - flipped) / (1 - 2 * label_smoothing)


def hinge(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Compute SLiC's hinge on DPO's margin (arXiv:2309.06657, eq. 11): max(0, 1 - beta d). [P]."""
    return torch.relu(1 - beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Compute IPO (arXiv:2310.12036, eq. 17): (d - 1 / (2 beta))^2, with means per token as its authors use them.
    [P]."""
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float, simpo_gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """Compute SimPO (arXiv:2405.14734, eq. 6): -log sigmoid(beta d - gamma) on mean log-probs, without a reference.
    [P]."""
    margin = beta * (chosen - rejected) - simpo_gamma
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Compute ORPO (arXiv:2403.07691, eq. 6): -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)). [P].

    On mean log-probs, without a reference: the first term teaches the chosen response, odds(p) = p / (1 - p).
    """
    ratio = log_odds(chosen) - log_odds(rejected)
    return -chosen - beta * F.logsigmoid(ratio)


def log_odds(logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = exp(`logprobs`), precise near 0 and 1; infinite at p = 1."""
    # log(1 - exp(x)): each form where the other loses digits (Maechler 2012).
    small = logprobs < -0.6931471805599453
    safe_small, safe_large = torch.where(small, logprobs, -1.0), torch.where(small, -0.5, logprobs)
    rest = torch.where(small, torch.log1p(-safe_small.exp()), torch.log(-torch.expm1(safe_large)))
    return logprobs - rest


def kto(
    log_ratios: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Compute KTO (arXiv:2402.01306, eq. 8): weight (1 - sigmoid(+-beta (log_ratios - baseline))). [B].

    Args:
        log_ratios: [B], sums of log p - log p_ref.
        desirable: [B] bool, the sign: + where true.
        baseline: [B] or [], the policy's KL from the reference, an estimate that isn't below 0; constant.
        beta: aversion to risk.
        desirable_weight: of rows that are desirable.
        undesirable_weight: of the others.
    """
    gain = beta * (log_ratios - baseline.detach())
    weight = torch.where(desirable, desirable_weight, undesirable_weight)
    return weight * (1 - torch.sigmoid(torch.where(desirable, gain, -gain)))


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) of a reward model's scores (arXiv:2307.09288, eq. 2); all [P]."""
    return -F.logsigmoid(chosen - rejected - margin)


def squared_error(scores: Tensor, targets: Tensor) -> Tensor:
    """Return (score - target)^2 of a reward model that learns numbers; all [B]."""
    return (scores - targets) ** 2
