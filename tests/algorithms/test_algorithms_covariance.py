"""Clip-Cov and KL-Cov: covariances and selections by hand, losses and gradients of the selected tokens."""

from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms import losses
from roll.algorithms.covariance import clip_cov, covariances, kl_cov
from roll.algorithms.losses import PolicyLossInputs, ppo

MASK = torch.tensor([True, True, False, True, True])
LOGPROBS = torch.tensor([-1.0, -3.0, 99.0, -2.0, -2.0])  # mean -2
ADVANTAGES = torch.tensor([2.0, -1.0, math.nan, 1.0, 2.0])  # mean 1
COVARIANCES = [1.0, 2.0, -math.inf, 0.0, 0.0]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_covariances_by_hand():
    """(1)(1), (-1)(-2), (0)(0), (0)(1)."""
    assert covariances(LOGPROBS, ADVANTAGES, MASK).tolist() == pytest.approx(COVARIANCES)


def test_the_highest_covariances_are_selected_first_ones_of_equals():
    found = torch.tensor(COVARIANCES)
    assert kl_cov(found, MASK, generator(), cov_ratio=1e-6).tolist() == [False, True, False, False, False]
    assert kl_cov(found, MASK, generator(), cov_ratio=0.5).tolist() == [True, True, False, False, False]
    assert kl_cov(found, MASK, generator(), cov_ratio=0.75).tolist() == [True, True, False, True, False]
    assert not kl_cov(found, torch.zeros(5, dtype=torch.bool), generator(), cov_ratio=0.5).any()


def test_tokens_between_the_bounds_are_drawn_by_chance():
    found, mask = torch.linspace(0, 10, 1001), torch.ones(1001, dtype=torch.bool)
    chosen = clip_cov(found, mask, generator(), cov_ratio=0.1, cov_low=1.0, cov_high=5.0)
    assert int(chosen.sum()) == 100
    assert bool(((found[chosen] > 1) & (found[chosen] < 5)).all())
    assert torch.equal(chosen, clip_cov(found, mask, generator(), cov_ratio=0.1, cov_low=1.0, cov_high=5.0))
    assert not torch.equal(chosen, clip_cov(found, mask, generator(1), cov_ratio=0.1, cov_low=1.0, cov_high=5.0))
    few = clip_cov(found, mask, generator(), cov_ratio=0.1, cov_low=4.9, cov_high=5.0)
    assert 5 <= int(few.sum()) <= 10
    assert not clip_cov(found, mask, generator(), cov_ratio=0.1, cov_low=20, cov_high=30).any()


def inputs(selected):
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.1, -1.9, -3.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -2.0]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    return PolicyLossInputs(
        logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask, selected=selected
    ), logprobs


def test_a_selected_token_of_clip_cov_has_neither_loss_nor_gradient():
    given, logprobs = inputs(torch.tensor([[True, False, False]]))
    found = losses.clip_cov(given)
    plain = ppo(given)
    assert found.loss[0].tolist() == pytest.approx([0.0, *plain.loss[0, 1:].tolist()])
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient[0].tolist() == pytest.approx([0.0, -math.exp(-0.1), 2.0])
    assert found.metrics.result()["actor/cov_share"] == pytest.approx(1 / 3)


def test_a_selected_token_of_kl_cov_pays_for_the_distance():
    given, logprobs = inputs(torch.tensor([[True, True, False]]))
    found = losses.kl_cov(given, kl_coef=0.5)
    assert found.loss[0].tolist() == pytest.approx([-math.exp(0.1) + 0.05, -math.exp(-0.1) + 0.05, 2.0])
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient[0].tolist() == pytest.approx([-math.exp(0.1) + 0.5, -math.exp(-0.1) - 0.5, 2.0])


def test_without_a_selection_no_token_is_treated_apart():
    given, _ = inputs(None)
    torch.testing.assert_close(losses.clip_cov(given).loss, ppo(given).loss)
    torch.testing.assert_close(losses.kl_cov(given).loss, losses.kl_cov(given, kl_coef=0.0).loss)
