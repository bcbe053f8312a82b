"""FrozenLake: gymnasium's dynamics, maps from seeds, slips from seed and step, and the solver."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.envs.base import InvalidAction, ResetNeeded
from roll.envs.frozen_lake import COAT, GOAL, TILE, WATER, FrozenLake
from roll.envs.frozen_lake_map import ACTIONS, NO_ACTION, Lake, best_actions, parse_rows, random_rows

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")


@pytest.mark.parametrize("slippery", [False, True])
@pytest.mark.parametrize("rows", [MAP, random_rows(6, 0.7, 3)])
def test_the_transitions_are_gymnasiums(rows, slippery):
    pytest.importorskip("gymnasium")
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    theirs = FrozenLakeEnv(desc=list(rows), is_slippery=slippery).unwrapped.P
    lake = Lake(rows, 1 / 3 if slippery else 1.0)
    for cell, by_action in theirs.items():
        for action, outcomes in by_action.items():
            ours = lake.outcomes(cell, action)
            assert [after for _, after in ours] == [after for _, after, _, _ in outcomes]
            np.testing.assert_allclose([chance for chance, _ in ours], [chance for chance, *_ in outcomes], rtol=1e-12)
            ends = [over for _, _, _, over in outcomes]
            assert [lake.sign(after) in "GH" for _, after in ours] == ends


@pytest.mark.parametrize("slippery", [False, True])
def test_a_walk_has_gymnasiums_rewards_and_ends(slippery):
    pytest.importorskip("gymnasium")
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    theirs = FrozenLakeEnv(desc=list(MAP), is_slippery=slippery, reward_schedule=(2, -1, -0.5)).unwrapped.P
    env = FrozenLake(map=MAP, slippery=slippery, reward_goal=2, reward_hole=-1, reward_step=-0.5)
    for seed in range(20):
        env.reset(seed, {})
        for n in range(30):
            before = env._cell
            result = env.step(ACTIONS[(seed + n * 7) % 4])
            outcomes = theirs[before][(seed + n * 7) % 4]
            assert (env._cell, result.reward, result.terminated) in [outcome[1:] for outcome in outcomes]
            if result.terminated:
                break


def test_the_picture_in_text_and_its_state():
    env = FrozenLake(map=MAP)
    first = env.reset(0, {})
    assert first.text == "P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G"
    after = env.step("Down").observation
    assert after is not None
    assert after.text == "_ _ _ _\nP O _ O\n_ _ _ O\nO _ _ G"
    assert after.state != first.state
    back = env.step("Up").observation
    assert back is not None
    assert back.state == first.state


def test_the_goal_is_a_success_and_a_hole_is_not():
    env = FrozenLake(map=MAP, reward_goal=5, reward_hole=-2)
    env.reset(0, {})
    *steps, last = [env.step(action) for action in ("Down", "Down", "Right", "Right", "Down", "Right")]
    assert not any(step.terminated for step in steps)
    assert (last.reward, last.terminated, last.truncated, last.observation) == (5, True, False, None)
    assert last.metrics["success"] == 1
    env.reset(0, {})
    env.step("Down")
    fell = env.step("Right")
    assert (fell.reward, fell.terminated, fell.metrics["success"]) == (-2, True, 0)
    with pytest.raises(ResetNeeded):
        env.step("Up")


def test_an_unknown_action_changes_nothing():
    env = FrozenLake(map=MAP, slippery=True)
    env.reset(0, {})
    with pytest.raises(InvalidAction, match="expected one of Left, Down, Right, Up"):
        env.step("Sideways")
    other = FrozenLake(map=MAP, slippery=True)
    other.reset(0, {})
    assert env.step("Down") == other.step("Down")


@given(size=st.integers(2, 9), p=st.floats(0, 1), seed=st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_every_random_map_has_a_way(size, p, seed):
    rows = parse_rows(random_rows(size, p, seed))
    assert (len(rows), len(rows[0])) == (size, size)
    assert rows[0][0] == "S"
    assert rows[-1][-1] == "G"
    assert best_actions(Lake(rows), size * size)[-1, 0] != NO_ACTION
    assert random_rows(size, p, seed) == rows


def test_maps_and_slips_are_pinned_for_all_time():
    # A change here plays other episodes under the same seed: it would be frozen_lake-v2.
    assert random_rows(4, 0.8, 7) == ("SFFH", "HFFF", "FFFF", "FHHG")
    env = FrozenLake(map=["SFFF", "FFFF", "FFFF", "FFFG"], slippery=True)
    env.reset(7, {})
    cells = []
    for _ in range(6):
        env.step("Right")
        cells.append(env._cell)
    assert cells == [1, 5, 1, 5, 9, 10]


def test_one_slips_as_often_as_said():
    env = FrozenLake(map=["FFF", "FSF", "FFG"], slippery=True, success_rate=0.5)
    reached = []
    for seed in range(2000):
        env.reset(seed, {})
        env.step("Up")
        reached.append(env._cell)
    # Up leads to cell 1; Left (3) and Right (5) have a quarter each. 2000 draws: a deviation of 0.05 is over 4 sigma.
    shares = [reached.count(cell) / 2000 for cell in (1, 3, 5)]
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.25], atol=0.05)


def test_the_solver_finds_shortest_ways():
    env = FrozenLake(map=MAP)
    for time_left in (6, 7, 100):  # no dawdling where there is time
        env.reset(0, {})
        walk = env.solution(time_left)
        assert len(walk) == 6
        assert [env.step(action) for action in walk][-1].metrics["success"] == 1


def test_the_solver_reaches_the_known_optimum_on_slippery_ice():
    # 14/17 is the probability of ever reaching the goal of gymnasium's 4x4 map under its best policy.
    lake = Lake(MAP, 1 / 3)
    assert success_probability(lake, best_actions(lake, 3000)) == pytest.approx(14 / 17, abs=1e-4)


@pytest.mark.parametrize("steps", [6, 8, 13])
def test_with_little_time_the_solver_takes_what_risk_it_must(steps):
    lake = Lake(MAP, 0.8)

    @cache
    def best(cell, left):  # the definition, cell by cell
        if left == 0 or lake.sign(cell) in "GH":
            return float(lake.sign(cell) == "G")
        return max(sum(p * best(after, left - 1) for p, after in lake.outcomes(cell, action)) for action in range(4))

    assert success_probability(lake, best_actions(lake, steps)) == pytest.approx(best(lake.start, steps), abs=1e-5)
    # The policy for ever takes detours, for which there is no time now.
    patient = np.repeat(best_actions(lake, 1000)[-1:], steps + 1, axis=0)
    assert success_probability(lake, patient) < best(lake.start, steps) - 0.01


def success_probability(lake, actions):
    """How likely the goal is reached by these actions, [steps + 1, cells], from the start."""
    chance = np.zeros(lake.num_cells)
    chance[lake.start] = 1.0
    for row in actions[:0:-1]:
        after = np.zeros(lake.num_cells)
        for cell in np.flatnonzero(chance):
            if row[cell] == NO_ACTION:
                after[cell] += chance[cell]
            else:
                for probability, reached in lake.outcomes(int(cell), row[cell]):
                    after[reached] += chance[cell] * probability
        chance = after
    return sum(chance[cell] for cell in range(lake.num_cells) if lake.sign(cell) == "G")


def test_the_solver_knows_where_the_goal_is_out_of_reach():
    assert (best_actions(Lake(("SFHF", "FFHG")), 20)[:, :2] == NO_ACTION).all()
    env = FrozenLake(map=["SH", "HG"])
    env.reset(0, {})
    assert env.solution(20) is None
    env = FrozenLake(map=MAP)
    env.reset(0, {})
    assert env.solution(5) is None  # it takes six


def test_solutions_solve_also_where_one_slips():
    env = FrozenLake(size=4, slippery=True, success_rate=0.8)
    solved = 0
    for seed in range(40):
        env.reset(seed, {})
        actions = env.solution(100)
        if actions is None:
            continue
        *_, last = [env.step(action) for action in actions]
        assert last.metrics["success"] == 1
        solved += 1
    assert solved > 20


def test_the_picture_shows_player_hole_and_goal():
    env = FrozenLake(map=MAP)
    env.reset(0, {})
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((4 * TILE, 4 * TILE, 3), np.uint8)
    half = TILE // 2
    assert tuple(picture[half, half]) == COAT
    assert tuple(picture[TILE + half, TILE + half]) == WATER
    assert tuple(picture[-half, -half]) == GOAL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 1}, "size: got 1"),
        ({"p": 1.5}, "p: got 1.5"),
        ({"map": ["SG", "F"]}, "rows of one length"),
        ({"map": ["FG"]}, "one S and at least one G"),
        ({"map": "SG"}, "expected rows"),
        ({"map": ["SG"], "size": 5}, "leave out size and p"),
    ],
)
def test_arguments_that_make_no_lake_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FrozenLake(**arguments)


def test_options_are_refused():
    with pytest.raises(ValueError, match="has no options, got level"):
        FrozenLake().reset(0, {"level": 1})
