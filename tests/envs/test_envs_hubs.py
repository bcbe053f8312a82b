"""Environments of gymnasium and reasoning_gym through their adapters: seeds, random numbers, texts, ends."""

from __future__ import annotations

import asyncio
import inspect
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gym_spaces

from roll.configs.catalog.env_table import ENV_HUBS
from roll.envs.adapters import spaces
from roll.envs.adapters.gymnasium_solver import best_actions
from roll.envs.adapters.own_random import OwnRandom, narrow_seed
from roll.envs.base import Env, InvalidAction, ResetNeeded, StepResult
from roll.envs.env_pool import EnvPool
from roll.envs.env_registry import EnvLoadError, bare_env, build_env, load_env
from roll.envs.wrappers import EnvSpec

LARGE = 2**62 + 12345  # Seeds of runs have 63 bits
OFFLINE = [
    "gymnasium:CliffWalking-v1",
    "gymnasium:FrozenLake-v1",
    "gymnasium:Taxi-v4",
    "gymnasium:Blackjack-v1",
    "gymnasium:CartPole-v1",
    "gymnasium:Pendulum-v1",
    "gymnasium:MountainCarContinuous-v0",
    "gymnasium:Acrobot-v1",
    "reasoning_gym:chain_sum",
    "reasoning_gym:maze",
]


def made(env_type: str, **config: Any) -> Env:
    return bare_env(EnvSpec(tag="x", env_type=env_type, env_config=config))


def played(env: Env, seed: int, steps: int = 30) -> list[Any]:
    """What an episode shows while it is played at random."""
    rng, seen = random.Random(0), [env.reset(seed, {})]
    for _ in range(steps):
        action = rng.choice(env.actions) if env.actions else f"{rng.uniform(-1, 1):.3f}"
        seen.append(env.step(action))
        if seen[-1].terminated or seen[-1].truncated:
            break
    return seen


@pytest.mark.parametrize("env_type", OFFLINE)
def test_a_large_seed_plays_the_same_episode_in_two_instances_played_in_turns(env_type: str):
    one, two = made(env_type), made(env_type)
    first = played(one, LARGE)
    other = played(two, 3)  # between
    assert played(two, LARGE) == first == played(one, LARGE)
    assert other != first or "Cliff" in env_type
    one.close(), two.close()


@pytest.mark.parametrize("scheme", ENV_HUBS)
def test_every_scheme_has_an_adapter_that_is_found_without_its_package(scheme: str):
    found = load_env(ENV_HUBS[scheme].example)
    assert issubclass(found, Env) and not found.__abstractmethods__
    assert found is load_env(ENV_HUBS[scheme].example)


@pytest.mark.parametrize(
    ("env_type", "config", "said"),
    [
        ("gymnasium:", {}, "names no environment of gymnasium; write one, e.g. gymnasium:CliffWalking-v1"),
        ("gymnasium:CliffWalkin-v1", {}, "custom_envs.x.env_type: .*CliffWalkin"),
        ("gymnasium:no_such_module:Room-v0", {}, "No module named 'no_such_module'.* put its folder on PYTHONPATH"),
        ("gymnasium:CliffWalking-v1", {"slippery": True}, "unexpected keyword argument 'slippery'"),
        ("gymnasium:CliffWalking-v1", {"actions": ["a", "b"]}, "expected 4 different names"),
        ("gymnasium:CliffWalking-v1", {"success": "win"}, "expected one of reward, terminated, truncated, or a number"),
        ("gymnasium:CliffWalking-v1", {"actions": "Up"}, r"env_config.actions: got 'Up'"),
        ("reasoning_gym:chain_summ", {}, "did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum", {"seed": 1}, "seed: each episode has a seed of its own"),
        ("reasoning_gym:chain_sum", {"min_term": 1}, "min_term"),
    ],
)
def test_what_a_hub_doesnt_have_is_refused_by_key(env_type: str, config: dict[str, Any], said: str):
    with pytest.raises(EnvLoadError, match=said):
        made(env_type, **config)


@pytest.mark.parametrize("scheme", ["minigrid", "textarena", "gem"])
def test_a_package_that_is_missing_is_named_with_the_interpreter(scheme: str):
    hub = ENV_HUBS[scheme]
    try:
        __import__(hub.package)
    except ModuleNotFoundError:
        with pytest.raises(EnvLoadError, match=f"needs the package {hub.package}.*pip install {hub.install}.*python"):
            made(hub.example)


def test_boards_of_the_toy_games_are_worked_out_by_hand():
    cliff = made("gymnasium:CliffWalking-v1")
    row = " ".join("_" * 12)
    assert cliff.reset(0, {}).text == "\n".join([row, row, row, "P C C C C C C C C C C G"])
    fallen = cliff.step("Right")  # off the cliff, and back at the start
    assert (fallen.reward, fallen.terminated) == (-100.0, False)
    up = cliff.step("Up").observation
    assert up is not None and up.text.splitlines()[2:] == ["P" + row[1:], "_ C C C C C C C C C C G"]
    lake = made("gymnasium:FrozenLake-v1", is_slippery=False)
    lake.reset(0, {})
    down = lake.step("Down").observation  # the map of the package: SFFF FHFH FFFH HFFG
    assert down is not None and down.text == "_ _ _ _\nP O _ O\n_ _ _ O\nO _ _ G"
    taxi = made("gymnasium:Taxi-v4")
    text = taxi.reset(0, {}).text
    row_, column, passenger, destination = gymnasium_taxi(taxi)
    assert text.splitlines()[row_ + 1][2 * column + 1] == "T"
    assert f"at {'RGYB'[passenger]} and wants to go to {'RGYB'[destination]}" in text


def gymnasium_taxi(env: Any) -> tuple[int, int, int, int]:
    inner = env._env.unwrapped
    return tuple(inner.decode(inner.s))


def test_a_seed_that_fits_plays_what_gymnasium_plays_with_it():
    ours, theirs = made("gymnasium:Blackjack-v1"), gymnasium.make("Blackjack-v1")
    for seed in (0, 7, 2**31 - 1):
        hand, _ = theirs.reset(seed=seed)
        assert ours.reset(seed, {}).text.startswith(f"Your cards: {hand[0]}")
    assert narrow_seed(2**31 - 1, 31) == 2**31 - 1
    narrowed = {narrow_seed(LARGE + i, 31) for i in range(2000)}
    assert len(narrowed) == 2000 and max(narrowed) < 2**31 and min(narrowed) >= 0


@pytest.mark.parametrize(
    ("env_type", "config", "walk", "success", "truncated"),
    [
        ("CliffWalking-v1", {}, ["Up", *["Right"] * 11, "Down"], 1.0, False),  # the last reward is -1
        ("CliffWalking-v1", {"success": "reward"}, ["Up", *["Right"] * 11, "Down"], 0.0, False),
        ("CliffWalking-v1", {"success": -13}, ["Up", *["Right"] * 11, "Down"], 1.0, False),
        ("CliffWalking-v1", {"success": -12.5}, ["Up", *["Right"] * 11, "Down"], 0.0, False),
        ("FrozenLake-v1", {"is_slippery": False}, ["Right", "Down"], 0.0, False),  # a hole
        ("CartPole-v1", {"max_episode_steps": 3}, ["Left", "Right", "Left"], 1.0, True),
        ("MountainCar-v0", {"max_episode_steps": 2}, ["Left", "Left"], 0.0, True),
    ],
)
def test_what_is_a_success_and_what_is_cut_off(
    env_type: str, config: Mapping[str, Any], walk: list[str], success: float, truncated: bool
):
    env = made(f"gymnasium:{env_type}", **config)
    env.reset(0, {})
    *_, last = [env.step(action) for action in walk]
    assert (last.metrics["success"], last.truncated, last.terminated) == (success, truncated, not truncated)
    with pytest.raises(ResetNeeded):
        env.step(walk[0])


@pytest.mark.parametrize("env_type", ["gymnasium:CliffWalking-v1", "gymnasium:Taxi-v4", "reasoning_gym:chain_sum"])
def test_the_solution_solves_the_episode(env_type: str):
    env = build_env(EnvSpec(tag="x", env_type=env_type, action_pattern=None, max_steps=50))
    bare = made(env_type)
    for seed in (0, LARGE):
        env.reset(seed, {}), bare.reset(seed, {})
        walk = bare.solution(50)
        assert walk is not None
        result: StepResult = [env.step(action) for action in walk][-1]
        assert result.terminated and result.metrics["success"] == 1.0


def test_best_actions_of_a_table_worked_by_hand():
    # State 0: to the right (1.0) lies 1, whose action 1 pays 10; action 0 of state 0 pays 1 and ends.
    table = {
        0: {0: [(1.0, 2, 1.0, True)], 1: [(0.5, 1, 0.0, False), (0.5, 0, 0.0, False)]},
        1: {0: [(1.0, 0, -1.0, False)], 1: [(1.0, 2, 10.0, True)]},
        2: {0: [(1.0, 2, 0.0, True)], 1: [(1.0, 2, 0.0, True)]},
    }
    assert best_actions(table) == {0: 1, 1: 1, 2: 0}
    table[1][1] = [(1.0, 2, 1.0, True)]  # now 0.99 * (0.5 * 1 + 0.5 * V) < 1
    assert best_actions(table)[0] == 0


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (gym_spaces.Box(-2, 2, (1,)), "0.5", [0.5]),
        (gym_spaces.Box(-2, 2, (2,)), "-1, 1e-1", [-1, 0.1]),
        (gym_spaces.Box(-2, 2, (2,)), "[1 2]", [1, 2]),
        (gym_spaces.Box(-2, 2, (1,)), "3", "out of bounds"),
        (gym_spaces.Box(-2, 2, (1,)), "1 1", "expected a number"),
        (gym_spaces.Box(-2, 2, (1,)), "left 1", "expected a number"),
        (gym_spaces.Box(-2, 2, (1,)), "1e999", "out of bounds"),
        (gym_spaces.MultiDiscrete([3, 4]), "2 3", [2, 3]),
        (gym_spaces.MultiDiscrete([3, 4]), "2 4", "from 0 0 to 2 3"),
        (gym_spaces.MultiDiscrete([3, 4]), "0.5 1", "without fractions"),
        (gym_spaces.MultiBinary(3), "1 0 1", [1, 0, 1]),
        (gym_spaces.MultiBinary(3), "1 0 2", "each 0 or 1"),
    ],
)
def test_a_text_becomes_an_action_of_its_space_or_is_answered_with_how_to_write_one(space: Any, text: str, action: Any):
    read = spaces.reader(space)
    assert read is not None
    if isinstance(action, str):
        with pytest.raises(InvalidAction, match=action):
            read(text)
    else:
        assert space.contains(read(text)) and np.allclose(read(text), action)


def test_observations_of_nested_spaces_read_as_numbers():
    space = gym_spaces.Dict(
        {"at": gym_spaces.Box(-1, 1, (2,)), "door": gym_spaces.Discrete(3), "map": gym_spaces.MultiBinary((2, 2))}
    )
    value = {"at": np.array([0.12345678, -0.0], np.float32), "door": np.int64(2), "map": np.array([[0, 1], [1, 0]])}
    assert spaces.as_text(space, value) == "at: 0.1235 0\ndoor: 2\nmap: 0 1\n1 0"
    assert spaces.unreadable(space) == ""
    assert "12288 numbers" in spaces.unreadable(gym_spaces.Box(0, 255, (64, 64, 3)))
    assert "Graph" in spaces.unreadable(gym_spaces.Graph(gym_spaces.Discrete(2), None))


PIXELS = """
import gymnasium, numpy as np

class Pixels(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level = (options or {}).get("level", 1)
        return self.observation_space.low, {}
    def step(self, action):
        assert action in self.action_space
        return self.observation_space.low, float(sum(action)), True, False, {"is_success": action == (1, 1)}

gymnasium.register("Pixels-v0", Pixels)

def told(env, observation, info):
    return f"level {env.level}, mean {observation.mean():g}"

def read(env, text):
    if text not in ("both", "none"):
        raise ValueError("say both or none")
    return (1, 1) if text == "both" else (0, 0)
"""


def test_hooks_tell_what_has_no_text_and_read_what_has_no_names(tmp_path: Path):
    file = tmp_path / "pixels.py"
    file.write_text(PIXELS)
    hooks = {"render": f"{file}:told", "parse": f"{file}:read"}
    from roll.utils.importing import load_object

    load_object(hooks["render"])  # registers the id
    with pytest.raises(EnvLoadError, match=r"its observation is 12288 numbers.*give render: file.py:function"):
        made("gymnasium:Pixels-v0", parse=hooks["parse"])
    with pytest.raises(EnvLoadError, match=r"its actions are a Tuple space.*give parse: file.py:function"):
        made("gymnasium:Pixels-v0", render=hooks["render"])
    env = made("gymnasium:Pixels-v0", **hooks)
    assert env.reset(0, {"level": 7}).text == "level 7, mean 0"
    with pytest.raises(InvalidAction, match="say both or none"):
        env.step("some")
    end = env.step("both")
    assert (end.reward, end.metrics) == (2.0, {"success": 1.0})


def test_global_generators_are_lent_and_given_back():
    random.seed(5), np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5), np.random.seed(5)
    one, two = OwnRandom(1), OwnRandom(1)
    drawn: dict[OwnRandom, list[float]] = {one: [], two: []}
    for own in (one, two, two, one):
        with own.lent():
            drawn[own] += [random.random(), float(np.random.random())]
    assert drawn[one] == drawn[two] and len(set(drawn[one])) == 4
    with pytest.raises(KeyError), one.lent():
        raise KeyError
    assert (random.random(), np.random.random()) == expected


def test_a_game_that_draws_globally_is_played_alike_beside_others(tmp_path: Path):
    file = tmp_path / "dice.py"
    file.write_text(
        "import random, gymnasium\n"
        "class Dice(gymnasium.Env):\n"
        "    observation_space = action_space = gymnasium.spaces.Discrete(1000)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return random.randrange(1000), {}\n"
        "    def step(self, action):\n"
        "        return random.randrange(1000), 0.0, False, False, {}\n"
        "gymnasium.register('Dice-v0', Dice)\n"
        "def told(env, observation, info):\n"
        "    return str(observation)\n"
    )
    spec = EnvSpec(
        tag="dice",
        env_type=f"gymnasium:{file.stem}:Dice-v0",
        env_config={"render": f"{file}:told"},
        action_pattern=None,
    )

    async def texts(pool: EnvPool, name: str, seed: int) -> list[str]:
        seen = [(await pool.reset(name, "dice", seed, {})).text]
        for _ in range(3):
            result = await pool.step(name, "0")
            assert result.observation is not None
            seen.append(result.observation.text)
        return seen

    async def three(pool: EnvPool) -> list[list[str]]:
        return await asyncio.gather(texts(pool, "a", 1), texts(pool, "b", LARGE), texts(pool, "c", 1))

    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        with EnvPool({"dice": spec}) as pool:
            one, two, again = asyncio.run(three(pool))
    finally:
        sys.path.remove(str(tmp_path))
    assert one == again != two


@pytest.mark.parametrize("scheme", ENV_HUBS)
def test_the_page_of_hubs_names_every_argument(scheme: str):
    page = (Path(__file__).parents[2] / "docs" / "environment_hubs.md").read_text("utf-8")
    section = page.split(f"## `{scheme}:")[1].split("\n#")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert documented == inspect.signature(load_env(ENV_HUBS[scheme].example)).parameters.keys() - {"options"}
