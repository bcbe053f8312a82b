"""Regression case 15: every estimator and every loss solves two tiny tasks; the same seed gives the same curve.

A bandit of four arms (one token) and a corridor in which three steps to the right must be taken (three tokens). The
policy is a table of logits, so a run takes a fraction of a second.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import one_hot
from whole_batch import aggregate_whole, policy_loss, token_rewards

from roll.algorithms.advantages import AdvantageInputs, compute_advantages
from roll.algorithms.gigpo import StepInputs
from roll.algorithms.losses import PolicyLossInputs, value_loss
from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.catalog.loss_table import LOSSES

PROMPTS, GROUP = 8, 8
ROWS = PROMPTS * GROUP


class Bandit:
    """One state, four arms, arm 2 pays."""

    states, actions, width = 1, 4, 1

    def rewards(self, actions):
        return (actions[:, 0] == 2).float()

    def walk(self, policy):
        return torch.zeros(ROWS, 1, dtype=torch.int64), policy(torch.zeros(ROWS, dtype=torch.int64))[:, None]


class Corridor:
    """Positions 0 to 3; each of three steps goes left or right; being at 3 in the end pays."""

    states, actions, width = 4, 2, 3

    def rewards(self, actions):
        return (actions.sum(1) == 3).float()

    def walk(self, policy):
        position, states, actions = torch.zeros(ROWS, dtype=torch.int64), [], []
        for _ in range(3):
            chosen = policy(position)
            states.append(position)
            actions.append(chosen)
            position = (position + 2 * chosen - 1).clamp(0, 3)
        return torch.stack(states, 1), torch.stack(actions, 1)


def train(task, estimator, loss_name, steps, seed=0):
    """Expected reward estimate per step, under a table policy trained with Adam, two passes over each batch."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(task.states, task.actions, requires_grad=True)
    critic = torch.zeros(task.states, requires_grad=True)
    optimizer = torch.optim.Adam([logits, critic], lr=0.2)
    mask = torch.ones(ROWS, task.width, dtype=torch.bool)
    curve = []
    for _ in range(steps):
        table = logits.detach()
        states, actions = task.walk(lambda s: torch.multinomial(table[s].softmax(-1), 1, generator=generator)[:, 0])  # noqa: B023
        _, greedy = task.walk(lambda s: table[s].argmax(-1))  # noqa: B023
        rewards, values = task.rewards(actions), critic.detach()[states]
        placed = token_rewards(rewards, mask)
        advantages, returns, _ = compute_advantages(
            estimator,
            AdvantageInputs(
                rewards=rewards,
                token_rewards=placed,
                action_mask=mask,
                group_index=torch.arange(ROWS) // GROUP,
                values=values,
                greedy_rewards=task.rewards(greedy),
                logit_gradients=(table.softmax(-1)[states] - one_hot(actions, task.actions)).square().sum(-1),
                steps=StepInputs(
                    turn_index=torch.arange(task.width).expand(ROWS, task.width),
                    turn_rewards=placed,
                    state_index=states,
                ),
            ),
        )
        old = table.log_softmax(-1)[states, actions]
        for _ in range(2):
            inputs = PolicyLossInputs(
                logprobs=logits.log_softmax(-1)[states, actions],
                old_logprobs=old,
                advantages=advantages,
                mask=mask,
                rollout_logprobs=old,
            )
            value, _ = value_loss(critic[states], values, returns, mask, clip=0.5)
            per_token = policy_loss(loss_name, inputs).loss + value
            optimizer.zero_grad()
            aggregate_whole(per_token, mask, mode="token-mean").backward()
            optimizer.step()
        curve.append(rewards.mean())
    return torch.stack(curve)


TASKS = {"bandit": (Bandit(), 30), "corridor": (Corridor(), 30)}


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_15_every_estimator_solves_the_toys(task, estimator):
    curve = train(TASKS[task][0], estimator, "ppo", TASKS[task][1])
    assert curve[:3].mean() < 0.5
    assert curve[-3:].mean() > 0.9


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_15_every_loss_solves_the_toys(task, loss):
    curve = train(TASKS[task][0], "grpo", loss, TASKS[task][1])
    assert curve[:3].mean() < 0.5
    assert curve[-3:].mean() > 0.9


@pytest.mark.parametrize("task", sorted(TASKS))
def test_15_the_same_seed_gives_the_same_curve_and_another_seed_another(task):
    first, again = (train(TASKS[task][0], "gae", "ppo", 8) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, train(TASKS[task][0], "gae", "ppo", 8, seed=1))
