"""Actions that an environment draws: valid ones, from the given generator alone, and without changing anything."""

from __future__ import annotations

import random

import pytest

from roll.envs.base import InvalidAction
from roll.envs.baselines import TEXTS, random_action
from roll.envs.conformance import check_env
from roll.envs.env_registry import bare_env
from roll.envs.wrappers import EnvSpec


def made(env_type: str, **config):
    return bare_env(EnvSpec(tag="x", env_type=env_type, env_config=config))


def test_actions_of_a_box_are_drawn_from_it():
    env = made("gymnasium:MountainCarContinuous-v0")
    env.reset(3, {})
    drawn = [env.sample_action(random.Random(n)) for n in range(50)]
    assert drawn == [env.sample_action(random.Random(n)) for n in range(50)]
    assert len(set(drawn)) > 40
    for action in drawn:
        env.step(action)  # raises InvalidAction for one that isn't in the space


def test_drawing_changes_nothing_of_the_episode():
    one, other = made("gymnasium:MountainCarContinuous-v0"), made("gymnasium:MountainCarContinuous-v0")
    assert one.reset(2**62 + 1, {}) == other.reset(2**62 + 1, {})
    for n in range(10):
        one.sample_action(random.Random(n))
        assert one.step("0.5") == other.step("0.5")


def test_without_a_draw_of_its_own_an_action_is_a_name_or_a_text():
    lake, sums = made("frozen_lake-v1"), made("countdown-v1")
    assert lake.sample_action(random.Random(0)) is sums.sample_action(random.Random(0)) is None
    assert {random_action(lake, random.Random(n)) for n in range(50)} == set(lake.actions)
    assert {random_action(sums, random.Random(n)) for n in range(99)} == set(TEXTS)


@pytest.mark.parametrize(
    ("env_type", "config", "one"),
    [
        ("frozen_lake-v1", {}, False),
        ("frozen_lake-v1", {"map": ["SF", "FG"]}, True),
        ("frozen_lake-v1", {"map": ["SF", "FG"], "slippery": True}, False),
        ("gymnasium:CliffWalking-v1", {}, True),
    ],
)
def test_one_that_has_a_single_episode_says_so(env_type, config, one):
    assert made(env_type, **config).one_episode is one
    found = [f for f in check_env(lambda: made(env_type, **config), seeds=4, max_steps=20) if f.check == "seeds differ"]
    assert [f.level for f in found] == ["info" if one else "ok"], found


def test_an_action_outside_of_the_box_is_invalid():
    env = made("gymnasium:MountainCarContinuous-v0")
    env.reset(3, {})
    with pytest.raises(InvalidAction):
        env.step("1.5")
