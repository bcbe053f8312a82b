"""Data of older weights: every correction gives the gradient it promises, and solves the toys of `..._toy.py`.

The bandit's one token comes from the table of four updates ago. In the corridor new weights arrive while a response is
on its way: its three tokens are four, two and no updates old.
"""

from __future__ import annotations

import math

import pytest
import torch
from algorithms_reference import draw
from test_algorithms_toy import GROUP, ROWS, Bandit, Corridor
from torch.testing import assert_close
from whole_batch import aggregate_whole, policy_loss, token_rewards

from roll.algorithms.advantages import AdvantageInputs, compute_advantages
from roll.algorithms.corrections import Filter, correct
from roll.algorithms.losses import PolicyLossInputs

CORRECTIONS = {
    "decoupled": {"loss": "decoupled_ppo", "behave_cap": 5.0},
    "token weight": {"loss": "ppo", "weight_level": "token"},
    "segment weight": {"loss": "ppo", "weight_level": "segment"},
    "geometric weight": {"loss": "ppo", "weight_level": "geometric"},
    "sequence weight": {"loss": "ppo", "weight_level": "sequence"},
    "ratio filter": {"loss": "ppo", "filters": (Filter("token", 0.5, 2.0),)},
    "difference filter": {"loss": "ppo", "filters": (Filter("token", -0.5, 0.5, on="difference"),)},
    "weight and filter": {"loss": "ppo", "weight_level": "sequence", "filters": (Filter("geometric", 0.2, 5.0),)},
    "tis": {"loss": "tis", "old": "sampled"},
    "topr": {"loss": "topr", "old": "sampled"},
    "cispo": {"loss": "cispo", "old": "sampled"},
}


def train(task, lags, steps, *, loss, old="proximal", weight_level=None, filters=(), seed=0, epochs=1, **options):
    """The chance of a reward under the last policy; token t of a response is from the table of `lags[t]` steps ago."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(task.states, task.actions, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=8.0)
    mask = torch.ones(ROWS, task.width, dtype=torch.bool)
    tables = []
    for step in range(steps):
        tables.append(logits.detach().log_softmax(-1))
        versions = [max(0, step - lag) for lag in lags]
        past = iter(versions)
        states, actions = task.walk(
            lambda s: torch.multinomial(tables[next(past)][s].exp(), 1, generator=generator)[:, 0]  # noqa: B023
        )
        sampled = torch.stack([tables[v][states[:, t], actions[:, t]] for t, v in enumerate(versions)], 1)
        proximal, rewards = tables[-1][states, actions], task.rewards(actions)
        advantages, _, _ = compute_advantages(
            "dr_grpo",
            AdvantageInputs(
                rewards=rewards,
                token_rewards=token_rewards(rewards, mask),
                action_mask=mask,
                group_index=torch.arange(ROWS) // GROUP,
            ),
        )
        found = correct(
            proximal,
            sampled,
            mask,
            weight_level=weight_level,
            filters=filters,
            versions=torch.tensor(versions).expand(mask.shape),
        )
        for _ in range(epochs):
            inputs = PolicyLossInputs(
                logprobs=logits.log_softmax(-1)[states, actions],
                old_logprobs=sampled if old == "sampled" else proximal,
                advantages=advantages,
                mask=found.keep,
                rollout_logprobs=sampled,
            )
            per_token = policy_loss(loss, inputs, options).loss * found.weights
            optimizer.zero_grad()
            aggregate_whole(per_token, found.keep, mode="token-mean").backward()
            optimizer.step()
    right = logits.detach().softmax(-1)
    return float(right[0, 2]) if task.width == 1 else float(right[0, 1] * right[1, 1] * right[2, 1])


@pytest.mark.parametrize(("task", "lags"), [(Bandit(), (4,)), (Corridor(), (4, 2, 0))])
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("epochs", [1, 2])
def test_every_correction_solves_the_toys_from_data_four_updates_old(task, lags, name, epochs):
    # The first policy is right with a chance of 1/4 and 1/8.
    assert train(task, lags, 25, epochs=epochs, **CORRECTIONS[name]) > 0.93


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clipping_around_the_behaviour_policy_is_slower_than_around_the_proximal_one(seed):
    # Tokens that eight updates have made more probable are beyond the clip already: they teach nothing any more.
    lags = (8, 8, 8)
    decoupled = train(Corridor(), lags, 15, seed=seed, **CORRECTIONS["decoupled"])
    around_behaviour = train(Corridor(), lags, 15, seed=seed, loss="ppo", old="sampled")
    assert decoupled > 0.75
    assert around_behaviour < 0.6


# ---- the exact gradient --------------------------------------------------------------------------------


def all_responses(task):
    """States, actions and rewards of every possible response, with the tables that each token is drawn from."""
    if task.width == 1:
        actions = torch.arange(task.actions)[:, None]
        return torch.zeros_like(actions), actions
    actions = torch.cartesian_prod(*[torch.arange(2)] * 3)
    states, position = [], torch.zeros(len(actions), dtype=torch.int64)
    for t in range(3):
        states.append(position)
        position = (position + 2 * actions[:, t] - 1).clamp(0, 3)
    return torch.stack(states, 1), actions


def expected_gradient(task, loss, *, weight_level=None, old="proximal", mixed=True, **options):
    """(gradient of the expected reward, minus that of the expected loss under the sampler), by the logits."""
    states, actions = all_responses(task)
    rewards = task.rewards(actions).double() - 0.3  # a constant moves neither, if the estimate is unbiased
    logits = draw(3, task.states, task.actions).requires_grad_()
    # The last table that samples is the policy itself: a response that new weights have finished.
    past = [draw(4 + t, task.states, task.actions).log_softmax(-1) for t in range(task.width)]
    if mixed and task.width > 1:
        past[-1] = logits.detach().log_softmax(-1)
    sampled = torch.stack([past[t][states[:, t], actions[:, t]] for t in range(task.width)], 1)
    logprobs = logits.log_softmax(-1)[states, actions]
    (wanted,) = torch.autograd.grad((logprobs.sum(1).exp() * rewards).sum(), logits, retain_graph=True)
    mask = torch.ones_like(actions, dtype=torch.bool)
    proximal = logprobs.detach()
    found = correct(proximal, sampled, mask, weight_level=weight_level, weight_cap=math.inf)
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=sampled if old == "sampled" else proximal,
        advantages=rewards,
        mask=mask,
        rollout_logprobs=sampled,
    )
    per_token = policy_loss(loss, inputs, options).loss * found.weights
    (slope,) = torch.autograd.grad((sampled.sum(1).exp()[:, None] * per_token).sum(), logits)
    return wanted, -slope


EXACT = [
    (Bandit(), {"loss": "decoupled_ppo"}),
    (Bandit(), {"loss": "tis", "old": "sampled", "upper": 1e9}),
    (Bandit(), {"loss": "cispo", "old": "sampled", "clip_high": 1e9}),
    *[(Bandit(), {"loss": "ppo", "weight_level": level}) for level in ("token", "segment", "geometric", "sequence")],
    (Corridor(), {"loss": "ppo", "weight_level": "sequence"}),
    (Corridor(), {"loss": "reinforce", "weight_level": "sequence"}),
]


@pytest.mark.parametrize(("task", "keys"), EXACT)
def test_without_a_cap_the_expected_gradient_over_old_data_is_that_of_the_reward(task, keys):
    wanted, found = expected_gradient(task, **keys)
    assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task", [Bandit(), Corridor()])
@pytest.mark.parametrize("keys", [{"loss": "ppo"}, {"loss": "reinforce"}, {"loss": "ppo", "old": "sampled"}])
def test_without_a_correction_it_is_another_one(task, keys):
    wanted, found = expected_gradient(task, **keys)
    assert float((found - wanted).norm() / wanted.norm()) > 0.1


def test_weights_of_single_tokens_leave_out_how_the_response_got_there():
    # What the other tokens' ratios would say is missing: a bias that grows with the length, for less variance.
    wanted, found = expected_gradient(Corridor(), "ppo", weight_level="token")
    assert float((found - wanted).norm() / wanted.norm()) > 0.05
