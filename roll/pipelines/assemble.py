"""Groups of trajectories become one ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    ids: list[str] = []
    owners: list[int] = []
    row_turns: list[range] = []
    turns: list[Turn] = []
    offsets = [0]
    for place, (_, _, trajectory) in enumerate(members):
        contexts, first = trajectory.contexts, 0
        for k, context in enumerate(contexts):
            positions = range(first, first + len(context))
            first = positions.stop
            if not any(turn.response_ids for turn in context):
                continue
            ids.append(trajectory.id if len(contexts) == 1 else f"{trajectory.id}/{k}")
            owners.append(place)
            row_turns.append(positions)
            turns += context
            offsets.append(offsets[-1] + sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in context))

    def column(values: Callable[[Turn], Iterable[Any]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([value for turn in turns for value in values(turn)], dtype=dtype)

    def given(turn: Turn) -> int:
        """Tokens that the policy didn't choose."""
        return len(turn.prompt_ids) + turn.num_fire_tokens

    batch = TokenBatch(
        row_ids=tuple(ids),
        group_ids=tuple(members[place][1].id for place in owners),
        unit_ids=tuple(members[place][2].id for place in owners),
        offsets=torch.tensor(offsets),
        token_ids=column(lambda turn: [*turn.prompt_ids, *turn.response_ids], torch.int64),
        action_mask=column(
            lambda t: [False] * given(t) + [True] * (len(t.response_ids) - t.num_fire_tokens), torch.bool
        ),
        sampling_logprobs=column(lambda t: [0.0] * given(t) + [*t.logprobs[t.num_fire_tokens :]], torch.float32),
        versions=column(lambda t: [-1] * given(t) + [*t.versions[t.num_fire_tokens :]], torch.int64),
    )
    return Rollouts(
        batch=batch,
        trajectories=tuple(trajectory for _, _, trajectory in members),
        tasks=tuple(task for _, task, _ in members),
        group_index=torch.tensor([index for index, _, _ in members], dtype=torch.int64),
        row_trajectory=torch.tensor(owners, dtype=torch.int64),
        row_turns=tuple(row_turns),
    )
