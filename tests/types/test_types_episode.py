"""What is played: tasks, turns, trajectories, groups."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.types.trajectory import TRAINABLE, Group, Status, Task, Trajectory, Turn

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def turn(prompt=2, response=3, **changes):
    fields = {
        "prompt_ids": tuple(range(prompt)),
        "response_ids": tuple(range(response)),
        "logprobs": (-1.0,) * response,
        "versions": (0,) * response,
        "finish_reason": "stop",
    }
    return Turn(**{**fields, **changes})


def task(name="math:1"):
    return Task(id=name, source="math.jsonl", payload={}, seed=0, tag="gsm8k", domain="math")


def trajectory(member=0, status="ok", turns=None, task_id="math:1"):
    turns = (turn(),) if turns is None else turns
    return Trajectory(task_id=task_id, member=member, turns=turns, reward=1.0, status=status)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
@QUICK
def test_a_turn_needs_one_logprob_and_one_version_per_token(tokens, logprobs, versions):
    changes = {"logprobs": (0.0,) * logprobs, "versions": (1,) * versions}
    if tokens == logprobs == versions:
        assert turn(response=tokens, **changes).response_ids == tuple(range(tokens))
    else:
        with pytest.raises(ValueError, match=f"{tokens} tokens, {logprobs} log-probs, {versions} versions"):
            turn(response=tokens, **changes)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4))
@QUICK
def test_a_trajectory_counts_the_tokens_of_its_turns(sizes):
    found = trajectory(turns=tuple(turn(p, r) for p, r in sizes))
    assert found.num_tokens == sum(p + r for p, r in sizes)
    assert found.num_response_tokens == sum(r for _, r in sizes)


@pytest.mark.parametrize("status", get_args(Status))
def test_only_statuses_about_the_policy_are_trainable(status):
    assert trajectory(status=status).trainable == (status in ("ok", "truncated"))
    assert (status in TRAINABLE) == (status in ("ok", "truncated"))


def test_a_trajectory_in_which_the_policy_chose_nothing_is_not_trainable():
    assert not trajectory(turns=()).trainable
    assert not trajectory(turns=(turn(response=0),)).trainable


@given(st.lists(st.booleans(), max_size=6))
@QUICK
def test_contexts_are_the_turns_cut_where_the_context_is_reset(reset):
    turns = tuple(turn(prompt=i, resets_context=flag) for i, flag in enumerate(reset))
    found = trajectory(turns=turns).contexts
    assert tuple(t for context in found for t in context) == turns
    assert all(context for context in found)
    # No turn within a context starts a new one; the first context starts with the episode, whatever its turn says.
    assert not any(t.resets_context for context in found for t in context[1:])
    assert all(context[0].resets_context for context in found[1:])
    assert sum(map(len, found)) == len(reset) and len(found) == bool(reset) + sum(reset[1:])


def test_an_id_names_task_and_member():
    assert trajectory(member=3).id == "math:1#3"


@given(st.lists(st.sampled_from(get_args(Status)), max_size=6))
@QUICK
def test_survivors_are_the_trainable_members_in_order(statuses):
    group = Group(task=task(), trajectories=tuple(trajectory(i, s) for i, s in enumerate(statuses)))
    assert [t.member for t in group.survivors] == [i for i, s in enumerate(statuses) if s in TRAINABLE]


def test_a_group_refuses_a_trajectory_of_another_task():
    with pytest.raises(ValueError, match=r"'math:1' got trajectories of \['other'\]"):
        Group(task=task(), trajectories=(trajectory(), trajectory(task_id="other")))


@pytest.mark.parametrize("value", [task(), turn(), trajectory(), Group(task=task(), trajectories=())])
def test_what_was_played_cannot_be_changed(value):
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
