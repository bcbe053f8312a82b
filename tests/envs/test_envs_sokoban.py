"""Sokoban's rules, rewards and texts against positions worked by hand."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.envs.base import InvalidAction, ResetNeeded
from roll.envs.pixels import apng_bytes, png_bytes
from roll.envs.sokoban import Sokoban
from roll.envs.sokoban_board import ACTIONS
from roll.envs.sokoban_solver import solve


def grid(*inner: str) -> str:
    """A position with its outer wall."""
    edge = "#" * (len(inner[0]) + 2)
    return "\n".join([edge, *(f"#{row}#" for row in inner), edge])


def play(start: str, *actions: str, **arguments):
    env = Sokoban(**arguments)
    env.start_at(start)
    return env, [env.step(action) for action in actions]


@pytest.mark.parametrize(
    ("start", "action", "after"),
    [
        (("   ", " @ ", "$ ."), "Up", (" @ ", "   ", "$ .")),
        (("   ", " @ ", "$ ."), "Down", ("   ", "   ", "$@.")),
        (("   ", " @ ", "$ ."), "Left", ("   ", "@  ", "$ .")),
        (("   ", " @ ", "$ ."), "Right", ("   ", "  @", "$ .")),
        (("@$ .",), "Right", (" @$.",)),
        ((". $@",), "Left", (".$@ ",)),
        (("@", "$", " ", "."), "Down", (" ", "@", "$", ".")),
        ((".", " ", "$", "@"), "Up", (".", "$", "@", " ")),
        (("@.$",), "Right", (" +$",)),
        (("+ $",), "Right", (".@$",)),
        (("+. $$",), "Right", (".+ $$",)),
        (("@* $.",), "Right", (" +$$.",)),
        (("@*.$",), "Right", (" +*$",)),
    ],
)
def test_a_move_does_what_the_rules_say(start, action, after):
    env, (result,) = play(grid(*start), action)
    assert env.grid == grid(*after) == result.observation.state
    assert result.metrics["moved"] == 1


@pytest.mark.parametrize(
    ("start", "action"),
    [
        (("@ $.",), "Left"),
        (("@ $.",), "Up"),
        (("@#$.",), "Right"),
        (("@$ .", "#   "), "Down"),
        ((". @$",), "Right"),  # a box before the wall
        (("@$$ ..",), "Right"),  # two boxes
        (("@*$ .",), "Right"),
        (("@$*.",), "Right"),
        (("@$#.",), "Right"),
    ],
)
def test_what_is_in_the_way_stays_and_so_does_the_player(start, action):
    text = grid(*start)
    env, (result,) = play(text, action)
    assert env.grid == text
    assert (result.reward, result.terminated, result.metrics["moved"]) == (-0.1, False, 0)


def test_rewards_of_boxes_onto_and_off_targets():
    env, results = play(grid("@$.. $"), "Right", "Right", "Right")
    # onto the first target: -0.1 + 1; on to the second, still on one: -0.1; off it: -0.1 - 1
    assert [result.reward for result in results] == pytest.approx([0.9, -0.1, -1.1])
    assert [result.metrics["boxes_on_target"] for result in results] == [1, 0, -1]
    assert not any(result.terminated or "success" in result.metrics for result in results)
    assert env.grid == grid("  .+$$")


def test_the_last_box_ends_the_episode_and_pays_the_rest():
    env, results = play(grid("@ $.", "*   "), "Right", "Right")
    assert results[0].reward == pytest.approx(-0.1)
    assert results[1].reward == pytest.approx(-0.1 + 1 + 10)
    assert results[1].terminated and not results[1].truncated and results[1].observation is None
    assert results[1].metrics == {"moved": 1, "boxes_on_target": 1, "success": 1}
    assert env.grid == grid("  @*", "*   ")
    with pytest.raises(ResetNeeded):
        env.step("Up")


def test_rewards_can_be_set():
    rewards = {"reward_step": 0.0, "reward_box": 2.0, "reward_box_off": -3.0, "reward_done": 5.0}
    _, results = play(grid("@$. .$"), "Right", "Right", **rewards)
    assert [result.reward for result in results] == [2.0, -3.0]
    _, results = play(grid("@$."), "Right", **rewards)
    assert results[0].reward == 7.0


def test_unknown_actions_change_nothing():
    env, _ = play(grid("@$ ."))
    for action in ("up", "Jump", ""):
        with pytest.raises(InvalidAction, match="Up, Down, Left, Right"):
            env.step(action)
    assert env.grid == grid("@$ .")


def test_an_action_before_the_first_reset_is_refused():
    with pytest.raises(ResetNeeded):
        Sokoban().step("Up")


SHOWN = ("@ *", "$.#", "  .", "$  ")


def test_the_symbols_shown():
    env = Sokoban(observation="symbols")
    expected = "# # # # #\n# P _ √ #\n# X O # #\n# _ _ O #\n# X _ _ #\n# # # # #"
    assert env.start_at(grid(*SHOWN)).text == expected
    assert "P player" in env.instructions and "√ box on target" in env.instructions


def test_the_words_shown():
    env = Sokoban(observation="text")
    assert env.start_at(grid("+$", " #")).text == (
        "wall wall wall wall\nwall player_on_target box wall\nwall floor wall wall\nwall wall wall wall"
    )


def test_the_coordinates_shown():
    env = Sokoban(observation="coordinates")
    assert env.start_at(grid(*SHOWN)).text == (
        "Room: 4 rows, 3 columns, walls around them\nInner walls: (2, 3)\nTargets: (1, 3) (2, 2) (3, 3)\n"
        "Boxes: (1, 3) (2, 1) (4, 1)\nYou: (1, 1)"
    )
    assert "row 1 is the top" in env.instructions


@pytest.mark.parametrize("observation", ["symbols", "text", "coordinates"])
@given(seed=st.integers(0, 2**62), actions=st.lists(st.sampled_from(ACTIONS), max_size=40))
@settings(max_examples=25, deadline=None)
def test_random_play_keeps_boxes_player_and_walls(observation, seed, actions):
    env = Sokoban(dim_room=(7, 6), num_boxes=2, observation=observation)
    first = env.reset(seed, {}).state

    def fixed(state: str) -> tuple[str, str]:
        """Walls, and targets."""
        return re.sub("[^#\n]", " ", state), re.sub("[^.*+]", " ", state.replace("*", ".").replace("+", "."))

    for action in actions:
        before = env.grid
        result = env.step(action)
        after = env.grid
        assert len(re.findall("[@+]", after)) == 1
        assert len(re.findall("[$*]", after)) == 2
        assert fixed(after) == fixed(first)
        assert result.metrics["moved"] == (before != after)
        assert result.metrics["boxes_on_target"] == after.count("*") - before.count("*")
        assert result.terminated == (after.count("*") == 2)
        if result.terminated:
            break
        # What is shown after some moves is what a fresh environment shows of the same state.
        assert result.observation.state == after
        assert Sokoban(observation=observation).start_at(after) == result.observation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim_room": 2}, "dim_room: got 2, expected a whole number of at least 3"),
        ({"dim_room": (6, 6, 6)}, "dim_room: got .*expected one number, or two"),
        ({"dim_room": "6"}, "dim_room: got '6'"),
        ({"dim_room": (4, 4)}, "dim_room: .*one side at least 5"),
        ({"dim_room": (3, 5), "num_boxes": 2}, "dim_room: .*3 cells inside the wall.*need 4 or more"),
        ({"num_boxes": 0}, "num_boxes: got 0"),
        ({"num_boxes": True}, "num_boxes: got True"),
        ({"min_solution": 0}, "min_solution: got 0"),
        ({"min_solution": 8, "max_solution": 7}, "max_solution: got 7, expected at least min_solution=8"),
        ({"observation": "pixels"}, "observation: got 'pixels', expected 'symbols'"),
        ({"reward_box": "1"}, "reward_box: got '1', expected a finite number"),
        ({"reward_done": float("nan")}, "reward_done: got nan"),
        ({"level_indices": [1]}, "level_indices: got some without a level_file"),
        ({"level_file": "nowhere.txt"}, "no level file 'nowhere.txt'"),
        ({"level_file": "nowhere.txt", "num_boxes": 4}, "leave out dim_room, num_boxes"),
    ],
)
def test_wrong_arguments_name_themselves(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sokoban(**arguments)


def test_options_are_refused():
    with pytest.raises(ValueError, match="no options, got level"):
        Sokoban().reset(0, {"level": 3})


def test_its_solution_solves_it_from_where_it_stands(monkeypatch):
    env = Sokoban()
    assert env.solution(100) is None  # there is no episode
    env.reset(3, {})
    first = env.solution(100)
    env.step(first[0])
    assert env.solution(100) == first[1:]
    results = [env.step(action) for action in first[1:]]
    assert results[-1].metrics["success"] == 1 and env.solution(100) is None
    env.start_at(grid("$  ", " @ ", "  ."))
    assert env.solution(100) is None  # a box in a corner
    monkeypatch.setattr("roll.envs.sokoban.solve", lambda grid: solve(grid, max_nodes=1))
    env.start_at(grid("    ", "@$ .", "    "))
    assert env.solution(100) is None  # the search was given up


def test_the_seven_kinds_of_cells_look_different():
    env = Sokoban()
    means = {}
    for inner in ("@ *$.", "+ *$$."):
        env.start_at(grid(inner))
        pixels = env.render()
        assert pixels.dtype == np.uint8 and pixels.shape == (3 * 24, 24 * len(inner) + 48, 3)
        for column, sign in enumerate(f"#{inner}#"):
            means[sign] = pixels[24:48, column * 24 : column * 24 + 24].reshape(-1, 3).mean(axis=0)
    assert sorted(means) == sorted("# .$*@+")
    for one in means:
        for other in means:
            assert one == other or np.abs(means[one] - means[other]).max() > 3


def test_pictures_can_be_read_back():
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (5, 7, 3), dtype=np.uint8) for _ in range(3)]
    assert np.array_equal(np.asarray(image.open(io.BytesIO(png_bytes(frames[0])))), frames[0])
    animated = image.open(io.BytesIO(apng_bytes(frames, seconds_per_frame=0.25)))
    assert animated.n_frames == 3
    for number, frame in enumerate(frames):
        animated.seek(number)
        assert animated.info["duration"] == 250
        assert np.array_equal(np.asarray(animated.convert("RGB")), frame)


def test_what_is_no_picture_is_refused():
    good = np.zeros((2, 2, 3), dtype=np.uint8)
    for wrong in (good.astype(float), good[0], good[:, :, :1], good[:0]):
        with pytest.raises(ValueError, match="expected uint8"):
            png_bytes(wrong)
    with pytest.raises(ValueError, match="all of one size"):
        apng_bytes([good, np.zeros((3, 2, 3), dtype=np.uint8)])
    with pytest.raises(ValueError, match="no frames"):
        apng_bytes([])
