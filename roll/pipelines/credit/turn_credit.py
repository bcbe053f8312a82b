"""Episodes of several turns: a view [R, T] of a trajectory's tokens, whatever rows they are trained in, and its turns.

R trajectories, B rows, T tokens of the longest trajectory, N turns of the one with the most. `sample_unit` decides how
an episode is cut into rows. Credit is about the episode, so estimators see `TrajectoryView` and never rows.

A turn without a token can't be credited: its reward joins that of the turn before it (after it, if there is none
before), so the turns here are those in which the policy chose a token, and no reward gets lost.

An episode in which a turn is continued more than once is as many sequences as it has branches, each with what the
episode was paid beyond its turns at its end. Any other is one sequence, in the order in which it was played.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from roll.algorithms.branches import Branches
from roll.algorithms.gigpo import StepInputs, step_groups
from roll.algorithms.groups import batch_index, group_moments, index_of
from roll.configs.schema.agentic_config import AgenticConfig
from roll.pipelines.rollouts.assemble import Rollouts
from roll.types.metrics import Metrics
from roll.types.ragged import pad_flat, unpad
from roll.types.trajectory import Trajectory, Turn


@dataclass(frozen=True, eq=False)
class TrajectoryView:
    """Token columns of rows [B] as [R, T], and back.

    Where every trajectory is one row, [R, T] is the padded batch itself. Else it has the action tokens alone, those of
    a trajectory's rows one after another in the order in which they were played.
    """

    row_trajectory: Tensor  # int64 [B]
    positions: Tensor  # int64 [K], where in a flat column the tokens of the view are, trajectory by trajectory
    offsets: Tensor  # int64 [R + 1], into `positions`
    row_offsets: Tensor  # int64 [B + 1], of the batch

    @classmethod
    def of(cls, rollouts: Rollouts) -> TrajectoryView:
        """Return the view of these rollouts."""
        batch, owner = rollouts.batch, rollouts.row_trajectory
        trajectories = len(rollouts.trajectories)
        if torch.equal(owner, torch.arange(trajectories)):
            return cls(owner, torch.arange(batch.num_tokens), batch.offsets, batch.offsets)
        order = sorted(range(len(batch)), key=lambda row: (int(owner[row]), rollouts.row_turns[row].start))
        starts, ends = batch.offsets[:-1].tolist(), batch.offsets[1:].tolist()
        tokens = torch.cat([torch.arange(starts[row], ends[row]) for row in order])
        token_owner = owner[torch.tensor(order)].repeat_interleave(batch.lengths[torch.tensor(order)])
        acting = batch.action_mask[tokens]
        counts = torch.bincount(token_owner[acting], minlength=trajectories)
        return cls(
            row_trajectory=owner,
            positions=tokens[acting],
            offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            row_offsets=batch.offsets,
        )

    def pad(self, column: Tensor, value: float = 0.0) -> Tensor:
        """Return a token column of the batch as [R, T], right-padded with `value`."""
        return pad_flat(column[self.positions], self.offsets, value)

    def unpad(self, padded: Tensor) -> Tensor:
        """Return [R, T] as a token column of the batch; 0 on tokens that the view leaves out."""
        return padded.new_zeros(int(self.row_offsets[-1])).index_copy(0, self.positions, unpad(padded, self.offsets))

    @property
    def num_trajectories(self) -> int:
        """Return R."""
        return len(self.offsets) - 1

    def row_sums(self, column: Tensor) -> Tensor:
        """Add up a token column [N] of the batch over each row: float32 [B]."""
        rows = torch.arange(len(self.row_trajectory)).repeat_interleave(self.row_offsets.diff())
        return torch.zeros(len(self.row_trajectory)).index_add_(0, rows, column.float())

    def to_rows(self, per_trajectory: Tensor) -> Tensor:
        """Return [R] as [B]."""
        return per_trajectory[self.row_trajectory]


def turn_inputs(
    rollouts: Rollouts, action_mask: Tensor, config: AgenticConfig, *, factor: Tensor, extra: Tensor
) -> StepInputs:
    """Return the turns of the trajectories with their rewards, penalties included, and states.

    Rewards are float64, so that turns whose rewards-to-go agree on paper agree closely enough to have no spread.

    Args:
        action_mask: bool [R, T], of their view.
        factor: [R], multiplies the rewards of turns.
        extra: [R], what shaping added to the episode's reward; joins the last turn.
    """
    played = [_PlayedTurns.of(trajectory) for trajectory in rollouts.trajectories]
    turns = [turn for each in played for turn in each.paid()]
    lengths = torch.tensor([len(each.turns) for each in played], dtype=torch.int64)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    rewards = torch.tensor([turn.reward for turn in turns], dtype=torch.float64)
    rewards *= factor.double().repeat_interleave(lengths)
    for row, each in enumerate(played):
        rewards[offsets[row] + torch.tensor(each.ends)] += extra[row].double()
    numbers = [n for each in played for n, turn in enumerate(each.turns) for _ in range(turn.num_response_tokens)]
    assert len(numbers) == int(action_mask.sum()), "rows and turns of a trajectory have the same action tokens"
    index = torch.full(action_mask.shape, -1, dtype=torch.int64)
    index[action_mask] = torch.tensor(numbers, dtype=torch.int64)
    return StepInputs(
        turn_index=index,
        turn_rewards=pad_flat(rewards, offsets),
        state_index=pad_flat(index_of([turn.state for turn in turns]), offsets, -1),
        gamma=config.step_reward_gamma,
        episode_weight=config.episode_reward_weight,
        step_weight=config.step_reward_weight,
        method=config.reward_normalization.method,
        comparison_groups=comparison_groups(rollouts, config.reward_normalization.grouping),
        branches=Branches.of([each.walks for each in played], int(lengths.max())) if _branches(played) else None,
    )


def token_branches(rollouts: Rollouts, action_mask: Tensor) -> Branches | None:
    """Return the branches of the trajectories' action tokens, `action_mask` [R, T]; None where no episode branches."""
    played = [_PlayedTurns.of(trajectory) for trajectory in rollouts.trajectories]
    if not _branches(played):
        return None
    walks = []
    for row, each in enumerate(played):
        positions = action_mask[row].nonzero()[:, 0].tolist()
        ends = list(accumulate(turn.num_response_tokens - turn.num_fire_tokens for turn in each.turns))
        assert ends[-1] == len(positions), "rows and turns of a trajectory have the same action tokens"
        of_turn = [positions[start:end] for start, end in pairwise([0, *ends])]
        walks.append([[position for turn in walk for position in of_turn[turn]] for walk in each.walks])
    return Branches.of(walks, action_mask.shape[1])


def _branches(played: Sequence[_PlayedTurns]) -> bool:
    return any(len(each.walks) > 1 for each in played)


@dataclass(frozen=True)
class _PlayedTurns:
    """A trajectory's turns with tokens, and the sequences that they are."""

    trajectory: Trajectory
    turns: list[Turn]
    walks: list[list[int]]  # Positions in `turns`

    @classmethod
    def of(cls, trajectory: Trajectory) -> _PlayedTurns:
        turns: list[Turn] = []
        parents: list[int | None] = []
        own_index: list[int | None] = []  # Of each turn: its own, or of the one with tokens that it follows
        carried = 0.0
        for turn, parent in zip(trajectory.turns, trajectory.parents, strict=True):
            before = None if parent is None else own_index[parent]
            if turn.num_response_tokens:
                parents.append(before)
                own_index.append(len(turns))
                turns.append(turn.replace(reward=turn.reward + carried))
                carried = 0.0
                continue
            own_index.append(before)
            if before is None and not turns:
                carried += turn.reward
            else:  # a context that begins without a token still follows what was played before it
                paid = len(turns) - 1 if before is None else before
                turns[paid] = turns[paid].replace(reward=turns[paid].reward + turn.reward)
        assert turns, f"trajectory {trajectory.id} is trained without a token"
        continued = [parent for parent in parents if parent is not None]
        if len(set(continued)) == len(continued):
            return cls(trajectory, turns, [list(range(len(turns)))])
        return cls(trajectory, turns, [_walk(end, parents) for end in range(len(turns)) if end not in set(continued)])

    @property
    def ends(self) -> list[int]:
        """Return the last turn of each sequence."""
        return [walk[-1] for walk in self.walks]

    def paid(self) -> list[Turn]:
        """Return the turns, with what the episode was paid beyond them at the end of every sequence."""
        beyond = self.trajectory.reward - math.fsum(turn.reward for turn in self.trajectory.turns)
        if math.isclose(beyond, 0.0, abs_tol=1e-6 * max(1.0, abs(self.trajectory.reward))):
            return self.turns
        paid = list(self.turns)
        for end in self.ends:
            paid[end] = paid[end].replace(reward=paid[end].reward + beyond)
        return paid


def _walk(end: int, parents: Sequence[int | None]) -> list[int]:
    walk, at = [end], parents[end]
    while at is not None:
        walk.append(at)
        at = parents[at]
    return walk[::-1]


def comparison_groups(rollouts: Rollouts, grouping: str) -> Tensor:
    """Return int64 [R]: trajectories whose rewards are compared share a number.

    `traj_group`: of the same task; `state`: that began in the same state of the same kind of environment; `tags` and
    `inductive`: of the same tag; `batch`: all.
    """
    if grouping == "batch":
        return batch_index(rollouts.group_index)
    if grouping in ("tags", "inductive"):
        return index_of([task.tag for task in rollouts.tasks])
    if grouping == "state":
        require_states(rollouts, "reward_normalization.grouping: state", first_only=True)
        first = [trajectory.turns[0].state for trajectory in rollouts.trajectories]
        return index_of([f"{task.tag}\0{state}" for task, state in zip(rollouts.tasks, first, strict=True)])
    assert grouping == "traj_group", f"unknown grouping {grouping!r}"
    return rollouts.group_index


def require_states(rollouts: Rollouts, reader: str, *, first_only: bool = False) -> None:
    """Refuse turns without a state: they would all count as the same one."""
    for trajectory in rollouts.trajectories:
        for number, turn in enumerate(trajectory.turns[:1] if first_only else trajectory.turns):
            if not turn.state:
                raise ValueError(
                    f"{reader} compares turns that met the same state, but turn {number} of {trajectory.id} has none "
                    "(`Turn.state` is empty); a rollout of your own has to fill it"
                )


def state_metrics(steps: StepInputs, group_index: Tensor) -> Metrics:
    """Return how many of `gigpo`'s groups of turns, one per state and task group, have nothing to compare."""
    metrics, present = Metrics(), steps.turn_mask
    index = step_groups(group_index, steps.state_index)[present]
    size = group_moments(torch.zeros(len(index)), index).size
    groups = float((1 / size.to(torch.float64)).sum())
    metrics.add_mean("advantage/step_groups_of_one_share", float((size == 1).sum()), groups)
    return metrics
