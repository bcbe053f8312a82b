"""What a teacher says of tokens and distributions: numbers by hand, the analytic gradient, float64."""

from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.divergences import reverse_kl, skewed_forward_kl, skewed_reverse_kl, teacher_advantages

P = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
Q = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
HERE = torch.tensor(True)


def test_a_token_is_worth_what_the_teacher_gives_it_more():
    old = torch.tensor([[math.log(0.5), math.log(0.25), -1.0]])
    teacher = torch.tensor([[math.log(0.25), math.log(0.5), -torch.inf]])
    mask = torch.tensor([[True, True, False]])
    assert teacher_advantages(old, teacher, mask)[0].tolist() == pytest.approx([-math.log(2), math.log(2), 0.0])
    with pytest.raises(FloatingPointError, match="teacher or the actor"):
        teacher_advantages(old, teacher, torch.tensor([[True, True, True]]))


def test_the_policy_gradient_of_these_advantages_is_that_of_the_reverse_kl():
    """Summed over every token that may be sampled, by its probability: E[advantage grad log q] = -grad KL(q | p)."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(11, dtype=torch.float64, requires_grad=True), torch.randn(11, dtype=torch.float64)
    student, theirs = logits.log_softmax(0), teacher.log_softmax(0)
    (analytic,) = torch.autograd.grad((student.exp() * (student - theirs)).sum(), logits, retain_graph=True)
    advantages = teacher_advantages(student.detach(), theirs, torch.ones(11, dtype=torch.bool))
    (expected,) = torch.autograd.grad(-(student.detach().exp() * advantages * student).sum(), logits, retain_graph=True)
    torch.testing.assert_close(expected, analytic, rtol=0, atol=1e-12)
    (of_the_loss,) = torch.autograd.grad(reverse_kl(student, theirs, HERE), logits)
    torch.testing.assert_close(of_the_loss, analytic, rtol=0, atol=1e-6)
    by_hand = student.exp() * (student - theirs - (student.exp() * (student - theirs)).sum())
    torch.testing.assert_close(analytic, by_hand.detach(), rtol=0, atol=1e-12)


def test_skewed_divergences_are_those_by_hand():
    """m = 0.5 p + 0.5 q = (3/8, 3/8, 1/4): 1/2 log 4/3 + 1/4 log 2/3 both ways, P and Q being mirrored."""
    expected = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    for divergence in (skewed_forward_kl, skewed_reverse_kl):
        found = divergence(Q.log(), P.log(), HERE, skew=0.5)
        assert float(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("skew", [0.1, 0.9])
def test_skewed_divergences_equal_plain_sums(skew):
    torch.manual_seed(1)
    q, p = torch.randn(2, 5, 9, dtype=torch.float64).softmax(-1)
    mask = torch.tensor([True, True, False, True, True])
    forward = (p * (p / (skew * p + (1 - skew) * q)).log()).sum(-1) * mask
    reverse = (q * (q / (skew * q + (1 - skew) * p)).log()).sum(-1) * mask
    torch.testing.assert_close(skewed_forward_kl(q.log(), p.log(), mask, skew=skew), forward, rtol=0, atol=1e-6)
    torch.testing.assert_close(skewed_reverse_kl(q.log(), p.log(), mask, skew=skew), reverse, rtol=0, atol=1e-6)


def test_skewed_divergences_stay_finite_where_the_kl_is_not():
    p, q = torch.tensor([1.0, 0.0]).log(), torch.tensor([0.0, 1.0]).log().requires_grad_()
    found = skewed_forward_kl(q, p, HERE, skew=0.1)
    found.backward()
    assert float(found) == pytest.approx(math.log(10), abs=1e-4)
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())


def test_a_skew_outside_of_0_and_1_is_refused():
    with pytest.raises(ValueError, match="skew"):
        skewed_reverse_kl(Q.log(), P.log(), HERE, skew=1.0)
