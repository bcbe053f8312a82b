"""What `adv_estimator` names: estimators as functions of `AdvantageInputs`, which is all that a batch may tell them.

One returns (advantages [B, T], returns [B, T]); its options are keyword arguments. A new one is a function here and an
entry in `roll/configs/catalog/estimator_table.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from roll.algorithms import advantages as maths
from roll.algorithms import gigpo as turn_maths
from roll.algorithms.advantages import AdvantageInputs, reinforce_return, to_tokens, turn_gae, turn_return
from roll.algorithms.branches import over_branches
from roll.algorithms.gigpo import StepInputs
from roll.algorithms.masking import zero_outside
from roll.algorithms.normalization import whiten


def gae(inputs: AdvantageInputs, *, gamma: float | None = None, lam: float | None = None) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over tokens, or over turns where `discount_over` says so."""
    values = _needed(inputs, "values", "gae")
    gamma, lam = inputs.gamma if gamma is None else gamma, inputs.lam if lam is None else lam
    if inputs.discount_over == "turn":
        steps, mask = _steps(inputs, "gae"), inputs.action_mask
        return turn_gae(inputs.token_rewards, values, steps, mask, gamma=gamma, lam=lam)
    return _along(inputs, lambda rewards, values, mask: maths.gae(rewards, values, mask, gamma=gamma, lam=lam), values)


def reinforce(inputs: AdvantageInputs, *, gamma: float | None = None) -> tuple[Tensor, Tensor]:
    """Discounted reward-to-go."""
    returns = _reward_to_go(inputs, "reinforce", gamma)
    return returns, returns


def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE++ (arXiv:2501.03262): returns, KL penalty included, whitened over the global batch."""
    returns = _reward_to_go(inputs, "reinforce_plus_plus", gamma)
    return whiten(returns, inputs.action_mask), returns


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE++ with the group's mean as baseline."""
    advantages = maths.reinforce_plus_plus_baseline(inputs.episode_rewards, inputs.action_mask, inputs.group_index)
    return advantages, advantages


def grpo(inputs: AdvantageInputs, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Difference from the group's mean, over its standard deviation + eps."""
    return _on_tokens(maths.grpo(inputs.episode_rewards, inputs.group_index, eps=eps), inputs)


def gdpo(inputs: AdvantageInputs, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Divide each part of the reward by its own spread in the group, and their sum by the batch's; without parts the
    episode's reward is the only one."""
    parts = inputs.episode_rewards.unsqueeze(1) if inputs.parts is None else inputs.parts
    weights = torch.ones_like(parts) if inputs.part_weights is None else inputs.part_weights
    return _on_tokens(maths.gdpo(parts, weights, inputs.group_index, eps=eps), inputs)


def dr_grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Difference from the group's mean."""
    return _on_tokens(maths.dr_grpo(inputs.episode_rewards, inputs.group_index), inputs)


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Difference from the mean of the others of the group."""
    return _on_tokens(maths.rloo(inputs.episode_rewards, inputs.group_index), inputs)


def rloo_std(inputs: AdvantageInputs, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Difference from the mean of the others of the group, over their standard deviation + eps."""
    return _on_tokens(maths.rloo_std(inputs.episode_rewards, inputs.group_index, eps=eps), inputs)


def pass_at_k(inputs: AdvantageInputs, *, k: int = 4, threshold: float = 0.5) -> tuple[Tensor, Tensor]:
    """Compute Pass@k training: the group's chance of at least one right answer among k, shared out
    (arXiv:2508.10751)."""
    return _on_tokens(maths.pass_at_k(inputs.episode_rewards, inputs.group_index, k=k, threshold=threshold), inputs)


def best_of_n(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Train on the best of a group alone: self-distillation with `rl_loss_coef: 0` and `sft_loss_coef: 1`."""
    return _on_tokens(maths.best_of_n(inputs.episode_rewards, inputs.group_index), inputs)


def vapo(
    inputs: AdvantageInputs, *, gamma: float | None = None, alpha: float = 0.05, critic_lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute VAPO's decoupled, length-adaptive GAE (arXiv:2504.05118): lambda by length for the policy, `critic_lam`
    for the critic's targets."""
    if inputs.discount_over == "turn":
        raise ValueError("adv_estimator 'vapo' counts tokens: discount_over must be token")
    values, gamma = _needed(inputs, "values", "vapo"), inputs.gamma if gamma is None else gamma

    def decoupled(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        advantages = maths.length_adaptive_gae(rewards, values, mask, gamma=gamma, alpha=alpha)
        return advantages, maths.gae(rewards, values, mask, gamma=gamma, lam=critic_lam)[1]

    return _along(inputs, decoupled, values)


def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Difference from the group's mean weighted by length."""
    return _on_tokens(maths.opo(inputs.episode_rewards, inputs.lengths, inputs.group_index), inputs)


def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Difference from the group's mean, scaled up by the share of groups without signal."""
    return _on_tokens(maths.gpg(inputs.episode_rewards, inputs.group_index), inputs)


def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Return minus r(greedy response of the same prompt) (arXiv:2310.10505)."""
    greedy = _needed(inputs, "greedy_rewards", "remax")
    returns = _token_return(inputs, 1.0)
    return zero_outside(returns - greedy.unsqueeze(1), inputs.action_mask), returns


def optimal_token_baseline(
    inputs: AdvantageInputs, *, gamma: float | None = None, handle_zero_tail: bool = False
) -> tuple[Tensor, Tensor]:
    """Return reward-to-go less the group's mean at that token, weighted by squared gradients so far
    (arXiv:2602.07078)."""
    gamma = inputs.gamma if gamma is None else gamma
    gradients = _needed(inputs, "logit_gradients", "optimal_token_baseline")
    index, branches = inputs.group_index, inputs.branches
    index = index if branches is None else index[branches.row]

    def compared(rewards: Tensor, gradients: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        returns = reinforce_return(rewards, mask, gamma=gamma)
        weights = None if branches is None else 1 / torch.bincount(branches.row)[branches.row].double()
        advantages = maths.optimal_token_baseline(
            returns, gradients, mask, index, handle_zero_tail=handle_zero_tail, row_weights=weights
        )
        return advantages, returns

    return _along(inputs, compared, gradients)


def gigpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compute GiGPO: episodes against their group, turns against those that met the same state."""
    steps = _steps(inputs, "gigpo")
    advantages = turn_maths.gigpo(inputs.episode_rewards, inputs.group_index, steps, inputs.action_mask)
    return advantages, advantages


def step_reinforce(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Give every turn its own discounted reward-to-go."""
    advantages = turn_maths.step_reinforce(_steps(inputs, "step_reinforce"), inputs.action_mask)
    return advantages, advantages


def _reward_to_go(inputs: AdvantageInputs, estimator: str, gamma: float | None) -> Tensor:
    gamma = inputs.gamma if gamma is None else gamma
    if inputs.discount_over == "turn":
        return turn_return(inputs.token_rewards, _steps(inputs, estimator), inputs.action_mask, gamma=gamma)
    return _token_return(inputs, gamma)


def _token_return(inputs: AdvantageInputs, gamma: float) -> Tensor:
    return _along(inputs, lambda rewards, mask: (reinforce_return(rewards, mask, gamma=gamma),) * 2)[0]


def _along(
    inputs: AdvantageInputs, compute: Callable[..., tuple[Tensor, Tensor]], *columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `compute(token_rewards, *columns, action_mask)`, in episodes that branch over each branch by itself."""
    first, second = over_branches(inputs.branches, inputs.action_mask, compute, inputs.token_rewards, *columns)
    return first, second


def _on_tokens(per_row: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Put one number per response on all of its action tokens; the returns are the advantages."""
    advantages = to_tokens(per_row, inputs.action_mask)
    return advantages, advantages


def _needed(inputs: AdvantageInputs, field: str, estimator: str) -> Tensor:
    tensor: Tensor | None = getattr(inputs, field)
    if tensor is None:
        raise ValueError(f"adv_estimator {estimator!r} needs {field}, got none")
    return tensor


def _steps(inputs: AdvantageInputs, estimator: str) -> StepInputs:
    if inputs.steps is None:
        raise ValueError(f"adv_estimator {estimator!r} needs steps (turns, their rewards and states), got none")
    return inputs.steps
