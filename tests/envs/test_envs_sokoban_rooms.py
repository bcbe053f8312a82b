"""Rooms from seeds, level files, and the solver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.envs.sokoban import Sokoban
from roll.envs.sokoban_board import parse_board
from roll.envs.sokoban_rooms import RoomSettings, generate_room, load_levels
from roll.envs.sokoban_solver import SearchLimitError, solve

# Another text here means other rooms for the same seed: that needs a new version of the id, sokoban-v2.
GOLDEN_6X6 = """\
###### ###### ###### ###### ######
##  ## ##@ ## # #### ###  # ##   #
## @ # # $  # # $.## ### $# ##   #
#. $ # #.   # #@ ### ##  +# #   @#
#    # #    # #   ## ##  ## # $ .#
###### ###### ###### ###### ######"""
GOLDEN_9X9 = """\
######### ######### ######### ######### #########
####.   # ######### ######  # #.      # #####   #
#### .  # ###     # #######.# #.$$  . # ##### $ #
##### $ # ##  $   # #####  $# #   .   # ##.  $@ #
#####   # ##$@.   # #####. .# ## $  ### ####.   #
##   $$ # #  $    # ##    $ # ##     ## #       #
### $+. # #     ..# # $ $ @.# #####$ ## # $$    #
###     # #. $    # #      ## #####@### #  .   .#
######### ######### ######### ######### #########"""


def side_by_side(rooms: list[str]) -> str:
    return "\n".join(" ".join(rows) for rows in zip(*(room.split("\n") for room in rooms), strict=True))


def test_rooms_of_a_seed_never_change():
    assert side_by_side([generate_room(RoomSettings(6, 6, 1), seed) for seed in range(5)]) == GOLDEN_6X6
    assert side_by_side([generate_room(RoomSettings(9, 9, 4), seed) for seed in range(5)]) == GOLDEN_9X9


def test_another_process_gets_the_same_room():
    code = "from roll.envs.sokoban import Sokoban; print(Sokoban(dim_room=8, num_boxes=3).reset(11, {}).state)"
    here = Sokoban(dim_room=8, num_boxes=3).reset(11, {}).state
    for hash_seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert there.stdout.strip() == here


def test_seeds_give_different_rooms():
    rooms = {generate_room(RoomSettings(6, 6, 1), seed) for seed in range(200)}
    assert len(rooms) > 190


def test_what_was_played_before_does_not_matter():
    env = Sokoban(dim_room=(7, 8), num_boxes=2)
    first = env.reset(5, {})
    env.step("Up")
    env.reset(6, {})
    env.step("Left")
    assert env.reset(5, {}) == first == Sokoban(dim_room=(7, 8), num_boxes=2).reset(5, {})


@given(height=st.integers(3, 9), width=st.integers(5, 9), num_boxes=st.integers(1, 3), seed=st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_the_solution_found_solves_the_room_in_the_environment(height, width, num_boxes, seed):
    if height < 5:  # corridors of one or two rows have no room for more
        num_boxes = 1
    env = Sokoban(dim_room=(height, width), num_boxes=num_boxes)
    room = env.reset(seed, {}).state
    board = parse_board(room)
    assert (board.height, board.width, board.boxes.bit_count()) == (height, width, num_boxes)
    assert board.boxes != board.targets
    moves = solve(room)
    assert moves
    for number, move in enumerate(moves, start=1):
        result = env.step(move)
        assert result.terminated == (number == len(moves))
        if number == len(moves) // 2:  # from the midpoint as many moves are left
            assert len(solve(env.grid)) == len(moves) - number
    assert result.metrics["success"] == 1


@pytest.mark.parametrize(
    ("size", "num_boxes", "shortest", "longest"), [(6, 1, 3, 5), (6, 1, 10, None), (6, 2, 1, 4), (10, 4, 4, 8)]
)
def test_bounds_of_the_solution_are_kept(size, num_boxes, shortest, longest):
    for seed in range(20):
        moves = solve(generate_room(RoomSettings(size, size, num_boxes, shortest, longest), seed))
        assert shortest <= len(moves) <= (longest or 1000)


def test_long_solutions_in_large_rooms_are_searched_for():
    moves = solve(generate_room(RoomSettings(9, 9, 2, min_solution=25), 0))
    assert len(moves) >= 25


def test_crowded_rooms_may_begin_with_boxes_on_targets():
    for seed in range(5):
        room = generate_room(RoomSettings(5, 5, 4), seed)
        assert room.count("$") + room.count("*") == 4
        assert solve(room)


def test_settings_that_cannot_be_met_are_named():
    expected = r"dim_room=\(3, 5\), num_boxes=1, min_solution=2, max_solution=any: use a larger dim_room"
    with pytest.raises(ValueError, match=expected):
        Sokoban(dim_room=(3, 5), min_solution=2).reset(0, {})


def shortest_by_brute_force(room: str) -> int | None:
    """Breadth-first search over single positions with the environment's own step."""
    env = Sokoban()
    queue, seen = deque([(room, 0)]), {room}
    while queue:
        state, moves = queue.popleft()
        for action in env.actions:
            env.start_at(state)
            if env.step(action).terminated:
                return moves + 1
            if env.grid not in seen:
                seen.add(env.grid)
                queue.append((env.grid, moves + 1))
    return None


@pytest.mark.parametrize("seed", range(6))
def test_solutions_are_as_short_as_brute_force_finds(seed):
    room = generate_room(RoomSettings(6, 6, 1 + seed % 2), seed)
    assert len(solve(room)) == shortest_by_brute_force(room)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (("#####", "#@$.#", "#####"), ["Right"]),
        (("#####", "# *@#", "#####"), []),
        (("######", "#@ $.#", "######"), ["Right", "Right"]),
        # Round the box, then push it up: with equal ways round the answer is always this one.
        (("#####", "# . #", "# $ #", "# @ #", "#####"), ["Up"]),
        (("#####", "# @ #", "# $ #", "# . #", "#####"), ["Down"]),
        (("#####", "#@. #", "# $ #", "#   #", "#####"), ["Down", "Down", "Right", "Up"]),
        (("#####", "#$ @#", "#  .#", "#####"), None),  # in a corner
        (("######", "#@ $.#", "#  $.#", "#    #", "######"), ["Right", "Right", "Left", "Down", "Right"]),
        (("#######", "#  #@ #", "#.$#  #", "#######"), None),  # shut off
        (("######", "#@$$ #", "#..  #", "######"), None),  # along the wall, side by side
    ],
)
def test_solutions_worked_by_hand(rows, expected):
    assert solve("\n".join(rows)) == expected


def test_the_solver_says_when_it_gives_up():
    with pytest.raises(SearchLimitError, match="max_nodes=100"):
        solve(generate_room(RoomSettings(10, 10, 4), 1), max_nodes=100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("####\n#@$.#", "row 2 has 5 cells, the first row 4"),
        ("#####\n#@$.#\n# x #\n#####", "row 3 has 'x'"),
        ("#####\n#@$. \n#####", "row 2 has a gap in the outer wall"),
        ("#####\n#@$.#", "row 2 has a gap in the outer wall"),
        ("#####\n# $.#\n#####", "got 0 players"),
        ("######\n#@@$.#\n######", "got 2 players"),
        ("#####\n#@$ #\n#####", "got 1 boxes.*0 targets"),
        ("#####\n#@  #\n#####", "got 0 boxes"),
        ("", "the first row is empty"),
    ],
)
def test_a_text_that_is_no_position_says_why(text, message):
    with pytest.raises(ValueError, match=message):
        parse_board(text)


def test_text_and_board_are_the_same_position():
    text = "######\n#+ $ #\n#*# .#\n#  $ #\n######"
    assert parse_board(text).text() == text


LEVELS = "; 3\n#####\n#@$.#\n#####\n\n; 7\n######\n#@ $.#\n######\n"


def test_levels_are_picked_by_seed(tmp_path):
    path = tmp_path / "levels.txt"
    path.write_text(LEVELS)
    assert list(load_levels(path)) == [3, 7]
    env = Sokoban(level_file=str(path))
    states = [env.reset(seed, {}).state for seed in range(20)]
    assert set(states) == set(load_levels(path).values())
    assert states == [Sokoban(level_file=str(path)).reset(seed, {}).state for seed in range(20)]
    only = Sokoban(level_file=str(path), level_indices=[7])
    assert {only.reset(seed, {}).state for seed in range(20)} == {load_levels(path)[7]}
    with pytest.raises(ValueError, match=r"level_indices: no level 4 in .*levels.txt; the file has 3 to 7"):
        Sokoban(level_file=str(path), level_indices=[3, 4])


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "levels.txt"
    path.write_text(LEVELS)
    assert len(load_levels(path)) == 2
    path.write_text(LEVELS.split("\n\n", maxsplit=1)[0])
    assert len(load_levels(path)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"levels.txt: no level in it"),
        ("#####\n#@$.#\n#####\n", r"levels.txt:1: got '#####', expected a heading"),
        ("; one\n#####\n", r"levels.txt:1: got '; one', expected ';' and the number"),
        (LEVELS + "; 3\n#####\n", r"levels.txt:10: there is a level 3 already"),
        ("; 0\n\n; 1\n", r"levels.txt:1: level 0 has no rows"),
        (LEVELS.replace("@ $", "@ ?"), r"levels.txt:6: level 7: row 2 has '\?'"),
    ],
)
def test_a_broken_level_file_says_where(tmp_path, text, message):
    path = tmp_path / "levels.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_levels(path)


def test_every_boxoban_level_can_be_read_and_played(shared_data):
    files = sorted((shared_data / "boxoban").glob("*.txt"))
    if not files:
        pytest.skip("needs ../shared/data/boxoban, which isn't here")
    for file in files:
        levels = load_levels(file)
        assert list(levels) == list(range(len(levels))) and len(levels) == 1000
        for text in levels.values():
            board = parse_board(text)
            assert (board.height, board.width, board.boxes.bit_count()) == (10, 10, 4)
            assert board.text() == text
    env = Sokoban(level_file=str(shared_data / "boxoban" / "medium_valid_000.txt"), level_indices=[1, 2, 3, 7])
    env.reset(0, {})
    for move in solve(env.grid):
        result = env.step(move)
    assert result.metrics == {"moved": 1, "boxes_on_target": 1, "success": 1}
