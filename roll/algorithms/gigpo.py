"""Step-level credit for multi-turn episodes: GiGPO (arXiv:2505.10978) and step-level REINFORCE.

B rows (trajectories), N turns, T tokens. A turn is one response of the policy; its state is what it was shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.branches import Branches, over_branches
from roll.algorithms.groups import joint_index
from roll.algorithms.masking import as_bool, require_shape, zero_outside
from roll.algorithms.normalization import GroupMethod, normalize_grouped
from roll.algorithms.turns import turns_to_tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInputs:
    """The turns of each trajectory and how to weigh them."""

    turn_index: Tensor
    """int64 [B, T], number of the turn that an action token belongs to; ignored outside the action mask."""
    turn_rewards: Tensor
    """[B, N], reward of each turn; ignored where there was no turn."""
    state_index: Tensor
    """int64 [B, N], equal numbers for equal states; negative where there was no turn."""
    gamma: float = 1.0
    """Discount per turn (`step_reward_gamma`)."""
    episode_weight: float = 1.0
    step_weight: float = 1.0
    method: GroupMethod = "mean_std"
    """How scores are compared within a group."""
    comparison_groups: Tensor | None = None
    """int64 [B]: `gigpo` compares episodes, `step_reinforce` turns, whose rows agree here. None: episodes within their
    task group, turns over the whole batch."""
    branches: Branches | None = None
    """Of the turns, where an episode branches. None: each row is one sequence."""

    def __post_init__(self) -> None:
        require_shape("state_index", self.state_index, tuple(self.turn_rewards.shape), "[B, N]")
        if self.comparison_groups is not None:
            require_shape("comparison_groups", self.comparison_groups, (self.turn_rewards.shape[0],), "[B]")

    @property
    def num_turns(self) -> int:
        """Return N, the number of turns of the longest trajectory."""
        return int(self.turn_rewards.shape[1])

    @property
    def turn_mask(self) -> Tensor:
        """Return bool [B, N], True where there was a turn."""
        return self.state_index >= 0

    def returns(self) -> Tensor:
        """Return the turns' `step_returns`, [B, N]; of a turn that branches share, the mean of those along them."""
        (result,) = over_branches(
            self.branches,
            self.turn_mask,
            lambda rewards, present: (step_returns(rewards, present, gamma=self.gamma),),
            self.turn_rewards,
        )
        return result


def step_returns(turn_rewards: Tensor, turn_mask: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted reward-to-go per turn, G_n = r_n + gamma G_{n+1}; [B, N], zero outside `turn_mask`."""
    require_shape("turn_mask", turn_mask, tuple(turn_rewards.shape), "[B, N]")
    mask = as_bool(turn_mask)
    rewards = zero_outside(turn_rewards, mask)
    returns = torch.zeros_like(rewards)
    ahead = rewards.new_zeros(rewards.shape[0])
    for n in reversed(range(rewards.shape[1])):
        ahead = torch.where(mask[:, n], rewards[:, n] + gamma * ahead, ahead)
        returns[:, n] = ahead * mask[:, n]
    return returns


def step_groups(group_index: Tensor, state_index: Tensor) -> Tensor:
    """Assign numbers to turns, int64 [B, N]: two are equal when they are in the same state *of the same task group*.

    The same picture in another task (another goal, another seed) is another state.
    """
    tasks = group_index.unsqueeze(1).expand(state_index.shape)
    return joint_index(tasks.reshape(-1), state_index.reshape(-1)).reshape(state_index.shape)


def gigpo(rewards: Tensor, group_index: Tensor, steps: StepInputs, action_mask: Tensor) -> Tensor:
    """Return A = w_e A_episode + w_s A_step (arXiv:2505.10978).

    A_episode compares the episode rewards of a task group (or of `steps.comparison_groups`); A_step compares the step
    returns of the turns that met the same state within the same task group. A group of one, of episodes or of turns,
    gives 0 (with `identity` nothing is compared). `rewards` [B] are the episodes'; returns [B, T], the same number on
    all tokens of a turn.
    """
    present = steps.turn_mask
    compared = group_index if steps.comparison_groups is None else steps.comparison_groups
    episode = normalize_grouped(rewards, compared, method=steps.method)
    returns = steps.returns()
    per_turn = torch.zeros_like(returns)
    groups = step_groups(group_index, steps.state_index)
    per_turn[present] = normalize_grouped(returns[present], groups[present], method=steps.method).to(returns.dtype)
    joint = steps.episode_weight * episode.unsqueeze(1) + steps.step_weight * per_turn
    return turns_to_tokens(joint, steps.turn_index, action_mask)


def step_reinforce(steps: StepInputs, action_mask: Tensor) -> Tensor:
    """Give every token of a turn the turn's discounted reward-to-go, [B, T].

    `steps.method` normalises the returns over all turns of the batch, or over those of the rows that agree in
    `steps.comparison_groups`; `identity` leaves them as they are.
    """
    present = steps.turn_mask
    returns = steps.returns()
    index = None
    if steps.comparison_groups is not None:
        index = steps.comparison_groups.unsqueeze(1).expand(present.shape)[present]
    per_turn = torch.zeros_like(returns)
    per_turn[present] = normalize_grouped(returns[present], index, method=steps.method).to(returns.dtype)
    return turns_to_tokens(per_turn, steps.turn_index, action_mask)
