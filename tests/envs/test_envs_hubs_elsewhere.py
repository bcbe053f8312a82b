"""minigrid, textarena and gem, in the interpreters that `make install-hubs` makes; skipped without them."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.envs.base import Env, InvalidAction, StepResult
from roll.envs.env_pool import EnvPool
from roll.envs.env_registry import EnvLoadError, bare_env, build_env
from roll.envs.wrappers import EnvSpec

ROOT = Path(__file__).parents[2]
PYTHONS = {
    "minigrid": ROOT / ".venv-hubs/bin/python",
    "textarena": ROOT / ".venv-hubs/bin/python",
    "gem": ROOT / ".venv-gem/bin/python",
}
LARGE = 2**62 + 12345


def spec_of(env_type: str, max_steps: int = 20, **config: Any) -> EnvSpec:
    python = PYTHONS[env_type.partition(":")[0]]
    if not (python.parents[1] / ".installed").exists():
        pytest.skip(f"there is no {python.relative_to(ROOT)}: make install-hubs")
    return EnvSpec(
        tag="x", env_type=env_type, env_config=config, python=str(python), action_pattern=None, max_steps=max_steps
    )


def made(env_type: str, **config: Any) -> Env:
    return bare_env(spec_of(env_type, **config))


def test_an_empty_room_of_minigrid_is_drawn_and_walked_as_worked_out_by_hand():
    env = made("minigrid:MiniGrid-Empty-5x5-v0", view="full")
    room = ["# # # # #", "# > . . #", "# . . . #", "# . . G #", "# # # # #"]
    head = "Mission: get to the green goal square\nYou carry: nothing\n"
    assert env.reset(0, {}).text.replace("  ", " ") == head + "\n".join(room)
    rewards = []
    for action in ("Forward", "Forward", "Right", "Forward", "Forward"):
        result = env.step(action)
        rewards.append(result.reward)
    assert (result.terminated, result.metrics) == (True, {"success": 1.0})
    assert rewards == pytest.approx([0, 0, 0, 0, 1 - 0.9 * 5 / 100])  # 100 = 4 * 5 * 5 steps at most
    env.reset(0, {})
    with pytest.raises(InvalidAction):
        env.step("Up")


def test_the_view_of_the_agent_in_minigrid_looks_up_and_hides_what_it_doesnt_see():
    env = made("minigrid:MiniGrid-DoorKey-5x5-v0")
    for seed in range(3):
        board = env.reset(seed, {}).text.splitlines()[2:]
        assert len(board) == 7 and board[-1].split()[3] == "^"
        assert set("".join(board)) - set("#.?^K LyG ") == set()


@pytest.mark.parametrize("env_type", ["minigrid:MiniGrid-DoorKey-5x5-v0", "minigrid:BabyAI-GoToRedBallNoDists-v0"])
def test_the_solution_of_a_grid_solves_it(env_type: str):
    env, played = made(env_type), build_env(spec_of(env_type, max_steps=60))
    for seed in (0, LARGE):
        env.reset(seed, {}), played.reset(seed, {})
        walk = env.solution(60)
        assert walk is not None
        result: StepResult = [played.step(action) for action in walk][-1]
        assert result.terminated and result.metrics["success"] == 1.0


def guess(env: Env, seed: int, form: str) -> StepResult:
    """Find the number of a game by halving what is left."""
    lowest, highest, told = 1, 20, env.reset(seed, {}).text
    assert "between 1 and 20" in told
    while True:
        number = (lowest + highest) // 2
        result = env.step(form.format(number))
        if result.observation is None:
            return result
        said = re.search(r"is (higher|lower)", result.observation.text)
        assert said is not None and str(form.format(number)) not in result.observation.text.splitlines()[0]
        lowest, highest = (number + 1, highest) if said[1] == "higher" else (lowest, number - 1)


def test_a_game_of_textarena_is_told_by_a_renderer_of_ones_own():
    renderer = f"{ROOT / 'examples/self_play/players.py'}:piles"
    env = made("textarena:Nim-v0", players=2, piles=[2, 3], render=renderer)
    assert env.reset(5, {}).text == "pile 0: 2\npile 1: 3"
    answer = env.step("[1 3]").observation
    assert (answer.text, answer.role) == ("pile 0: 2\npile 1: 0", "player_1")
    assert env.step("[0 2]").role_rewards == {"player_0": -1.0, "player_1": 1.0}


@pytest.mark.parametrize("form", ["[{}]", "{}", "I say [{}]"])
def test_a_game_of_textarena_is_won_and_shows_only_what_is_new(form: str):
    env = made("textarena:GuessTheNumber-v0")
    for seed in (0, LARGE):
        won = guess(env, seed, form)
        assert (won.reward, won.metrics) == (1.0, {"invalid_end": 0.0, "success": 1.0})


def test_a_response_without_an_answer_goes_to_the_game_as_it_is():
    spec = replace(spec_of("textarena:GuessTheNumber-v0"), action_pattern="<answer>(.*?)</answer>")
    env = build_env(replace(spec, thinking_tags=("<think>", "</think>")))
    env.reset(0, {})
    told = [env.step(said) for said in ("<think>[1]</think> [99]", "<answer>99</answer>")]
    assert "outside the range" in told[0].observation.text and told[0].metrics["format_errors"] == 0
    assert told[1].terminated and told[1].metrics["invalid_end"] == 1
    env.reset(0, {})
    assert env.step("<think>[1]</think> ").metrics["format_errors"] == 1


def test_a_game_of_textarena_ends_at_the_second_forbidden_move_in_a_row():
    env = made("textarena:GuessTheNumber-v0")
    env.reset(0, {})
    first = env.step("[99]")
    assert first.observation is not None and "outside the range" in first.observation.text
    assert env.step("[98]").metrics == {"invalid_end": 1.0, "success": 0.0}


def test_what_the_player_did_isnt_repeated_to_them():
    env = made("textarena:TowerOfHanoi-v0")
    env.reset(0, {})
    for move in ("[A C]", "A B"):
        observation = env.step(move).observation
        assert observation is not None and observation.text.startswith("You moved disk")


def test_the_wrapped_view_of_textarena_repeats_the_prompt():
    env = made("textarena:GuessTheNumber-v0", view="wrapped")
    prompt = env.reset(3, {}).text
    second = env.step("[1]").observation or env.reset(3, {})
    assert second.text.startswith(prompt) or second.text == prompt


@pytest.mark.parametrize(
    ("env_type", "said"),
    [
        ("textarena:TicTacToe-v0", "isn't for one player: The number of players has to be 2"),
        ("textarena:GuessTheNumbr-v0", "did you mean 'GuessTheNumber-v0"),
        ("gem:game:Gues", "has no environment 'game:Gues'; "),
        ("gem:math:GSM8K", "can't make 'math:GSM8K': .*datasets"),
        ("minigrid:MiniGrid-Emty-5x5-v0", "can't make 'MiniGrid-Emty-5x5-v0': .*doesn't exist"),
    ],
)
def test_what_cant_be_played_is_named(env_type: str, said: str):
    with pytest.raises(EnvLoadError, match=f"custom_envs.x.env_type: {env_type}: .*{said}"):
        made(env_type)


@pytest.mark.parametrize(
    ("env_type", "action"),
    [
        ("gem:game:Game2048-v0-easy", r"\boxed{{left}}"),  # draws a tile with each move, from the global generator
        ("gem:game:GuessTheNumber-v0-easy", r"\boxed{{{0}}}"),
        ("textarena:2048-v0", "[left]"),
        ("textarena:GuessTheNumber-v0", "[{0}]"),
        ("minigrid:MiniGrid-Dynamic-Obstacles-5x5-v0", "Right"),
    ],
)
def test_episodes_of_one_seed_are_alike_whatever_is_played_beside_them(env_type: str, action: str):
    async def episode(pool: EnvPool, name: str, seed: int) -> list[Any]:
        seen: list[Any] = [await pool.reset(name, "x", seed, {})]
        for turn in range(1, 5):
            seen.append(await pool.step(name, action.format(turn)))
            if seen[-1].observation is None:
                break
        return seen

    async def three(pool: EnvPool) -> list[list[Any]]:
        return await asyncio.gather(*(episode(pool, f"{i}", seed) for i, seed in enumerate((LARGE, 5, LARGE))))

    with EnvPool({"x": spec_of(env_type)}, start_timeout_s=120) as pool:
        pool.wait_ready()
        one, other, again = asyncio.run(three(pool))
    assert one == again
    assert one != other
