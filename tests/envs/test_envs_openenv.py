"""`openenv:URL` against a server of our own that speaks the protocol."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from openenv_server import WORDS, serving

from roll.envs.adapters.openenv_client import OpenEnvError
from roll.envs.base import InvalidAction
from roll.envs.env_registry import EnvLoadError, bare_env
from roll.envs.wrappers import EnvSpec


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[int]]]:
    with serving() as found:
        yield found


def made(url: str, **config: Any) -> Any:
    return bare_env(EnvSpec(tag="echo", env_type=f"openenv:{url}", env_config=config))


@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_an_episode_is_played_and_its_text_goes_into_the_one_text_field(server: Any, transport: str):
    env = made(server[0], transport=transport, greeting="hello, ")
    assert env.reset(4, {}).text == f"hello, say {WORDS[4 % 3]}"
    wrong = env.step("pink")
    assert (wrong.reward, wrong.terminated, wrong.observation.text) == (0.0, False, "you said pink")
    right = env.step(WORDS[1])
    assert (right.reward, right.terminated, right.metrics) == (1.0, True, {"success": 1.0})
    env.close()


def test_sessions_are_apart_and_are_left_when_an_environment_is_closed(server: Any):
    one, two = made(server[0]), made(server[0])
    assert [one.reset(0, {}).text, two.reset(1, {}).text] == ["say red", "say green"]
    assert one.step("red").terminated and not two.step("red").terminated
    assert len(server[1]) == 2
    one.close(), two.close(), two.close()
    deadline = time.monotonic() + 5
    while server[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server[1] == []


def test_a_seed_of_63_bits_is_reduced_to_what_servers_take(server: Any):
    env, again = made(server[0]), made(server[0])
    assert env.reset(2**62 + 5, {}) == again.reset(2**62 + 5, {})
    env.close(), again.close()


@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_an_action_that_the_server_refuses_is_an_invalid_action(server: Any, transport: str):
    env = made(server[0], transport=transport, action_field="text")
    env.reset(0, {})
    with pytest.raises(InvalidAction, match="field required"):
        env.step("red")
    env.close()


def test_an_action_of_several_fields_is_a_json_object(server: Any, tmp_path: Any):
    hook = tmp_path / "hook.py"
    hook.write_text("def parse(text):\n    return {'message': text.split()[-1]}\n")
    env = made(server[0], parse=f"{hook}:parse")
    env.reset(0, {})
    assert env.step("I say red").terminated
    env.close()


def test_a_server_that_gives_no_answer_is_named_with_the_time(server: Any):
    env = made(server[0], timeout_s=0.2)
    env.reset(0, {})
    with pytest.raises(RuntimeError, match=r"ws://127.0.0.1:\d+/ws gave no answer to step in 0.2 s"):
        env.step("hang")
    env.close()


@pytest.mark.parametrize(
    ("url", "config", "said"),
    [
        ("127.0.0.1:1", {}, "isn't the address of a server"),
        ("http://127.0.0.1:1", {}, "can't be reached"),
        ("http://127.0.0.1:1", {"seed": 3}, "each episode has its own"),
        ("http://127.0.0.1:1", {"token_env": "NO_SUCH_TOKEN"}, "no environment variable NO_SUCH_TOKEN"),
        ("http://127.0.0.1:1", {"transport": "pigeon"}, "expected one of websocket, http"),
    ],
)
def test_what_cant_work_is_said_before_an_episode(url: str, config: dict[str, Any], said: str):
    with pytest.raises(EnvLoadError, match=said):
        made(url, **config)


@pytest.mark.parametrize(
    "answer", [{"reward": "1"}, {"reward": float("nan")}, {"done": "false"}, {"done": 1}, {"reward": 1.0, "done": "no"}]
)
def test_an_answer_whose_reward_or_end_is_no_such_thing_fails_and_is_not_guessed_at(server: Any, answer: Any):
    env = made(server[0])
    with pytest.raises(OpenEnvError, match="expected (a finite number as|true or false)"):
        env._read({"observation": {"text": "x"}, **answer})
    assert env._read({"observation": {"text": "x"}, "reward": None, "done": None})[1:] == (0.0, False)
