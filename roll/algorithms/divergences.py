"""Divergences between a student and a teacher over the whole vocabulary, from log-probs of K tokens of it.

Each distribution is taken as K + 1 outcomes: the K tokens, and all others together. For the K tokens' own part that is
exact; joining outcomes can only make a divergence smaller, so this is a lower bound, and with K the whole vocabulary it
is the divergence itself. With p the teacher and q the student:

    forward KL   sum p log(p / q)        reverse KL   sum q log(q / p)
    generalized Jensen-Shannon (arXiv:2306.13649)   beta KL(p | m) + (1 - beta) KL(q | m),  m = beta p + (1 - beta) q
    skewed (arXiv:2402.03898)   KL(p | skew p + (1 - skew) q),  and reverse   KL(q | (1 - skew) p + skew q)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roll.algorithms.masking import require_shape, zero_outside

RESOLUTION = 64
"""Units in the last place of 1 below which the mass of all other tokens is rounding: of float32 7.6e-6. Less counts as
this much, in both distributions; the gradient goes on as if it were."""


def forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return KL(teacher | student) of each position, which distillation from logits minimises.

    Gradients flow into `student_logprobs` only. A token that the first distribution gives probability 0 adds 0; one
    that only the second gives 0 makes the KL infinite.

    Args:
        student_logprobs: [..., K], of the same tokens as the teacher's; no token twice.
        teacher_logprobs: [..., K].
        mask: bool [...].

    Returns:
        [...] in nats, 0 outside `mask`.
    """
    student, teacher = _outcomes(student_logprobs, teacher_logprobs, mask)
    return zero_outside(_kl(teacher, student), mask)


def reverse_kl(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return KL(student | teacher) of each position, which on-policy distillation minimises. See `forward_kl`."""
    student, teacher = _outcomes(student_logprobs, teacher_logprobs, mask)
    return zero_outside(_kl(student, teacher), mask)


def jensen_shannon(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, beta: float = 0.5) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of each position; at most log 2 with `beta` 0.5.

    Divided by beta it goes to the forward KL as beta goes to 0, divided by 1 - beta to the reverse KL towards 1. It is
    always finite. Arguments and result as for `forward_kl`; `beta`, between 0 and 1, is the teacher's share.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta of the Jensen-Shannon divergence must be between 0 and 1, got {beta}")
    student, teacher = _outcomes(student_logprobs, teacher_logprobs, mask)
    possible = (student > -torch.inf) | (teacher > -torch.inf)  # for others logaddexp has no gradient
    student, teacher = zero_outside(student, possible), zero_outside(teacher, possible)
    mean = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    terms = beta * _terms(teacher, mean) + (1 - beta) * _terms(student, mean)
    return zero_outside(zero_outside(terms, possible).sum(-1), mask)


def skewed_forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, skew: float = 0.1) -> Tensor:
    """Return KL(teacher | skew teacher + (1 - skew) student) of each position; finite with `skew` above 0.

    Arguments and result as for `forward_kl`, which it is with `skew` 0.
    """
    student, teacher = _outcomes(student_logprobs, teacher_logprobs, mask)
    return zero_outside(_skewed(teacher, student, skew), mask)


def skewed_reverse_kl(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, skew: float = 0.1) -> Tensor:
    """Return KL(student | skew student + (1 - skew) teacher) of each position. See `skewed_forward_kl`."""
    student, teacher = _outcomes(student_logprobs, teacher_logprobs, mask)
    return zero_outside(_skewed(student, teacher, skew), mask)


def _skewed(p: Tensor, q: Tensor, skew: float) -> Tensor:
    """Return KL(p | skew p + (1 - skew) q) of log-probs."""
    if not 0 < skew < 1:
        raise ValueError(f"skew of the skewed KL must be between 0 and 1, got {skew}")
    possible = (p > -torch.inf) | (q > -torch.inf)  # for others logaddexp has no gradient
    p, q = zero_outside(p, possible), zero_outside(q, possible)
    mixed = torch.logaddexp(p + math.log(skew), q + math.log1p(-skew))
    return zero_outside(_terms(p, mixed), possible).sum(-1)


def _outcomes(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs of K + 1 outcomes each, [..., K + 1]; outside `mask` those of a certain first token."""
    require_shape("teacher_logprobs", teacher, tuple(student.shape), "the shape of student_logprobs")
    require_shape("mask", mask, tuple(student.shape[:-1]), "student_logprobs without its last dimension")
    inside = mask.unsqueeze(-1)
    return _with_rest(zero_outside(student, inside)), _with_rest(zero_outside(teacher.detach(), inside))


def _with_rest(logprobs: Tensor) -> Tensor:
    """Return [..., K] -> [..., K + 1]: the log of what their probabilities leave of 1 comes last."""
    possible = (logprobs > -torch.inf).any(-1, keepdim=True)  # logsumexp of -inf alone has the gradient NaN
    mass = zero_outside(logprobs, possible).logsumexp(-1, keepdim=True).masked_fill(~possible, -torch.inf)
    most = -RESOLUTION * torch.finfo(mass.dtype).eps
    mass = mass - (mass.detach() - most).clamp(min=0)  # not clamp itself, whose gradient is 0
    return torch.cat([logprobs, _log1mexp(mass)], dim=-1)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - e^x) of x < 0, each side of -log 2 by the formula that keeps its digits."""
    near = x > -math.log(2)
    # Both branches are finite for every x, and so are their gradients.
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return _terms(p, q).sum(-1)


def _terms(p: Tensor, q: Tensor) -> Tensor:
    """Return p (log p - log q) of log-probs. Where p is 0 both are made finite first: 0 * inf is NaN, and so its
    gradient."""
    possible = p > -torch.inf
    return zero_outside(p.exp(), possible) * (zero_outside(p, possible) - zero_outside(q, possible))


def teacher_advantages(old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log p_teacher - log p_student of each sampled token, 0 outside `mask`; all [...].

    As advantages, without any discount, their policy gradient is in expectation minus the gradient of the reverse KL of
    each position (on-policy distillation, Lu et al. 2025, thinkingmachines.ai/blog/on-policy-distillation):
    E[grad log q (log p - log q)] = -grad KL(q | p), because E[grad log q] = 0.

    Raises:
        FloatingPointError: a log-prob is infinite or not a number.
    """
    advantages = zero_outside(teacher_logprobs - old_logprobs, mask)
    if not bool(advantages.isfinite().all()):
        raise FloatingPointError(
            "the teacher or the actor gives log-probs of sampled tokens that aren't finite: look at the weights of "
            "both, and at `dtype` of the teacher's model_args"
        )
    return advantages
