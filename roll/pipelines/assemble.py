"""Groups of trajectories become one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roll.types.batch import TokenBatch
from roll.types.episode import Group, Task, Trajectory


@dataclass(frozen=True, eq=False)
class Rollouts:
    """A step's training rows, in the order of the batch."""

    batch: TokenBatch
    trajectories: tuple[Trajectory, ...]
    tasks: tuple[Task, ...]
    """The task of each row."""
    group_index: Tensor
    """int64 [B]"""

    @property
    def response_lengths(self) -> Tensor:
        """int64 [B], tokens the policy chose."""
        return torch.tensor([t.num_response_tokens for t in self.trajectories])

    @property
    def truncated(self) -> Tensor:
        """bool [B], cut off by a length or turn limit."""
        return torch.tensor([t.status == "truncated" for t in self.trajectories])


def assemble(groups: Sequence[Group]) -> Rollouts:
    """The survivors of all groups as rows; a row's id is the trajectory's, its group id the task's."""
    rows = [(index, group.task, trajectory) for index, group in enumerate(groups) for trajectory in group.survivors]
    columns: dict[str, list[Any]] = {"token_ids": [], "action_mask": [], "sampling_logprobs": [], "versions": []}
    offsets = [0]
    for _, _, trajectory in rows:
        _append(trajectory, columns)
        offsets.append(len(columns["token_ids"]))
    batch = TokenBatch(
        row_ids=tuple(trajectory.id for _, _, trajectory in rows),
        group_ids=tuple(task.id for _, task, _ in rows),
        offsets=torch.tensor(offsets),
        token_ids=torch.tensor(columns["token_ids"], dtype=torch.int64),
        action_mask=torch.tensor(columns["action_mask"], dtype=torch.bool),
        sampling_logprobs=torch.tensor(columns["sampling_logprobs"], dtype=torch.float32),
        versions=torch.tensor(columns["versions"], dtype=torch.int64),
        scores=torch.tensor([trajectory.reward for _, _, trajectory in rows], dtype=torch.float32),
    )
    return Rollouts(
        batch=batch,
        trajectories=tuple(trajectory for _, _, trajectory in rows),
        tasks=tuple(task for _, task, _ in rows),
        group_index=torch.tensor([index for index, _, _ in rows], dtype=torch.int64),
    )


def _append(trajectory: Trajectory, columns: dict[str, list[Any]]) -> None:
    for turn in trajectory.turns:
        given, chosen = len(turn.prompt_ids), len(turn.response_ids)
        columns["token_ids"] += [*turn.prompt_ids, *turn.response_ids]
        columns["action_mask"] += [False] * given + [True] * chosen
        columns["sampling_logprobs"] += [0.0] * given + list(turn.logprobs)
        columns["versions"] += [-1] * given + list(turn.versions)


def with_fillers(batch: TokenBatch, rows: int) -> TokenBatch:
    """At least `rows` rows: the first ones again under other ids, with loss weight 0 and an empty loss mask.

    Every data-parallel rank needs a row to take part; a filler changes neither numerators nor denominators.
    """
    missing = rows - len(batch)
    if missing <= 0:
        return batch
    weight = batch.loss_weight if batch.loss_weight is not None else torch.ones(len(batch))
    mask = batch.loss_mask if batch.loss_mask is not None else batch.action_mask
    whole = batch.with_columns(loss_weight=weight, loss_mask=mask)
    parts = [whole]
    for i in range(missing):
        row = whole.select([i % len(batch)])
        empty = torch.zeros_like(row.require("loss_mask"))
        parts.append(replace(row, row_ids=(f"filler-{i}",), loss_weight=torch.zeros(1), loss_mask=empty))
    return TokenBatch.concat(parts)
