"""Groups of trajectories become one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.types.batch import TokenBatch
from roll.types.episode import Group, Task, Trajectory, Turn


@dataclass(frozen=True, eq=False)
class Rollouts:
    """A step's trajectories [R] and their training rows [B]: a row for every context.

    One trajectory has several rows where its context was reset on the way. Where none did, as in most RLVR runs, row i
    is trajectory i.
    """

    batch: TokenBatch  # Rows in the order of the trajectories, each of which is a unit
    trajectories: tuple[Trajectory, ...]
    tasks: tuple[Task, ...]  # The task of each trajectory
    group_index: Tensor  # int64 [R]
    row_trajectory: Tensor  # int64 [B], the trajectory of each row
    row_turns: tuple[range, ...]  # [B], the row's turns, by their positions in its trajectory
    shaped_rewards: Tensor | None = None  # float32 [R], after shaping, normalisation and clipping; None before credit

    @property
    def rewards(self) -> Tensor:
        """float32 [R], as the reward functions and environments gave them."""
        return torch.tensor([t.reward for t in self.trajectories], dtype=torch.float32)

    @property
    def response_lengths(self) -> Tensor:
        """int64 [R], tokens the policy chose."""
        return torch.tensor([t.num_response_tokens for t in self.trajectories])

    @property
    def truncated(self) -> Tensor:
        """bool [R], cut off by a length or turn limit."""
        return torch.tensor([t.status == "truncated" for t in self.trajectories])


def assemble(groups: Sequence[Group]) -> Rollouts:
    """Cut the survivors of all groups into rows, one per context.

    A row's id is its trajectory's, with `/k` for context k of several; its group id is the task's. A context in which
    the policy chose no token is left out.
    """
    members = [(index, group.task, trajectory) for index, group in enumerate(groups) for trajectory in group.survivors]
    rows = _Rows()
    for place, (_, task, trajectory) in enumerate(members):
        rows.add(place, task, trajectory)
    return Rollouts(
        batch=rows.batch(),
        trajectories=tuple(trajectory for _, _, trajectory in members),
        tasks=tuple(task for _, task, _ in members),
        group_index=torch.tensor([index for index, _, _ in members], dtype=torch.int64),
        row_trajectory=torch.tensor(rows.trajectory, dtype=torch.int64),
        row_turns=tuple(rows.turns),
    )


class _Rows:
    """Collects training rows."""

    def __init__(self) -> None:
        self.trajectory: list[int] = []
        self.turns: list[range] = []
        self._ids: list[str] = []
        self._group_ids: list[str] = []
        self._unit_ids: list[str] = []
        self._offsets = [0]
        self._columns: dict[str, list[Any]] = {
            "token_ids": [], "action_mask": [], "sampling_logprobs": [], "versions": []
        }  # fmt: skip

    def add(self, place: int, task: Task, trajectory: Trajectory) -> None:
        """Add the rows of the trajectory at this place."""
        contexts, first = trajectory.contexts, 0
        for k, context in enumerate(contexts):
            turns = range(first, first + len(context))
            first = turns.stop
            if not any(turn.response_ids for turn in context):
                continue
            self.trajectory.append(place)
            self.turns.append(turns)
            self._ids.append(trajectory.id if len(contexts) == 1 else f"{trajectory.id}/{k}")
            self._group_ids.append(task.id)
            self._unit_ids.append(trajectory.id)
            for turn in context:
                self._append(turn)
            self._offsets.append(len(self._columns["token_ids"]))

    def _append(self, turn: Turn) -> None:
        columns, given, chosen = self._columns, len(turn.prompt_ids), len(turn.response_ids)
        columns["token_ids"] += [*turn.prompt_ids, *turn.response_ids]
        columns["action_mask"] += [False] * given + [True] * chosen
        columns["sampling_logprobs"] += [0.0] * given + list(turn.logprobs)
        columns["versions"] += [-1] * given + list(turn.versions)

    def batch(self) -> TokenBatch:
        columns = self._columns
        return TokenBatch(
            row_ids=tuple(self._ids),
            group_ids=tuple(self._group_ids),
            unit_ids=tuple(self._unit_ids),
            offsets=torch.tensor(self._offsets),
            token_ids=torch.tensor(columns["token_ids"], dtype=torch.int64),
            action_mask=torch.tensor(columns["action_mask"], dtype=torch.bool),
            sampling_logprobs=torch.tensor(columns["sampling_logprobs"], dtype=torch.float32),
            versions=torch.tensor(columns["versions"], dtype=torch.int64),
        )
