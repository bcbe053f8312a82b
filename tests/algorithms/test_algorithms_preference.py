"""Losses of preferences: numbers by hand, the published formulas in plain floats, gradients by differences."""

from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms import preference
from roll.configs.catalog.entries import implementation
from roll.configs.catalog.preference_table import PREFERENCE_LOSSES, preference_loss_of

LN3 = math.log(3)


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


# sigmoid(ln 3) = 3/4 and sigmoid(-ln 3) = 1/4, so every loss below is a sum of ln(3/4) = -0.287682 and
# ln(1/4) = -1.386294.
BY_HAND = {
    # beta d = 0.5 x (ln 3 - -ln 3) = ln 3
    "sigmoid": (preference.sigmoid, LN3, -LN3, {"beta": 0.5}, 0.287682),
    # -0.75 ln(3/4) - 0.25 ln(1/4) = 0.215762 + 0.346574
    "smoothed": (preference.sigmoid, LN3, -LN3, {"beta": 0.5, "label_smoothing": 0.25}, 0.562335),
    # (-0.75 ln(3/4) + 0.25 ln(1/4)) / 0.5 = (0.215762 - 0.346574) / 0.5
    "robust": (preference.robust, LN3, -LN3, {"beta": 0.5, "label_smoothing": 0.25}, -0.261624),
    "hinge, far enough": (preference.hinge, 3.0, 0.0, {"beta": 0.5}, 0.0),
    # 1 - 0.5 x (1 - 2)
    "hinge, wrong way": (preference.hinge, 1.0, 2.0, {"beta": 0.5}, 1.5),
    # (1.5 - 1 / (2 x 0.25))^2
    "ipo": (preference.ipo, 2.0, 0.5, {"beta": 0.25}, 0.25),
    # 2 x ln 3 - ln 3 = ln 3
    "simpo": (preference.simpo, LN3, 0.0, {"beta": 2.0, "simpo_gamma": LN3}, 0.287682),
    # p = 3/4 and 1/4: odds 3 and 1/3, ratio 9; -ln(3/4) + 0.5 ln(10/9) = 0.287682 + 0.052680
    "orpo": (preference.orpo, math.log(0.75), math.log(0.25), {"beta": 0.5}, 0.340362),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_pair_has_the_loss_worked_out_by_hand(name):
    loss, chosen, rejected, options, expected = BY_HAND[name]
    assert float(loss(one(chosen), one(rejected), **options)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("desirable", "expected"), [(True, 2.0 * 0.25), (False, 4.0 * 0.75)])
def test_kto_weighs_a_gain_or_a_loss_against_the_kl(desirable, expected):
    # beta (ratio - kl) = 0.5 x (2 ln 3 + 1 - 1) = ln 3: 1 - 3/4 where that is wanted, 1 - 1/4 where it isn't.
    options = {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 4.0}
    loss = preference.kto(one(2 * LN3 + 1), torch.tensor([desirable]), torch.tensor(1.0), **options)
    assert float(loss) == pytest.approx(expected, abs=1e-9)


def test_a_reward_model_asks_for_the_margin_and_for_the_target():
    # 2 ln 3 - 0 - ln 3 = ln 3
    assert float(preference.bradley_terry(one(2 * LN3), one(0.0), one(LN3))) == pytest.approx(0.287682, abs=1e-6)
    assert float(preference.squared_error(one(1.5), one(-0.5))) == 4.0


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def published(name: str, c: float, r: float) -> float:
    """The papers' formulas in Python's floats, written with probabilities and not with log-sigmoids."""
    beta, s, gamma = OPTIONS["beta"], OPTIONS["label_smoothing"], OPTIONS["simpo_gamma"]
    p = sigmoid(beta * (c - r))
    match name:
        case "sigmoid" | "sigmoid_norm":
            return -(1 - s) * math.log(p) - s * math.log(1 - p)
        case "robust":
            return (-(1 - s) * math.log(p) + s * math.log(1 - p)) / (1 - 2 * s)
        case "hinge":
            return max(0.0, 1 - beta * (c - r))
        case "ipo":
            return (c - r - 1 / (2 * beta)) ** 2
        case "simpo":
            p = sigmoid(beta * c - beta * r - gamma)
            return -(1 - s) * math.log(p) - s * math.log(1 - p)
        case _:
            odds = [math.exp(x) / (1 - math.exp(x)) for x in (c, r)]
            return -c - beta * math.log(sigmoid(math.log(odds[0] / odds[1])))


OPTIONS = {"beta": 0.7, "label_smoothing": 0.2, "simpo_gamma": 0.4}
PAIRED = [name for name, entry in PREFERENCE_LOSSES.items() if entry.pairs]


def options_of(name: str) -> dict[str, float]:
    return {option: OPTIONS[option] for option in PREFERENCE_LOSSES[name].options}


@pytest.mark.parametrize("name", PAIRED)
def test_every_loss_of_pairs_is_the_published_one_in_float64(name):
    loss = implementation(PREFERENCE_LOSSES, name, key="loss_type")
    draw = torch.Generator().manual_seed(0)
    chosen, rejected = -3 * torch.rand(2, 50, generator=draw, dtype=torch.float64) - 0.01
    found = loss(chosen, rejected, **options_of(name)).tolist()
    expected = [published(name, c, r) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", PAIRED)
def test_every_gradient_is_that_of_differences(name):
    loss = implementation(PREFERENCE_LOSSES, name, key="loss_type")
    draw = torch.Generator().manual_seed(1)
    pair = [(-3 * torch.rand(20, generator=draw, dtype=torch.float64) - 0.01).requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(lambda c, r: loss(c, r, **options_of(name)), pair)


def test_the_gradient_of_kto_is_that_of_differences_and_leaves_the_kl_alone():
    options = {"beta": 0.7, "desirable_weight": 1.3, "undesirable_weight": 0.8}
    ratios = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    liked, kl = torch.arange(9) % 2 == 0, torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: preference.kto(x, liked, kl, **options), ratios)
    preference.kto(ratios, liked, kl, **options).sum().backward()
    assert kl.grad is None


def test_log_odds_keep_their_digits_near_zero_and_one():
    found = preference.log_odds(torch.tensor([-1e-12, -1e-3, -0.6, -0.8, -40.0], dtype=torch.float64))
    # log p - log(1 - p); for p near 1, 1 - p is -log p to first order.
    expected = [-1e-12 - math.log(1e-12), -1e-3 - math.log(-math.expm1(-1e-3))]
    expected += [x - math.log(1 - math.exp(x)) for x in (-0.6, -0.8)] + [-40.0]
    assert found.tolist() == pytest.approx(expected, rel=1e-10)


def test_a_certain_pair_has_a_finite_gradient():
    extreme = torch.tensor([800.0, -800.0], dtype=torch.float64, requires_grad=True)
    preference.sigmoid(extreme, torch.zeros(2, dtype=torch.float64), beta=1.0, label_smoothing=0.1).sum().backward()
    assert extreme.grad is not None and bool(extreme.grad.isfinite().all())
    tiny = torch.tensor([-1e-7, -1.0], dtype=torch.float32, requires_grad=True)
    preference.orpo(tiny, torch.tensor([-2.0, -1e-7]), beta=0.1).sum().backward()
    assert tiny.grad is not None and bool(tiny.grad.isfinite().all())


def test_a_loss_of_ones_own_compares_sums_of_log_ratios_of_pairs():
    entry = preference_loss_of("mine.py:loss")
    assert (entry.pairs, entry.reference, entry.per_token) == (True, True, False)
