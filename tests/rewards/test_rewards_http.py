"""`http` against a real server on the loopback that answers well, badly and not at all."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from roll.data.picture_reader import picture_of_file
from roll.rewards import http as module
from roll.rewards.base import Reward, RewardSpec
from roll.rewards.http import RewardServerError, http
from roll.rewards.reward_registry import load_reward
from roll.types.picture import Picture
from roll.types.trajectory import Task

TASK = Task(
    id="t:1", source="t", payload={"ground_truth": 72, "prompt": "How many?", "level": 3}, seed=0, tag="t", domain="d"
)


class Server(ThreadingHTTPServer):
    """Gives the replies in their order, the last one again and again."""

    daemon_threads = True

    def __init__(self) -> None:
        self.replies: list[tuple[int, str]] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.headers.append(dict(self.headers))
        replies = self.server.replies
        status, body = replies.pop(0) if len(replies) > 1 else replies[0]
        if status == 0:
            threading.Event().wait(5)  # no answer in time
            return
        self.send_response(status)
        if status in (301, 302, 307):
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Stay quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    made = Server()
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def ask(server: Server, **kwargs: Any) -> Reward:
    return asyncio.run(http("It is 72", TASK, url=f"http://127.0.0.1:{server.server_port}/score", **kwargs))


def test_the_question_and_the_answer_are_those_of_the_protocol(server: Server):
    server.replies = [(200, '{"score": 0.5, "parts": {"style": 1}}')]
    assert ask(server, headers={"Authorization": "Bearer x"}) == Reward(0.5, {"style": 1.0})
    assert server.asked == [
        {
            "protocol": 1,
            "id": "t:1",
            "domain": "d",
            "tag": "t",
            "response": "It is 72",
            "finish_reason": "stop",
            "prompt": "How many?",
            "messages": None,
            "ground_truth": 72,
            "columns": {"level": 3},
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer x"


def test_a_busy_or_broken_server_is_asked_again(server: Server):
    server.replies = [(503, "starting"), (429, ""), (200, '{"score": 1}')]
    assert ask(server).value == 1.0
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("reply", "message", "asked"),
    [
        ((500, "oh no"), "3 attempt.*status 500: oh no", 3),
        ((400, "bad"), "1 attempt.*status 400: bad", 1),
        ((302, ""), "status 302", 1),
        ((200, "null"), "must answer with", 1),
        ((200, "not json"), "must answer with.*not json", 1),
        ((200, '{"scores": 1}'), "must answer with", 1),
        ((200, '{"score": "1"}'), "score = '1', expected a finite number", 1),
        ((200, '{"score": true}'), "score = True", 1),
        ((200, '{"score": NaN}'), "score = nan", 1),
        ((200, '{"score": 1, "parts": {"a": Infinity}}'), "a = inf", 1),
        ((200, '{"score": 1, "parts": [1]}'), r"parts = \[1\]", 1),
        ((200, "[" * 100_000), "must answer with", 1),
        ((200, '{"score": 1}' + " " * 1_000_001), "must answer with", 1),
    ],
)
def test_anything_but_a_score_is_an_error_that_names_the_server(
    server: Server, reply: tuple[int, str], message: str, asked: int
):
    server.replies = [reply]
    with pytest.raises(RewardServerError, match=message):
        ask(server)
    assert len(server.asked) == asked


def test_a_server_that_does_not_answer_costs_the_time_that_was_given(server: Server):
    server.replies = [(0, "")]
    with pytest.raises(RewardServerError, match=r"2 attempt.*[Tt]imed? ?[Oo]ut"):
        ask(server, request_timeout_s=0.2, attempts=2)


def test_nobody_listens():
    with pytest.raises(RewardServerError, match="refused"):
        asyncio.run(http("x", TASK, url="http://127.0.0.1:1/", attempts=1))


def test_an_address_that_is_none_is_the_users_mistake():
    with pytest.raises(ValueError, match="url must be"):
        asyncio.run(http("x", TASK, url="file:///etc/passwd"))


def test_a_reward_process_calls_it_like_any_other(server: Server):
    server.replies = [(200, '{"score": 0.25}')]
    loaded = load_reward(RewardSpec(name="http", kwargs={"url": f"http://127.0.0.1:{server.server_port}"}))
    assert loaded("x", TASK).value == 0.25


def test_a_server_is_sent_the_pictures_of_a_prompt(server: Server) -> None:
    image = pytest.importorskip("PIL.Image")
    server.replies = [(200, '{"score": 1}')]
    shown = Picture.of(image.new("RGB", (3, 2), "red"))
    message = {"role": "user", "content": "\ufffcWhat is it?", "pictures": (shown,)}
    task = dataclasses.replace(TASK, payload={"messages": [message], "images": (shown,), "ground_truth": "red"})
    asyncio.run(http("red", task, url=f"http://127.0.0.1:{server.server_port}/score"))
    (asked,) = server.asked
    (sent,) = asked["messages"][0]["pictures"]
    assert picture_of_file(base64.b64decode(sent.removeprefix("data:image/png;base64,"))) == shown
    assert asked["columns"]["images"] == [sent]
