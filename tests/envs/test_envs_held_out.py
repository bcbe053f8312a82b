"""A fifth of all rooms and maps is kept for validation: training never meets them, whatever the seed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from roll.envs.frozen_lake import FrozenLake
from roll.envs.held_out import is_held_out, room_of_part
from roll.envs.sokoban import Sokoban

SEEDS = range(150)
BARE = str.maketrans("$*@+", " . .")


def layouts(part):
    env = Sokoban(dim_room=5, part=part)
    found = set()
    for seed in SEEDS:
        env.reset(seed, {})
        found.add(env.grid.translate(BARE))
    return found


def maps(part):
    env = FrozenLake(part=part)
    found = set()
    for seed in SEEDS:
        env.reset(seed, {})
        found.add("".join(env.lake.rows))
    return found


@pytest.mark.parametrize("drawn", [layouts, maps])
def test_what_is_held_out_is_never_met_in_training(drawn):
    train, held_out = drawn("train"), drawn("held_out")
    assert not train & held_out
    assert len(train) > 20
    assert len(held_out) > 10
    assert train | held_out > drawn("all") - train  # the parts are the whole
    assert all(map(is_held_out, held_out))


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_seed_gives_the_same_room_of_a_part_in_any_process(part):
    env = Sokoban(dim_room=5, part=part)
    mine = [env.reset(seed, {}).text for seed in range(5)]
    code = f"from roll.envs.sokoban import Sokoban; env = Sokoban(dim_room=5, part={part!r})\n"
    code += "print(repr([env.reset(seed, {}).text for seed in range(5)]))"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert theirs.strip() == repr(mine)


def test_a_seed_whose_room_is_in_the_part_keeps_it():
    plain, train = Sokoban(dim_room=5), Sokoban(dim_room=5, part="train")
    same = 0
    for seed in SEEDS:
        room = plain.reset(seed, {}).text
        if not is_held_out(plain.grid.translate(BARE)):
            assert train.reset(seed, {}).text == room
            same += 1
    assert 100 < same < 140  # four fifths


def test_where_there_are_too_few_rooms_the_error_says_so():
    layout = next(str(n) for n in range(100) if not is_held_out(str(n)))
    with pytest.raises(ValueError, match="too few different ones"):
        room_of_part("held_out", 0, lambda _seed: layout, str)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Sokoban(part="rest"), "expected one of all, train, held_out"),
        (lambda: FrozenLake(part="rest"), "expected one of all, train, held_out"),
        (lambda: Sokoban(part="train", level_file="levels.txt"), "level_indices"),
        (lambda: FrozenLake(part="train", map=["SF", "FG"]), "leave it out"),
    ],
)
def test_a_part_that_is_none_is_refused(make, expected):
    with pytest.raises(ValueError, match=expected):
        make()
