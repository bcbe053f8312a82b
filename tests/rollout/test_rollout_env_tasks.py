"""Tasks of environments: one numbered sequence, whoever takes from it and however often it is interrupted."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.configs.schema.env_config import split_evenly
from roll.rollout.async_scheduler import ReadyGroup
from roll.rollout.buffer import load_groups, save_groups
from roll.rollout.env_tasks import EnvTasks
from roll.types.trajectory import Group, Trajectory
from roll.utils.readers import DataError

TYPES = {"small": "sokoban-v1", "large": "sokoban-v1", "lake": "frozen_lake-v1"}


def tasks_of(tags=("small", "lake"), partition=(2, 1), *, seed=5, split="train", **options):
    return EnvTasks(tags, partition, TYPES, seed=seed, split=split, **options)


def numbers(tasks):
    return [int(task.id.rsplit("-", 1)[1]) for task in tasks]


@pytest.mark.parametrize(
    ("partition", "order"),
    [
        ((2, 1), "s l s"),  # places of small 1/4, 3/4; of lake 1/2
        ((3, 1), "s s l s"),  # 1/6, 1/2, 5/6; 1/2, after the tag that is named first
        ((1, 0), "s"),
        ((1, 4), "l l s l l"),  # 1/2; 1/8, 3/8, 5/8, 7/8
    ],
)
def test_tags_alternate_as_the_partition_says(partition, order):
    tags = [task.tag[0] for task in tasks_of(partition=partition).take(2 * sum(partition))]
    assert tags == order.split() * 2


def test_a_task_says_what_is_played():
    first, second = tasks_of(options={"level": 3}).take(2)
    assert (first.id, first.tag, first.domain, first.source) == ("small-train-0", "small", "small", "sokoban-v1")
    assert (second.id, second.source, second.payload) == ("lake-train-1", "frozen_lake-v1", {"level": 3})


def test_seeds_are_the_same_on_every_machine():
    # stable_hash(5, "env", "train", "small", 0) >> 2, times 2; computed once.
    assert tasks_of().take(1)[0].seed == 185250949960994048
    assert tasks_of(split="val").take(1)[0].seed == 3666581751583115447


@given(
    seeds=st.tuples(st.integers(-(2**31), 2**63), st.integers(-(2**31), 2**63)),
    number=st.integers(0, 10**12),
    tag=st.sampled_from(sorted(TYPES)),
)
def test_train_and_val_never_share_a_seed_and_every_seed_fits_63_bits(seeds, number, tag):
    train = tasks_of(sorted(TYPES), (1, 1, 1), seed=seeds[0]).task(f"{tag}-train-{number}")
    val = tasks_of(sorted(TYPES), (1, 1, 1), seed=seeds[1], split="val").task(f"{tag}-val-{number}")
    assert (train.seed % 2, val.seed % 2) == (0, 1)
    assert 0 <= min(train.seed, val.seed) <= max(train.seed, val.seed) < 2**63


@given(partition=st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(sum), offset=st.integers(0, 40))
def test_any_cycle_of_tasks_has_the_partition_s_numbers(partition, offset):
    tags = sorted(TYPES)[: len(partition)]
    source = tasks_of(tags, partition)
    source.take(offset)
    counts = Counter(task.tag for task in source.take(sum(partition)))
    assert [counts[tag] for tag in tags] == partition


@given(moves=st.lists(st.tuples(st.sampled_from("tpl"), st.integers(0, 6)), max_size=30))
def test_any_order_of_take_put_back_and_resume_gives_the_same_sequence(moves):
    """Against a model: a plain list of the first tasks, in which what is put back goes to the front."""
    source, model, held = tasks_of(), tasks_of().take(200), []
    for move, n in moves:
        if move == "t":
            taken = source.take(n)
            assert taken == model[:n]
            model = model[n:]
            held += taken
        elif move == "p":
            back, held = held[:n], held[n:]
            source.put_back(back)
            model = back + model
        else:  # a kill: what is held is lost, and played again
            state = json.loads(json.dumps(source.state_dict(held)))
            source, model, held = tasks_of(), held + model, []
            source.load_state_dict(state)
    assert source.take(20) == model[:20]
    assert source.remaining is None


def test_the_validation_set_is_the_same_for_any_source_of_the_run_and_moves_no_cursor():
    source = tasks_of()
    source.take(7)
    fixed = source.validation_tasks(5)
    assert numbers(fixed) == [0, 1, 2, 3, 4]
    assert fixed == tasks_of(split="val").validation_tasks(5) == tasks_of(split="val").take(5)
    assert numbers(source.take(1)) == [7]


def test_a_resumed_run_may_have_another_partition_and_repeats_no_seed():
    before = tasks_of()
    old = before.take(4)
    before.put_back(old[3:])
    after = tasks_of(("small", "lake", "large"), (1, 1, 3))
    after.load_state_dict(before.state_dict())
    new = after.take(20)
    assert new[0] == old[3]
    assert numbers(new[1:]) == list(range(4, 23))
    assert not {task.seed for task in new[1:]} & {task.seed for task in old}


def test_groups_on_disk_find_their_tasks(tmp_path):
    (task,) = tasks_of().take(1)
    group = Group(task=task, trajectories=(Trajectory(task_id=task.id, member=2, turns=(), reward=0.0),))
    save_groups(tmp_path / "groups.parquet", [ReadyGroup(0, group, 3)])
    assert load_groups(tmp_path / "groups.parquet", tasks_of().task) == [ReadyGroup(0, group, 3)]


@pytest.mark.parametrize(("groups", "expected"), [(8, (3, 3, 2)), (6, (2, 2, 2)), (2, (1, 1, 0))])
def test_without_a_partition_groups_are_split_evenly(groups, expected):
    assert split_evenly(groups, ["a", "b", "c"]) == expected


@pytest.mark.parametrize(
    ("build", "message"), [(lambda: split_evenly(3, []), "no tags"), (lambda: tasks_of().take(-1), "can't take -1")]
)
def test_what_makes_no_sense_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("task_id", ["small-val-0", "small-train-x", "small-train-01", "small", "huge-train-0"])
def test_a_foreign_task_is_refused(task_id):
    with pytest.raises(DataError, match=f"task '{task_id}' is "):
        tasks_of().task(task_id)


def test_only_what_was_taken_can_be_put_back_and_only_once():
    source = tasks_of()
    task = source.task("small-train-2")
    with pytest.raises(ValueError, match="never taken"):
        source.put_back([task])
    source.take(3)
    with pytest.raises(ValueError, match="put back twice"):
        source.put_back([task, task])


def test_a_cursor_of_something_else_is_refused():
    with pytest.raises(DataError, match="seed = 6, this run has 5"):
        tasks_of().load_state_dict(tasks_of(seed=6).state_dict())
    with pytest.raises(DataError, match="of 'datasets'"):
        tasks_of().load_state_dict({"version": 1, "drawn": {}})
    saved = tasks_of(("large", "lake"), (1, 1))
    saved.put_back(saved.take(1))
    with pytest.raises(DataError, match=r"'large-train-0' is of a tag that this run doesn't have"):
        tasks_of().load_state_dict(saved.state_dict())
