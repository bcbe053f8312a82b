"""Turns of an episode in token columns: sums over turns, and numbers that go from turns to tokens.

B rows (trajectories), N turns, T tokens. `turn_index` (int64 [B, T]) is the turn that an action token belongs to;
outside the action mask it is ignored. A turn is one response of the policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.masking import as_bool, at_least_float32, require_shape, zero_outside


def turns_to_tokens(per_turn: Tensor, turn_index: Tensor, action_mask: Tensor) -> Tensor:
    """Give each action token the number of its turn, [B, N] -> [B, T]; others 0."""
    mask, turns = _checked(turn_index, action_mask, per_turn.shape[1])
    return zero_outside(at_least_float32(per_turn).gather(1, turns), mask)


def sum_over_turns(per_token: Tensor, turn_index: Tensor, action_mask: Tensor, num_turns: int) -> Tensor:
    """Return the sum over each turn's action tokens, [B, T] -> [B, N]; 0 where there was no turn."""
    mask, turns = _checked(turn_index, action_mask, num_turns)
    require_shape("per_token", per_token, tuple(mask.shape), "[B, T]")
    values = zero_outside(per_token, mask)
    return values.new_zeros(mask.shape[0], num_turns).scatter_add(1, turns, values)


def turns_present(turn_index: Tensor, action_mask: Tensor, num_turns: int) -> Tensor:
    """Return bool [B, N], True for a turn with at least one action token."""
    return sum_over_turns(torch.ones_like(turn_index), turn_index, action_mask, num_turns) > 0


def at_first_tokens(per_token: Tensor, turn_index: Tensor, action_mask: Tensor, num_turns: int) -> Tensor:
    """Return what each turn's first action token has, [B, T] -> [B, N]; 0 where there was no turn."""
    first = _edges(turn_index, action_mask, num_turns, "amin")
    return sum_over_turns(per_token, turn_index, first, num_turns)


def place_on_turns(turn_rewards: Tensor, turn_index: Tensor, action_mask: Tensor) -> Tensor:
    """Put a turn's reward on its last action token, [B, N] -> [B, T]; 0 elsewhere."""
    last = _edges(turn_index, action_mask, turn_rewards.shape[1], "amax")
    return turns_to_tokens(turn_rewards, turn_index, last)


def _edges(turn_index: Tensor, action_mask: Tensor, num_turns: int, which: str) -> Tensor:
    """Return bool [B, T], True on the first (`amin`) or the last (`amax`) action token of each turn."""
    mask, turns = _checked(turn_index, action_mask, num_turns)
    width = mask.shape[1]
    nowhere = width if which == "amin" else -1
    position = torch.where(mask, torch.arange(width, device=mask.device).expand(mask.shape), nowhere)
    edge = position.new_full((mask.shape[0], num_turns), nowhere).scatter_reduce(1, turns, position, which)
    return mask & (edge.gather(1, turns) == position)


def _checked(turn_index: Tensor, action_mask: Tensor, num_turns: int) -> tuple[Tensor, Tensor]:
    """Return (the mask as bool, the turn of each action token and 0 elsewhere)."""
    mask = as_bool(action_mask)
    require_shape("turn_index", turn_index, tuple(mask.shape), "[B, T]")
    turns = torch.where(mask, turn_index, torch.zeros_like(turn_index))
    if turns.numel() and (int(turns.min()) < 0 or int(turns.max()) >= num_turns):
        raise ValueError(
            f"turn_index of action tokens runs from {int(turns.min())} to {int(turns.max())}, "
            f"but there are turns 0 to {num_turns - 1}"
        )
    return mask, turns
