"""Experts on their way from responses to training rows (router replay)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from roll.pipelines.rollouts.assemble import assemble
from roll.rollout.async_scheduler import ReadyGroup
from roll.rollout.buffer import load_groups, save_groups
from roll.rollout.routed import routed_before, routed_rows
from roll.strategies.base import Completion
from roll.types.trajectory import Group, Task, Trajectory, Turn

TASK = Task(id="maze", source="test", payload={}, seed=0, tag="maze", domain="maze")


def rows(*numbers):
    """[n, 1 layer, 1 expert]"""
    return np.array(numbers, np.int16).reshape(-1, 1, 1)


def turn(context, prompt, response, experts, **more):
    """A turn as `Episode.generate` makes it of a completion."""
    found = None if experts is None else rows(*experts)
    size = len(response)
    completion = Completion(
        id="r", token_ids=tuple(response), logprobs=(-1.0,) * size, versions=(0,) * size, finish_reason="stop",
        routed_experts=found,
    )  # fmt: skip
    assert found is None or len(found) == context + len(prompt) + size
    return Turn(
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        logprobs=(-1.0,) * size,
        versions=(0,) * size,
        finish_reason="stop",
        routed_experts=routed_before(completion, len(prompt)),
        **more,
    )


FIRST = turn(0, [1, 2], [3], [10, 20, -1])
SECOND = turn(3, [4], [5, 6], [10, 20, 30, 40, 50, -1])  # token 3 is read with this turn
BRANCH = turn(3, [7], [8], [10, 20, 31, 70, -1], after=0)
ANEW = turn(0, [9], [10], [90, -1], resets_context=True)


def flat(found):
    return found[:, 0, 0].tolist()


def test_a_turns_last_token_is_told_by_the_turn_after_it():
    assert flat(FIRST.routed_experts) == [-1, 10, 20]
    assert flat(SECOND.routed_experts) == [30, 40, 50]
    assert flat(routed_rows([[FIRST, SECOND]])) == [10, 20, 30, 40, 50, -1]
    assert flat(routed_rows([[FIRST, SECOND], [FIRST, BRANCH], [ANEW]])) == [
        *(10, 20, 30, 40, 50, -1), *(10, 20, 31, 70, -1), *(90, -1),
    ]  # fmt: skip


def test_turns_that_tell_nothing_leave_their_tokens_unknown():
    silent = turn(3, [4], [5, 6], None)
    assert routed_rows([[silent]]) is None
    assert flat(routed_rows([[FIRST, silent], [silent], [ANEW]])) == [10, 20, -1, -1, -1, -1, *[-1] * 3, 90, -1]


def test_turns_of_different_models_do_not_mix():
    other = replace(ANEW, routed_experts=np.zeros((2, 3, 1), np.int16))
    with pytest.raises(ValueError, match="different models"):
        routed_rows([[FIRST], [other]])


def played(*turns):
    return Group(task=TASK, trajectories=(Trajectory(task_id="maze", member=0, turns=turns, reward=1.0),))


def test_a_batch_has_the_experts_of_its_rows():
    batch = assemble([played(FIRST, SECOND, BRANCH, ANEW)]).batch
    assert batch.routed_experts.dtype == torch.int16
    assert [flat(batch.row("routed_experts", i)) for i in range(3)] == [
        [10, 20, 30, 40, 50, -1], [10, 20, 31, 70, -1], [90, -1],
    ]  # fmt: skip
    silent = replace(FIRST, routed_experts=None)
    assert assemble([played(silent)]).batch.routed_experts is None


def test_what_other_roles_said_before_a_turn_has_no_experts_there():
    first = replace(FIRST, role="a")
    other = replace(turn(3, [4], [5, 6], [10, 20, 30, 40, 50, -1]), role="b")
    again = replace(turn(6, [7], [8], [10, 20, 30, 40, 50, 60, 70, -1]), role="a")
    members = [
        Trajectory(task_id="maze", member=i, turns=(first, other, again), reward=0.0, role_rewards={"a": 1.0, "b": 0.0})
        for i in range(2)
    ]
    batch = assemble([Group(task=TASK, trajectories=tuple(members))]).batch
    found = {row: flat(batch.row("routed_experts", i)) for i, row in enumerate(batch.group_ids)}
    assert found["maze@a"] == [10, 20, -1, -1, -1, 60, 70, -1]  # b's token 6 is read by the turn that follows it
    assert found["maze@b"] == [-1, -1, 30, 40, 50, -1]


def test_a_turn_needs_experts_for_each_of_its_tokens():
    with pytest.raises(ValueError, match="a turn of 3 tokens needs as many rows of routed experts, got 1"):
        replace(FIRST, routed_experts=FIRST.routed_experts[:1])


def test_files_from_before_there_were_experts_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    save_groups(tmp_path / "groups.parquet", [ReadyGroup(4, played(FIRST), 2)])
    table = pq.read_table(tmp_path / "groups.parquet")
    turns = [
        [{k: v for k, v in each.items() if k != "routed_experts"} for each in row] for row in table["turns"].to_pylist()
    ]
    old = table.set_column(table.schema.get_field_index("turns"), "turns", pa.array(turns))
    pq.write_table(old, tmp_path / "old.parquet")
    (found,) = load_groups(tmp_path / "old.parquet", lambda name: TASK)
    (read,) = found.group.trajectories[0].turns
    assert read.response_ids == FIRST.response_ids and read.routed_experts is None


def test_groups_on_disk_keep_experts(tmp_path):
    wide = replace(ANEW, routed_experts=np.arange(12, dtype=np.int16).reshape(2, 3, 2))
    kept = ReadyGroup(4, played(FIRST, replace(SECOND, routed_experts=None), wide), 2)
    save_groups(tmp_path / "groups.parquet", [kept])
    (found,) = load_groups(tmp_path / "groups.parquet", lambda name: TASK)
    first, second, third = found.group.trajectories[0].turns
    np.testing.assert_array_equal(first.routed_experts, FIRST.routed_experts)
    assert second.routed_experts is None
    np.testing.assert_array_equal(third.routed_experts, wide.routed_experts)
    assert third.routed_experts.dtype == np.int16
