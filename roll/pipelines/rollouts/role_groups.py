"""Episodes of several agents that are paid apart become a trajectory for each role, in a group of the role's own."""

from __future__ import annotations

from dataclasses import replace

from roll.rollout.routed import with_unrouted
from roll.types.trajectory import Group, Trajectory, Turn


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
    place: list[int | None] = []  # Of each turn among those of the role: its own, or of the last one before it
    heard: list[tuple[int, ...]] = []  # Tokens of others since then
    for turn, parent in zip(trajectory.turns, trajectory.parents, strict=True):
        before, context = (None, ()) if parent is None else (place[parent], heard[parent])
        if turn.role != role:
            place.append(before)
            heard.append((*context, *turn.prompt_ids, *turn.response_ids))
            continue
        resets = before is None and (bool(turns) or turn.resets_context)
        follows = before is None or before == len(turns) - 1
        prompt, after = (*context, *turn.prompt_ids), None if follows else before
        routed = with_unrouted(turn.routed_experts, len(context))
        turns.append(turn.replace(prompt_ids=prompt, resets_context=resets, after=after, routed_experts=routed))
        place.append(len(turns) - 1)
        heard.append(())
    return replace(trajectory, task_id=task_id, turns=tuple(turns), reward=reward, role_rewards={role: reward})
