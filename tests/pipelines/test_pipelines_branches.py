"""Episodes that branch: rows that train every token once, credit of what branches share, roles that are paid apart."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import credited_by, fresh
from test_pipelines_turn_credit import make_config
from torch.testing import assert_close

from roll.pipelines.credit.credit import credit_stages
from roll.pipelines.rollouts.assemble import Rollouts, assemble, split_by_role
from roll.pipelines.rollouts.rollout_metrics import rollout_metrics
from roll.pipelines.rollouts.validation import episode_success
from roll.types.trajectory import Group, Task, Trajectory, Turn

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def task(name: str = "t", tag: str = "a") -> Task:
    return Task(id=name, source="hand", payload={}, seed=0, tag=tag, domain=tag)


def turn(response: int | list[int] = 1, *, prompt: int | list[int] = 1, **changes: Any) -> Turn:
    """A turn of these tokens, or of so many."""
    said = [9] * response if isinstance(response, int) else response
    fields: dict[str, Any] = {
        "prompt_ids": tuple([7] * prompt if isinstance(prompt, int) else prompt),
        "response_ids": tuple(said),
        "logprobs": tuple(-float(token) for token in said),
        "versions": (0,) * len(said),
        "finish_reason": "stop",
        "state": "s",
    }
    return Turn(**{**fields, **changes})


def episode(*turns: Turn, reward: float = 0.0, member: int = 0, name: str = "t", **changes: Any) -> Trajectory:
    return Trajectory(task_id=name, member=member, turns=turns, reward=reward, **changes)


def rollouts_of(*groups: list[Trajectory]) -> Rollouts:
    return assemble([Group(task=task(group[0].task_id), trajectories=tuple(group)) for group in groups])


def credited(rollouts: Rollouts, **keys: Any):
    """The batch with values 1, 2, 3, ... by token id where a critic is read."""
    rollouts = fresh(rollouts, 1)
    if "values" in keys:
        column = torch.tensor([keys["values"][token] for token in rollouts.batch.token_ids.tolist()])
        keys.pop("values")
        rollouts = replace(rollouts, batch=rollouts.batch.with_columns(values=column))
    return credited_by(credit_stages(make_config(**keys)), rollouts, step=1)[0].batch


def by_token(batch, name: str = "advantages") -> dict[int, float]:
    """A column of trained tokens, by token id."""
    mask = batch.action_mask
    found = dict(zip(batch.token_ids[mask].tolist(), getattr(batch, name)[mask].tolist(), strict=True))
    assert len(found) == int(mask.sum()), "a token is trained twice"
    return found


# 10 11 - 20           (turns 0 and 1)
#       - 30 31        (turn 2)
#                - 40  (turn 3)
FORK = (
    turn([10, 11], prompt=[1, 2]),
    turn([20], prompt=[3]),
    turn([30, 31], prompt=[4, 5], after=0),
    turn([40], prompt=[]),
)


def test_a_shared_turn_is_context_in_every_row_and_trained_in_the_first():
    batch = rollouts_of([episode(*FORK, reward=1.0)]).batch
    assert batch.row_ids == ("t#0/0", "t#0/1") and batch.unit_ids == ("t#0", "t#0")
    assert batch.row("token_ids", 0).tolist() == [1, 2, 10, 11, 3, 20]
    assert batch.row("action_mask", 0).tolist() == [False, False, True, True, False, True]
    assert batch.row("token_ids", 1).tolist() == [1, 2, 10, 11, 4, 5, 30, 31, 40]
    assert batch.row("action_mask", 1).tolist() == [False] * 6 + [True] * 3
    assert batch.row("sampling_logprobs", 1).tolist() == [0.0] * 6 + [-30.0, -31.0, -40.0]
    assert batch.row("versions", 1).tolist() == [-1] * 6 + [0] * 3


def test_a_branch_without_a_token_of_its_own_is_no_row():
    rollouts = rollouts_of([episode(FORK[0], turn(0, prompt=[3]), turn([30], after=0), turn(0, after=0), reward=1.0)])
    assert rollouts.row_turns == (range(0, 2), range(2, 3))
    assert sorted(by_token(credited(rollouts))) == [10, 11, 30]


def test_turns_that_are_not_stored_depth_first_are_refused():
    with pytest.raises(ValueError, match="turn 3 of t#0 continues turn 1, which isn't on the way.*depth first"):
        episode(FORK[0], FORK[1], FORK[2], turn(1, after=1))
    with pytest.raises(ValueError, match="turn 0 .* continues turn 4"):
        episode(turn(1, after=4))
    with pytest.raises(ValueError, match="resets the context continues none"):
        turn(1, after=0, resets_context=True)


def test_discounts_follow_each_branch_and_what_is_shared_gets_the_mean():
    batch = credited(rollouts_of([episode(*FORK, reward=1.0)]), gamma=0.5)
    # 10 11 20 gives 1/4 1/2 1; 10 11 30 31 40 gives 1/16 1/8 1/4 1/2 1.
    expected = {10: (1 / 4 + 1 / 16) / 2, 11: (1 / 2 + 1 / 8) / 2, 20: 1.0, 30: 0.25, 31: 0.5, 40: 1.0}
    assert by_token(batch) == pytest.approx(expected)
    turns = credited(rollouts_of([episode(*FORK, reward=1.0)]), gamma=0.5, discount_over="turn")
    # Turns 0 1 give 1/2 1; turns 0 2 3 give 1/4 1/2 1.
    assert by_token(turns) == pytest.approx({10: 0.375, 11: 0.375, 20: 1.0, 30: 0.5, 31: 0.5, 40: 1.0})


def test_gae_takes_the_value_of_the_next_token_in_the_branch():
    values = dict.fromkeys(range(10), 0.0) | {10: 0.1, 11: 0.2, 20: 0.4, 30: 0.3, 31: 0.6, 40: 0.7}
    batch = credited(
        rollouts_of([episode(*FORK, reward=1.0)]), adv_estimator="gae", gamma=1.0, lambd=0.0, values=values
    )
    # With lambda 0: V of the next less V; 11 is followed by 20 (0.4) in one branch, by 30 (0.3) in the other.
    expected = {10: 0.1, 11: (0.2 + 0.1) / 2, 20: 0.6, 30: 0.3, 31: 0.1, 40: 0.3}
    assert by_token(batch) == pytest.approx(expected, abs=1e-6)
    returns = by_token(batch, "returns")
    assert returns == pytest.approx({token: expected[token] + values[token] for token in expected}, abs=1e-6)


def test_an_episode_counts_once_in_its_group_however_often_it_branched():
    pair = [episode(*FORK, reward=1.0), episode(turn([50]), reward=0.0, member=1)]
    grpo = by_token(credited(rollouts_of(pair), adv_estimator="grpo"))
    half = math.sqrt(0.5)  # (1 - 0.5) / std of (1, 0); were the branches counted, the mean would be 2/3
    assert grpo == pytest.approx({10: half, 11: half, 20: half, 30: half, 31: half, 40: half, 50: -half}, abs=1e-5)
    baseline = by_token(credited(rollouts_of(pair), adv_estimator="dr_grpo"))
    assert baseline == pytest.approx({token: -0.5 if token == 50 else 0.5 for token in baseline})


def test_rewards_of_turns_count_in_the_branches_that_have_them():
    paid = (replace(FORK[0], reward=1.0), replace(FORK[1], reward=2.0), FORK[2], replace(FORK[3], reward=4.0))
    rollouts = rollouts_of([episode(*paid, reward=7.5)])  # 0.5 beyond its turns, at the end of both branches
    keys = {"adv_estimator": "step_reinforce", "step_reward_gamma": 0.5}
    # Turns 0 1: 1 + 2.5 / 2, 2.5. Turns 0 2 3: 1 + 0 / 2 + 4.5 / 4, 4.5 / 2, 4.5.
    first = (1 + 1.25 + 1 + 1.125) / 2
    expected = {10: first, 11: first, 20: 2.5, 30: 2.25, 31: 2.25, 40: 4.5}
    assert by_token(credited(rollouts, **keys)) == pytest.approx(expected)


def test_gigpo_compares_a_shared_turn_once():
    states = [replace(FORK[0], state="a"), *(replace(t, state="b") for t in FORK[1:])]
    pair = [episode(*states, reward=1.0), episode(turn([50], state="a"), turn([60], state="b"), reward=0.0, member=1)]
    found = by_token(credited(rollouts_of(pair), method="mean", adv_estimator="gigpo", step_reward_gamma=0.5))
    # Episodes: 1 and 0, +-0.5. State a: turn 0 has (1/2 + 1/4) / 2 = 0.375 in its branches, 50 has 0.
    # State b: 20 has 1, 30 has 0.5, 40 has 1, 60 has 0; their mean is 0.625.
    expected = {10: 0.6875, 11: 0.6875, 20: 0.875, 30: 0.375, 31: 0.375, 40: 0.875, 50: -0.6875, 60: -1.125}
    assert found == pytest.approx(expected)


@st.composite
def trees(draw, member: int = 0, first_token: int = 10):
    """An episode of up to 7 turns, stored depth first; every token has an id of its own."""
    turns: list[Turn] = []
    walk: list[int] = []
    token = first_token
    for position in range(draw(st.integers(1, 7))):
        said = list(range(token, token + draw(st.integers(0 if position else 1, 3))))
        token += len(said)
        if position == 0:
            turns.append(turn(said, prompt=draw(st.integers(0, 2))))
            walk = [0]
            continue
        keep = draw(st.integers(0, len(walk)))
        walk = walk[:keep]
        after = walk[-1] if walk else None
        changes = {} if after == position - 1 else {"resets_context": True} if after is None else {"after": after}
        turns.append(turn(said, prompt=draw(st.integers(0, 2)), **changes))
        walk.append(position)
    return episode(*turns, reward=float(draw(st.integers(-3, 3))), member=member)


def reference_returns(trajectory: Trajectory, gamma: Fraction) -> dict[int, Fraction]:
    """Discounted rewards-to-go, by the definition: every walk by itself, shared tokens the mean."""
    children: dict[int | None, list[int]] = {}
    played: list[int] = []
    nearest: dict[int | None, int | None] = {None: None}
    for position, parent in enumerate(trajectory.parents):
        if trajectory.turns[position].response_ids:
            children.setdefault(nearest[parent], []).append(position)
            nearest[position] = position
            played.append(position)
        else:
            nearest[position] = nearest[parent]
    branches = any(len(after) > 1 for parent, after in children.items() if parent is not None)
    walks: list[list[int]] = [] if branches else [played]

    def walk(position: int, so_far: list[int]) -> None:
        here = [*so_far, position]
        for child in children.get(position, ()):
            walk(child, here)
        if position not in children:
            walks.append(here)

    for root in children[None] if branches else ():
        walk(root, [])
    found: dict[int, list[Fraction]] = {}
    for each in walks:
        tokens = [token for position in each for token in trajectory.turns[position].response_ids]
        for distance, token in enumerate(reversed(tokens)):
            found.setdefault(token, []).append(Fraction(trajectory.reward) * gamma**distance)
    return {token: sum(values) / len(values) for token, values in found.items()}


@given(trees(), trees(member=1, first_token=100))
@QUICK
def test_any_tree_is_trained_once_in_its_context_and_credited_by_definition(first, second):
    rollouts = rollouts_of([first, second])
    batch = credited(rollouts, gamma=0.5)
    assert int(batch.loss_mask.sum()) == first.num_response_tokens + second.num_response_tokens
    found = by_token(batch)
    expected = reference_returns(first, Fraction(1, 2)) | reference_returns(second, Fraction(1, 2))
    assert found == pytest.approx({token: float(value) for token, value in expected.items()}, abs=1e-6)
    walks = {t.id: [[*w] for w in t.branches] for t in (first, second)}
    for row in range(len(batch)):
        trajectory = rollouts.trajectories[int(rollouts.row_trajectory[row])]
        turns = rollouts.row_turns[row]
        (branch,) = [walk for walk in walks[trajectory.id] if walk[-1] == turns[-1]]
        whole = [x for k in branch for x in (*trajectory.turns[k].prompt_ids, *trajectory.turns[k].response_ids)]
        assert batch.row("token_ids", row).tolist() == whole
        assert list(turns) == branch[len(branch) - len(turns) :]


def test_roles_that_are_paid_apart_are_compared_with_themselves():
    def game(member: int, white: float, black: float) -> Trajectory:
        turns = (turn([10], role="white"), turn([20], role="black"), turn([30], prompt=[3], role="white"))
        paid = {"white": white, "black": black}
        return episode(*turns, member=member, role_rewards=paid, counts={"n": 1})

    group = Group(task=task(), trajectories=(game(0, 1.0, -1.0), game(1, 0.0, 3.0)))
    black, white = split_by_role(group)
    assert (black.task.id, white.task.id) == ("t@black", "t@white")
    assert [t.reward for t in (*black.trajectories, *white.trajectories)] == [-1.0, 3.0, 1.0, 0.0]
    # What white said is in front of black's turn, and what black said in front of white's next.
    assert [(t.prompt_ids, t.response_ids) for t in black.trajectories[0].turns] == [((7, 10, 7), (20,))]
    assert [t.prompt_ids for t in white.trajectories[0].turns] == [(7,), (7, 20, 3)]
    rollouts = assemble([group])
    assert rollouts.batch.unit_ids == ("t#0", "t#1", "t#0", "t#1"), "an episode stays together"
    assert rollouts.batch.row("action_mask", 2).tolist() == [False, True, False, False, False, True]
    found = credited_by(credit_stages(make_config(adv_estimator="dr_grpo")), fresh(rollouts, 1), step=1)[0].batch
    mask = found.action_mask
    assert_close(found.advantages[mask], torch.tensor([-2.0, 2.0, 0.5, 0.5, -0.5, -0.5]))
    metrics = rollout_metrics(rollouts).result()
    named = f"role/{task().tag}"
    assert metrics[f"{named}/white/reward"] == 0.5 and metrics[f"{named}/black/reward"] == 1.0
    assert metrics["n"] == 2.0, "counts of an episode count once"


def test_a_member_without_rewards_of_roles_is_worth_its_reward_to_each_of_them():
    turns = (turn([10], role="white"), turn([20], role="black"))
    apart = episode(*turns, role_rewards={"white": 1.0, "black": -1.0})
    shared = replace(episode(*turns, member=1), reward=0.5)
    black, white = split_by_role(Group(task=task(), trajectories=(apart, shared)))
    assert [t.reward for t in black.trajectories] == [-1.0, 0.5]
    assert [t.reward for t in white.trajectories] == [1.0, 0.5]
    assert int(assemble([Group(task=task(), trajectories=(apart, shared))]).batch.action_mask.sum()) == 4


def test_a_role_keeps_its_branches():
    turns = [replace(t, role="y" if k == 2 else "x") for k, t in enumerate(FORK)]
    tree = episode(*turns, role_rewards={"x": 1.0, "y": 0.0})
    parts = split_by_role(Group(task=task(), trajectories=(tree,)))
    by_role = {part.task.id: part.trajectories[0] for part in parts}
    assert by_role["t@x"].parents == (None, 0, 0)
    assert by_role["t@x"].turns[2].prompt_ids == (4, 5, 30, 31)
    assert [t.prompt_ids for t in by_role["t@y"].turns] == [(1, 2, 10, 11, 4, 5)]
    shared = replace(tree, role_rewards={})
    assert split_by_role(Group(task=task(), trajectories=(shared,)))[0].trajectories == (shared,)


def test_success_is_what_the_branch_says_that_asked_the_environment():
    assert episode_success(episode(FORK[0], replace(FORK[1], metrics={"success": 1.0}), FORK[2])) == 1.0
    assert episode_success(episode(FORK[0], FORK[2])) is None
    straight = (replace(FORK[0], metrics={"success": 1.0}), FORK[1])
    assert episode_success(episode(*straight)) is None, "an episode that went straight on ends with its last turn"
