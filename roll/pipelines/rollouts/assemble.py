"""Groups of trajectories become one ragged batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.rollout.routed import routed_rows, with_unrouted
from roll.types.batch import TokenBatch
from roll.types.trajectory import Group, Task, Trajectory, Turn


def split_by_role(group: Group) -> list[Group]:
    """Return a group per role, each with the turns of that role and its reward; the group itself where all agents
    share the reward (`Trajectory.role_rewards` is empty).

    A role's group has the task id `<task>@<role>`, so each role is compared with itself in the other members. What
    others said before a turn stays in its context, and isn't trained there. A member that says nothing of roles, in a
    group where others do, is worth its reward to each role that spoke. Members without trainable status are in none of
    the groups.
    """
    members = group.survivors
    if not any(member.role_rewards for member in members):
        return [group]
    parts = []
    rewards = [member.role_rewards or {turn.role: member.reward for turn in member.turns} for member in members]
    for number, role in enumerate(sorted({role for paid in rewards for role in paid})):
        task = replace(group.task, id=f"{group.task.id}@{role}")
        paired = zip(members, rewards, strict=True)
        played = [_of_role(member, role, task.id, paid[role]) for member, paid in paired if role in paid]
        # What was counted in an episode counts once.
        played = played if number == 0 else [replace(member, counts={}) for member in played]
        parts.append(Group(task=task, trajectories=tuple(played)))
    return parts


def _of_role(trajectory: Trajectory, role: str, task_id: str, reward: float) -> Trajectory:
    """Return a trajectory of the turns of one role. The tokens of others before a turn join its prompt."""
    turns: list[Turn] = []
    index_of: list[int | None] = []  # Of each turn among those of the role: its own, or of the last one before it
    heard: list[tuple[int, ...]] = []  # Tokens of others since then
    for turn, parent in zip(trajectory.turns, trajectory.parents, strict=True):
        before, context = (None, ()) if parent is None else (index_of[parent], heard[parent])
        if turn.role != role:
            index_of.append(before)
            heard.append((*context, *turn.prompt_ids, *turn.response_ids))
            continue
        resets = before is None and (bool(turns) or turn.resets_context)
        follows = before is None or before == len(turns) - 1
        prompt, after = (*context, *turn.prompt_ids), None if follows else before
        routed = with_unrouted(turn.routed_experts, len(context))
        turns.append(turn.replace(prompt_ids=prompt, resets_context=resets, after=after, routed_experts=routed))
        index_of.append(len(turns) - 1)
        heard.append(())
    return replace(trajectory, task_id=task_id, turns=tuple(turns), reward=reward, role_rewards={role: reward})


@dataclass(frozen=True, eq=False)
class Rollouts:
    """A step's trajectories [R] and their training rows [B]: a row for every branch.

    One trajectory has several rows where its context was reset on the way, or where a turn was continued twice. Where
    none did, as in most RLVR runs, row i is trajectory i. An episode whose roles are paid apart is a trajectory for
    each of them (`role_groups.py`).
    """

    batch: TokenBatch  # Rows in the order of the trajectories; those of an episode are a unit
    trajectories: tuple[Trajectory, ...]
    tasks: tuple[Task, ...]  # The task of each trajectory
    group_index: Tensor  # int64 [R]
    row_trajectory: Tensor  # int64 [B], the trajectory of each row
    row_turns: tuple[range, ...]  # [B], the turns that the row trains, by their positions in its trajectory
    shaped_rewards: Tensor | None = None  # float32 [R], after shaping, normalisation and clipping; None before credit
    greedy_scores: Tensor | None = None  # float32 [R], of a greedy response to the same task; NaN where that failed
    recorded: Mapping[str, Tensor] = field(default_factory=dict)  # Token columns [N] for the files of rollouts alone

    @property
    def rewards(self) -> Tensor:
        """Return float32 [R], as the reward functions and environments gave them."""
        return torch.tensor([t.reward for t in self.trajectories], dtype=torch.float32)

    @property
    def response_lengths(self) -> Tensor:
        """Return int64 [R], tokens the policy chose."""
        return torch.tensor([t.num_response_tokens for t in self.trajectories])

    @property
    def truncated(self) -> Tensor:
        """Return bool [R], cut off by a length or turn limit."""
        return torch.tensor([t.status == "truncated" for t in self.trajectories])


@dataclass(frozen=True)
class Member:
    """A trajectory among those that a step trains on."""

    group: int  # Number of its group in the step
    task: Task
    trajectory: Trajectory
    unit: str  # The episode that it is a part of


@dataclass(frozen=True)
class _Row:
    id: str
    member: int  # Of its trajectory
    turns: range  # That it trains
    context: tuple[int, ...]  # Turns before them that a row before trains


def _rows_of(trajectory: Trajectory, index: int) -> list[_Row]:
    """Return a row per branch, with what is new in it; branches in which that has no token are left out."""
    rows, branches, first = [], trajectory.branches, 0
    for k, branch in enumerate(branches):
        own, context = range(first, branch[-1] + 1), tuple(position for position in branch if position < first)
        first = own.stop
        if any(trajectory.turns[position].num_response_tokens for position in own):
            name = trajectory.id if len(branches) == 1 else f"{trajectory.id}/{k}"
            rows.append(_Row(name, index, own, context))
    return rows


def assemble(groups: Sequence[Group]) -> Rollouts:
    """Cut the survivors of all groups into rows, one per branch.

    A turn that several branches share is trained in the row of the first; in those of the others its tokens are there
    as context. A row's id is its trajectory's, with `/k` for branch k of several; its group id is the task's. A branch
    in which the policy chose no token of its own is left out.
    """
    return cut_rows(
        [
            Member(index, part.task, trajectory, f"{group.task.id}#{trajectory.member}")
            for index, (group, part) in enumerate((group, part) for group in groups for part in split_by_role(group))
            for trajectory in part.survivors
        ]
    )


def cut_rows(members: Sequence[Member]) -> Rollouts:
    """Cut trajectories into rows as `assemble` does, which says what rows they are."""
    rows = [row for index, member in enumerate(members) for row in _rows_of(member.trajectory, index)]
    turns: list[tuple[Turn, bool]] = []  # And whether its row trains it
    plays: list[list[Turn]] = []  # Of each row
    offsets = [0]
    for row in rows:
        played = members[row.member].trajectory.turns
        shown = [(played[k], False) for k in row.context] + [(played[k], True) for k in row.turns]
        turns += shown
        plays.append([turn for turn, _ in shown])
        offsets.append(offsets[-1] + sum(turn.num_tokens for turn, _ in shown))

    routed = routed_rows(plays)
    pictures = tuple(tuple(picture for turn in play for picture in turn.pictures) for play in plays)
    batch = TokenBatch(
        row_ids=tuple(row.id for row in rows),
        group_ids=tuple(members[row.member].task.id for row in rows),
        unit_ids=tuple(members[row.member].unit for row in rows),
        pictures=pictures,
        offsets=torch.tensor(offsets),
        **token_columns(turns, offsets[-1]),
        routed_experts=None if routed is None else torch.from_numpy(routed),
    )
    return Rollouts(
        batch=batch,
        trajectories=tuple(member.trajectory for member in members),
        tasks=tuple(member.task for member in members),
        group_index=torch.tensor([member.group for member in members], dtype=torch.int64),
        row_trajectory=torch.tensor([row.member for row in rows], dtype=torch.int64),
        row_turns=tuple(row.turns for row in rows),
    )


def token_columns(turns: Sequence[tuple[Turn, bool]], num_tokens: int) -> dict[str, Any]:
    """Return the columns [N] of turns one after another, each with whether its row trains it.

    Copied by turns, never by tokens: a step has millions of them.
    """
    token_ids = np.zeros(num_tokens, np.int64)
    acting = np.zeros(num_tokens, np.bool_)
    logprobs = np.zeros(num_tokens, np.float32)
    versions = np.full(num_tokens, -1, np.int64)
    end = 0
    for turn, trains in turns:
        start, fire = end + len(turn.prompt_ids), turn.num_fire_tokens
        token_ids[end:start] = turn.prompt_ids
        end += turn.num_tokens
        token_ids[start:end] = turn.array("response_ids")
        if trains:
            acting[start + fire : end] = True
            logprobs[start + fire : end] = turn.array("logprobs")[fire:]
            versions[start + fire : end] = turn.array("versions")[fire:]
    columns = {"token_ids": token_ids, "action_mask": acting, "sampling_logprobs": logprobs, "versions": versions}
    return {name: torch.from_numpy(column) for name, column in columns.items()}
