"""One trajectory, several rows: a row for every context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_files import read_rollouts
from rows import R, make_config, make_rollouts

from roll.pipelines.rollouts.assemble import assemble
from roll.pipelines.rollouts.rollout_metrics import rollout_metrics
from roll.pipelines.run.report import RunReport
from roll.tracking.timing import Timers
from roll.types.trajectory import Group, Task, Trajectory, Turn

TASK = Task(id="maze", source="test", payload={}, seed=0, tag="maze", domain="maze")


def turn(prompt, response, reset=False):
    return Turn(
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        logprobs=tuple(-float(token) for token in response),
        versions=(4,) * len(response),
        finish_reason="stop",
        resets_context=reset,
    )


def group(*members, status="ok"):
    return Group(
        task=TASK,
        trajectories=tuple(
            Trajectory(task_id="maze", member=i, turns=turns, reward=float(i + 1), status=status)
            for i, turns in enumerate(members)
        ),
    )


def test_rows_of_a_trajectory_are_its_contexts_with_its_reward():
    two = (turn([1, 2], [3]), turn([4], [5, 6]), turn([7], [8], reset=True))
    one = (turn([9], [10]),)
    rollouts = assemble([group(two, one)])
    batch = rollouts.batch
    assert batch.row_ids == ("maze#0/0", "maze#0/1", "maze#1")
    assert batch.group_ids == ("maze",) * 3
    assert rollouts.rewards[rollouts.row_trajectory].tolist() == [1.0, 1.0, 2.0]
    assert rollouts.row_trajectory.tolist() == [0, 0, 1]
    assert rollouts.row_turns == (range(0, 2), range(2, 3), range(0, 1))
    assert len(rollouts.trajectories) == len(rollouts.tasks) == len(rollouts.group_index) == 2
    assert rollouts.response_lengths.tolist() == [4, 1]
    assert batch.row("token_ids", 0).tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.row("action_mask", 0).tolist() == [False, False, True, False, True, True]
    assert batch.row("sampling_logprobs", 0).tolist() == [0.0, 0.0, -3.0, 0.0, -5.0, -6.0]
    assert batch.row("versions", 0).tolist() == [-1, -1, 4, -1, 4, 4]
    assert batch.row("token_ids", 1).tolist() == [7, 8]


def test_tokens_that_were_drawn_otherwise_are_in_the_row_and_no_actions():
    hot = replace(turn([1, 2], [3, 4, 5]), num_fire_tokens=1)
    alone = replace(turn([1], [6]), num_fire_tokens=1)
    rollouts = assemble([group((hot,), (alone,))])
    batch = rollouts.batch
    assert batch.row("token_ids", 0).tolist() == [1, 2, 3, 4, 5]
    assert batch.row("action_mask", 0).tolist() == [False, False, False, True, True]
    assert batch.row("sampling_logprobs", 0).tolist() == [0.0, 0.0, 0.0, -4.0, -5.0]
    assert batch.row("versions", 0).tolist() == [-1, -1, -1, 4, 4]
    assert not batch.row("action_mask", 1).any(), "its reward still counts in its group"
    assert rollouts.response_lengths.tolist() == [3, 1]


def test_a_context_without_a_chosen_token_is_no_row_and_renames_no_other():
    rollouts = assemble([group((turn([1], []), turn([2], [3], reset=True), turn([4], [5], reset=True)))])
    assert rollouts.batch.row_ids == ("maze#0/1", "maze#0/2")
    assert rollouts.row_turns == (range(1, 2), range(2, 3))


def test_one_context_per_trajectory_is_one_row_each():
    rollouts = make_rollouts([R(1.0), R(0.0, 2)], [R(2.0)])
    assert rollouts.row_trajectory.tolist() == [0, 1, 2]
    assert rollouts.row_turns == (range(1),) * 3
    assert rollouts.batch.row_ids == tuple(t.id for t in rollouts.trajectories)


def test_episodes_of_several_rows_count_once_in_metrics():
    two = (turn([1, 2], [3]), turn([4], [5, 6], reset=True))
    values = rollout_metrics(assemble([group(two, (turn([9], [10]),))])).result()
    assert values["rollout/rows"] == 3 and values["rollout/responses"] == 2
    assert values["reward/mean"] == 1.5  # rewards 1 and 2
    assert values["response/length_mean"] == pytest.approx(4 / 3)  # of three responses
    assert values["tokens/response"] == 4 and values["tokens/prompt"] == 4


def test_a_dumped_row_shows_the_prompt_that_its_context_begins_with(tmp_path):
    two = (turn([1, 2], [3]), turn([4], [5, 6], reset=True), turn([7], [8]))
    config = make_config(rollout_dump_dir=str(tmp_path), logging_dir=str(tmp_path / "logs"), track_with=())
    report = RunReport(config, Timers(), NumberTokenizer(), resume_step=None)
    report.rollouts(1, assemble([group((turn([9], [10]),), two)]))
    rows = read_rollouts(next(tmp_path.glob("*.parquet")))
    assert [(row.member, row.prompt, row.response) for row in rows] == [
        (0, "9", "10"),
        (1, "1 2", "3"),
        (1, "4", "5 6 7 8"),
    ]
    assert [row.reward for row in rows] == [1.0, 2.0, 2.0]


class NumberTokenizer:
    """Token ids as decimal numbers."""

    def decode(self, ids):
        return " ".join(map(str, ids))


LENGTHS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans())


@given(st.lists(st.lists(LENGTHS, max_size=5), max_size=4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_chosen_token_is_in_exactly_one_row_and_rows_of_a_trajectory_are_together(shapes):
    members = [tuple(turn(range(p), range(100, 100 + r), reset) for p, r, reset in shape) for shape in shapes]
    rollouts = assemble([group(*members)])
    batch = rollouts.batch
    assert len(rollouts.trajectories) == sum(any(r for _, r, _ in shape) for shape in shapes)
    assert int(batch.action_mask.sum()) == sum(t.num_response_tokens for t in rollouts.trajectories)
    assert rollouts.row_trajectory.tolist() == sorted(rollouts.row_trajectory.tolist())
    assert len(set(batch.row_ids)) == len(batch) == len(rollouts.row_turns)
    for i, (place, turns) in enumerate(zip(rollouts.row_trajectory.tolist(), rollouts.row_turns, strict=True)):
        played = [rollouts.trajectories[place].turns[t] for t in turns]
        expected = [token for t in played for token in (*t.prompt_ids, *t.response_ids)]
        assert batch.row("token_ids", i).tolist() == expected
        assert batch.row("action_mask", i).any()


def test_columns_have_the_types_of_a_batch_and_the_values_of_their_turns():
    def odd(tokens):
        logprobs = tuple(-1.0 / token for token in tokens)  # not numbers of float32
        return replace(turn([1], tokens), logprobs=logprobs, versions=tuple(range(len(tokens))))

    batch = assemble([group((odd([3, 2**40, 7]),), (odd([11]), odd([13, 17])))]).batch
    assert batch.token_ids.dtype == batch.versions.dtype == torch.int64
    assert batch.action_mask.dtype == torch.bool
    assert batch.token_ids.tolist() == [1, 3, 2**40, 7, 1, 11, 1, 13, 17]
    assert batch.versions.tolist() == [-1, 0, 1, 2, -1, 0, -1, 0, 1]
    expected = [0.0, -1 / 3, -(2.0**-40), -1 / 7, 0.0, -1 / 11, 0.0, -1 / 13, -1 / 17]
    torch.testing.assert_close(batch.sampling_logprobs, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=0)


def test_columns_become_rows_without_a_number_of_python(monkeypatch):
    # Each costs some 30 bytes and 0.1 us, and a step has millions.
    played = group((turn([1, 2], [3, 4]), turn([5], [6])), (turn([1], [7, 8]),))
    monkeypatch.setattr("roll.types.columns.struct", None)  # a column that is read as a tuple fails
    batch = assemble([played]).batch
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 1, 7, 8]
    assert rollout_metrics(assemble([played])).result()["response/length_mean"] == 5 / 3
    with pytest.raises(AttributeError):
        assert played.trajectories[0].turns[0].response_ids


def test_a_batch_of_nothing_has_empty_columns():
    batch = assemble([]).batch
    assert [len(batch), len(batch.token_ids), len(batch.sampling_logprobs)] == [0, 0, 0]
