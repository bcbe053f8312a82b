"""Divergences over the vocabulary from K tokens of it: hand-worked, against loops in float64, and their properties."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from algorithms_reference import SEEDS, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.divergences import forward_kl, jensen_shannon, reverse_kl

QUICK = settings(max_examples=25, deadline=None, derandomize=True)
KINDS = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "js": jensen_shannon,
    "js 0.1": functools.partial(jensen_shannon, beta=0.1),
}


def kl_by_loop(p, q):
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def js_by_loop(p, q, beta):
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl_by_loop(p, m) + (1 - beta) * kl_by_loop(q, m)


LOOPS = {
    "forward": lambda student, teacher: kl_by_loop(teacher, student),
    "reverse": kl_by_loop,
    "js": lambda student, teacher: js_by_loop(teacher, student, 0.5),
    "js 0.1": lambda student, teacher: js_by_loop(teacher, student, 0.1),
}


def one(kind, student, teacher, k=None):
    """The divergence of two lists of probabilities, of which the first k tokens are given."""
    given_logprobs = [torch.tensor(p[:k], dtype=torch.float64).log()[None] for p in (student, teacher)]
    return float(KINDS[kind](*given_logprobs, torch.tensor([True])))


def distributions(seed, vocabulary, scale=2.0):
    """Logits [4, V] of a student and a teacher."""
    return draw(seed, 4, vocabulary, scale=scale), draw(seed + 1, 4, vocabulary, scale=scale)


def at(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids)


def top(logits, k):
    return logits.topk(k).indices


EVERYWHERE = torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "k", "expected"),
    [
        # student 1/4, 1/4, 1/2; teacher 1/2, 1/4, 1/4. Of one token: (1/4, 3/4) and (1/2, 1/2).
        ("forward", 3, 0.25 * math.log(2)),
        ("forward", 1, 0.5 * math.log(4 / 3)),
        ("reverse", 3, 0.25 * math.log(2)),
        ("reverse", 1, 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)),
        ("js", 3, 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
    ],
)
def test_hand_worked_numbers(kind, k, expected):
    assert one(kind, [0.25, 0.25, 0.5], [0.5, 0.25, 0.25], k) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS, vocabulary=st.integers(2, 9), k=st.integers(1, 9))
@QUICK
def test_values_equal_a_loop_over_the_outcomes_and_more_tokens_never_make_it_smaller(kind, seed, vocabulary, k):
    k = min(k, vocabulary)
    student, teacher = distributions(seed, vocabulary)
    ids = top(teacher, vocabulary)
    found = KINDS[kind](at(student, ids[:, :k]), at(teacher, ids[:, :k]), EVERYWHERE)
    whole = KINDS[kind](at(student, ids), at(teacher, ids), EVERYWHERE)
    for row in range(4):
        joined = []
        for logits in (student, teacher):
            p = at(logits, ids)[row].exp().tolist()
            joined.append([*p[:k], math.fsum(p[k:])])
        assert float(found[row]) == pytest.approx(LOOPS[kind](*joined), rel=1e-9, abs=1e-12)
    assert (found >= -1e-12).all()
    assert (found <= whole + 1e-12).all()
    tables = (at(logits, ids).exp().tolist() for logits in (student, teacher))
    full = [LOOPS[kind](a, b) for a, b in zip(*tables, strict=True)]
    assert_close(whole, torch.tensor(full, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS, k=st.integers(1, 6))
@QUICK
def test_equal_distributions_have_none_and_no_gradient(kind, seed, k):
    logits = draw(seed, 4, 6).requires_grad_()
    ids = top(logits, k)
    found = KINDS[kind](at(logits, ids), at(logits, ids), EVERYWHERE)
    assert found.abs().max() < 1e-12
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert slope.abs().max() < 1e-9


@given(seed=SEEDS, k=st.integers(1, 6), scale=st.sampled_from([0.1, 1.0, 30.0]))
@QUICK
def test_jensen_shannon_is_symmetric_and_bounded_by_log_2(seed, k, scale):
    student, teacher = distributions(seed, 6, scale)
    ids = top(teacher, k)
    found = jensen_shannon(at(student, ids), at(teacher, ids), EVERYWHERE)
    assert_close(jensen_shannon(at(teacher, ids), at(student, ids), EVERYWHERE), found)
    assert (found <= math.log(2) + 1e-9).all()


@given(seed=SEEDS)
@QUICK
def test_jensen_shannon_goes_to_the_forward_and_the_reverse_kl(seed):
    student, teacher = distributions(seed, 5, 1.0)
    ids = top(teacher, 3)
    pair = at(student, ids), at(teacher, ids), EVERYWHERE
    assert_close(jensen_shannon(*pair, beta=1e-6) / 1e-6, forward_kl(*pair), rtol=1e-3, atol=1e-6)
    assert_close(jensen_shannon(*pair, beta=1 - 1e-6) / 1e-6, reverse_kl(*pair), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_torchs_numerical_check(kind, k):
    student, teacher = distributions(5, 6)
    ids = top(teacher, k)
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: KINDS[kind](at(z, ids), at(teacher, ids), EVERYWHERE), student)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_over_a_large_vocabulary_equals_the_whole_divergence(kind):
    # The mass of "all others" is rounding there; neither the value nor the gradient may feel it.
    student, teacher = distributions(7, 20_000, 4.0)
    ids = torch.arange(20_000).expand(4, -1)
    exact, logits = student.clone().requires_grad_(), student.float().requires_grad_()
    want = KINDS[kind](at(exact, ids), at(teacher, ids), EVERYWHERE)
    (slope,) = torch.autograd.grad(want.sum(), exact)
    found = KINDS[kind](at(logits, ids), at(teacher.float(), ids), EVERYWHERE)
    (rough,) = torch.autograd.grad(found.sum(), logits)
    assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    assert_close(rough.double(), slope, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_sure_of_the_given_tokens_is_still_pulled_to_the_others(kind):
    # The teacher gives the two tokens 0.6, the student all but 1e-9: the third logit must want to rise.
    teacher = torch.tensor([[0.3, 0.3, 0.4]]).log()
    logits = torch.tensor([[0.0, 0.0, -21.0]], requires_grad=True)
    ids = torch.tensor([[0, 1]])
    value = KINDS[kind](at(logits, ids), at(teacher, ids), torch.tensor([True]))
    (slope,) = torch.autograd.grad(value.sum(), logits)
    assert value.isfinite().all() and slope.isfinite().all()
    assert float(slope[0, 2]) < 0


def test_impossible_tokens():
    never, half = torch.tensor([[-math.inf, 0.0]]), torch.tensor([[0.5, 0.5]]).log()
    both = torch.tensor([[-math.inf, math.log(0.5), math.log(0.5)]])
    here = torch.tensor([True])
    assert float(forward_kl(half, never, here)) == pytest.approx(math.log(2), rel=1e-4)
    assert float(reverse_kl(half, never, here)) == math.inf
    assert float(forward_kl(never, half, here)) == math.inf
    student = half.clone().requires_grad_()
    value = jensen_shannon(student, never, here)
    value.backward()
    assert float(value.detach()) == pytest.approx(0.5 * math.log(4 / 3) + 0.25 * math.log(4 / 3), rel=1e-2)
    assert student.grad.isfinite().all()
    for kind in KINDS.values():
        student = both.clone().requires_grad_()
        value = kind(student, both, here)
        value.backward()
        assert float(value.detach()) == pytest.approx(0.0, abs=1e-6)
        assert student.grad.isfinite().all()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_outside_the_mask_stays_there(kind, junk):
    student, teacher = (at(logits, torch.arange(3).expand(4, 3)) for logits in distributions(1, 5))
    mask = torch.tensor([True, False, True, False])
    poisoned = student.masked_fill(~mask[:, None], junk).requires_grad_()
    found = KINDS[kind](poisoned, teacher.masked_fill(~mask[:, None], junk), mask)
    found.sum().backward()
    assert_close(found, KINDS[kind](student, teacher, EVERYWHERE) * mask)
    assert poisoned.grad.isfinite().all()
    assert (poisoned.grad[~mask] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_all_impossible_leave_everything_to_the_others(kind):
    student = torch.full((1, 2), -math.inf, requires_grad=True)
    found = KINDS[kind](student, torch.full((1, 2), -math.inf), torch.tensor([True]))
    found.sum().backward()
    assert found.tolist() == pytest.approx([0.0], abs=1e-7)
    assert (student.grad == 0).all()


def test_no_gradient_reaches_the_teacher_and_half_precision_is_upcast():
    student, teacher = (at(logits, torch.arange(3).expand(4, 3)).bfloat16() for logits in distributions(1, 5))
    teacher.requires_grad_()
    found = forward_kl(student, teacher, EVERYWHERE)
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_wrong_shapes_and_shares_are_refused():
    table, here = torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="teacher_logprobs has shape"):
        forward_kl(table, torch.zeros(2, 4), here)
    with pytest.raises(ValueError, match="mask has shape"):
        reverse_kl(table, table, torch.ones(2, 3, dtype=torch.bool))
    for beta in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            jensen_shannon(table, table, here, beta=beta)
