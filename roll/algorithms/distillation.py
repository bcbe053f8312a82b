"""What a teacher's log-probs of the student's own tokens say about each of them."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.masking import zero_outside


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
