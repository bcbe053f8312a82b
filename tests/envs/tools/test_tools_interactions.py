"""Simulated users by themselves: a model behind a service, a class with a configuration, limits of time."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from roll.configs.schema.tool_config import InteractionConfig
from roll.envs.tools.interactions import Interactions
from roll.types.trajectory import EpisodeError

OWN = """
import asyncio

from roll.envs.tools.interactions import BaseInteraction


class Patient(BaseInteraction):
    async def start_interaction(self, instance_id, **kwargs):
        self.begun = kwargs
        return instance_id + "!"

    async def generate_response(self, instance_id, messages, **kwargs):
        await asyncio.sleep(kwargs.get("seconds", 0))
        return False, f"{self.name} {instance_id} {self.config['patience']} {sorted(kwargs)}", None, {}


class Scores(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "fine", self.config["score"], {}

    async def calculate_score(self, instance_id, **kwargs):
        return self.config["last"]


class Plain:
    def __init__(self, config):
        pass
"""


@pytest.fixture
def service():
    """A service that answers with the next of `answers`, and keeps what it was sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, self.headers.get("Authorization"), body))
            reply = json.dumps({"choices": [{"message": {"content": server.answers.pop(0)}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.answers = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def answers(users, name, kwargs, *conversations):
    async def asked():
        user = users.open(name, "episode", kwargs)
        try:
            return [await user.answer(messages) for messages in conversations]
        finally:
            await user.close()

    try:
        return asyncio.run(asked())
    finally:
        users.close()


def test_a_model_sees_the_conversation_with_the_roles_exchanged_and_says_when_it_is_over(service, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "secret")
    address = f"http://127.0.0.1:{service.server_port}/v1"
    config = InteractionConfig(
        name="customer", endpoint=address, model="m", api_key_env="SERVICE_KEY", prompt="You want {goal}.",
        request_args={"temperature": 0.5},
    )  # fmt: skip
    service.answers = ["Which?", "Thanks. [DONE]", None]
    first = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
    ]
    then = [*first, {"role": "tool", "content": "T"}, {"role": "assistant", "content": "Here."}]
    said = answers(Interactions([config]), "customer", {"name": "customer", "goal": "a tree"}, first, then, then)
    assert said == [(False, "Which?"), (True, "Thanks."), (False, "")]
    path, key, body = service.asked[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "m",
        "temperature": 0.5,
        "messages": [
            {"role": "system", "content": "You want a tree."},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "Yes?"},
        ],
    }
    assert [m["content"] for m in service.asked[1][2]["messages"][1:]] == ["Hi", "Yes?", "Here."]


def test_a_row_that_does_not_say_what_the_prompt_names_is_no_episode(service):
    config = InteractionConfig(name="u", endpoint=f"http://127.0.0.1:{service.server_port}/v1", model="m")
    with pytest.raises(EpisodeError, match="have no 'goal', which interactions.u.prompt names"):
        answers(Interactions([config]), "u", {}, [])
    monkeypatched = InteractionConfig(
        name="u", endpoint="http://127.0.0.1:9/v1", model="m", api_key_env="NOT_THERE_AT_ALL"
    )
    with pytest.raises(ValueError, match="NOT_THERE_AT_ALL is not set"):
        Interactions([monkeypatched])


def test_a_class_is_made_with_its_configuration_and_may_not_take_longer_than_its_time(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    config = InteractionConfig(name="p", path=f"{tmp_path}/own.py:Patient", config={"patience": 3}, timeout_s=0.3)
    said = answers(Interactions([config]), "p", {"name": "p", "goal": "x"}, [])
    assert said == [(False, "p episode! 3 ['goal']")]
    with pytest.raises(EpisodeError, match=r"longer than timeout_s = 0\.3 s in generate_response") as error:
        answers(Interactions([config]), "p", {"seconds": 5}, [])
    assert error.value.status == "timeout"
    with pytest.raises(ValueError, match="has no coroutine start_interaction; derive it from"):
        Interactions([InteractionConfig(name="p", path=f"{tmp_path}/own.py:Plain")])


@pytest.mark.parametrize(("score", "last"), [(float("nan"), 0.0), ("much", 0.0), (0.5, float("inf"))])
def test_a_score_that_is_no_number_fails_the_episode_and_is_never_trained_on(tmp_path, monkeypatch, score, last):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    config = InteractionConfig(name="u", path="own.py:Scores", config={"score": score, "last": last})
    users = Interactions([config])

    async def played():
        user = users.open("u", "episode", {})
        await user.answer([])
        await user.finish()

    try:
        with pytest.raises(EpisodeError, match="the simulated user u gave .* as its score") as raised:
            asyncio.run(played())
    finally:
        users.close()
    assert raised.value.status == "env_error"
