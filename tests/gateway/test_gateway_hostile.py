"""Requests that no honest client sends: each gets an answer that says why, none a 500, none hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import socket
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import EchoSession, opened, served

from roll.gateway.app import App
from roll.gateway.base import RefusedCall
from roll.gateway.bodies import GatewayLimits, parsed
from roll.gateway.registry import Sessions, new_key

ASK = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server():
    limits = GatewayLimits(
        body_bytes=20_000, body_seconds=0.5, call_seconds=1.5, calls=6, session_calls=4, keep_alive_seconds=0.05
    )
    with served(limits) as running:
        yield running


@pytest.fixture
def session(server):
    with opened(server) as session:
        yield session


class Raw:
    """A connection that sends what it is told."""

    def __init__(self, address: str) -> None:
        host, _, rest = address.removeprefix("http://").partition("/")
        name, _, port = host.partition(":")
        self.base = f"/{rest}"
        self.socket = socket.create_connection((name, int(port)), timeout=10)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> tuple[int, dict]:
        """Status and body of one response that says its length."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += (more := self.socket.recv(65536))
            assert more, data
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        length = int(headers["content-length"])
        while len(body) < length:
            body += self.socket.recv(65536)
        self.headers = headers
        return int(lines[0].split()[1]), json.loads(body)


def post(session, body, *, path="/chat/completions", key=None, address=None, headers=()):
    """Status and body of a POST; `body` may be bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with Raw(address or session.address) as raw:
        raw.send(
            "\r\n".join(
                [
                    f"POST {raw.base}{path} HTTP/1.1",
                    "host: x",
                    f"authorization: Bearer {session.key if key is None else key}",
                    f"content-length: {len(data)}",
                    *headers,
                    "",
                    "",
                ]
            ).encode()
            + data
        )
        return raw.read()


# --- keys and sessions ------------------------------------------------------------------------------------------------


def test_only_the_key_of_a_session_opens_it(server, session):
    other = EchoSession()
    _, other_key = server.open(other)
    assert post(session, ASK)[0] == 200
    assert post(session, ASK, headers=[f"x-api-key: {session.key}"], key="")[0] == 200
    for wrong in ("", "sk-roll-", other_key, session.key[:-1], session.key + "x", "ключ"):
        status, body = post(session, ASK, key=wrong)
        assert status == 401 and body["error"]["type"] == "authentication_error"
    with Raw(session.address) as raw:  # no header at all
        raw.send(f"POST {raw.base}/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
        assert raw.read()[0] == 401
    elsewhere = session.address.replace("/s/", "/s/f")
    assert post(session, ASK, address=elsewhere)[0] == 404
    assert post(session, ASK, address=session.address.partition("/s/")[0] + "/v1")[0] == 404
    assert len(session.calls) == 2 and not other.calls


def test_a_closed_session_answers_409_to_its_key_and_401_to_others(server):
    session = EchoSession()
    session.address, session.key = server.open(session)
    server.close(session.key)
    status, body = post(session, ASK)
    assert (status, body["error"]["code"]) == (409, "session_closed")
    assert post(session, ASK, key="x")[0] == 401
    assert not session.calls


def test_a_response_of_one_session_can_not_be_gone_on_from_in_another(server, session):
    other = EchoSession()
    other.address, other.key = server.open(other)
    _, first = post(session, {"model": "policy", "input": "a secret"}, path="/responses")
    more = {"model": "policy", "input": "and?", "previous_response_id": first["id"]}
    status, body = post(other, more, path="/responses")
    assert status == 400 and body["error"]["code"] == "previous_response_not_found"
    assert post(session, more, path="/responses")[0] == 200


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"null", b'"text"', b"1", b'{"model": NaN}', b'{"n": 1e999}', b"1" * 5000,
        b"[" * 5000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b'{"messages": "\\ud800"}', b'{"\\udfff": 1}',
        b'{"messages": [{"role": "user", "content": "\\udc00x"}]}',
    ],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/messages/count_tokens", "/responses"])
def test_a_body_that_is_no_request_is_refused(session, body, path):
    status, told = post(session, body, path=path)
    assert status == 400 and told["error"]["message"]
    assert not session.calls


def test_bodies_are_limited_in_size_depth_and_number():
    limits = GatewayLimits(depth=5, values=20)
    assert parsed(b"[[[[[1]]]]]", limits) == [[[[[1]]]]]
    with pytest.raises(RefusedCall, match="deeper than 5"):
        parsed(b"[[[[[[1]]]]]]", limits)
    with pytest.raises(RefusedCall, match="more than 20"):
        parsed(json.dumps(list(range(20))).encode(), limits)


def test_a_body_that_is_too_large_is_refused_with_and_without_a_length(session):
    big = {"model": "policy", "messages": [{"role": "user", "content": "x" * 30_000}]}
    with Raw(session.address) as raw:  # refused by what it announces: nothing of it is sent
        head = f"POST {raw.base}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.key}\r\n"
        raw.send(f"{head}content-length: 999999999999\r\n\r\n".encode())
        assert raw.read()[0] == 413
    with Raw(session.address) as raw:
        raw.send(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        data = json.dumps(big).encode()
        raw.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")  # without its end
        assert raw.read()[0] == 413
    assert not session.calls


def test_a_body_that_does_not_arrive_is_not_waited_for(session):
    with Raw(session.address) as raw:
        head = f"POST {raw.base}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.key}\r\n"
        raw.send(f"{head}content-length: 100\r\n\r\n".encode() + b'{"model"')
        begun = time.monotonic()
        assert raw.read()[0] == 408
        assert time.monotonic() - begun < 5


def test_compressed_bodies_and_other_methods_and_routes_are_refused(session):
    assert post(session, ASK, headers=["content-encoding: gzip"])[0] == 400
    assert post(session, ASK, path="/completions")[0] == 404
    assert post(session, ASK, path="/models")[0] == 405
    assert post(session, ASK, path="/../../v1/models")[0] in (404, 405)
    with Raw(session.address) as raw:
        raw.send(f"GET {raw.base}/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {session.key}\r\n\r\n".encode())
        assert raw.read()[0] == 405


def test_what_is_no_http_does_not_disturb_others(session):
    for garbage in (b"\x00" * 300, b"GET / HTTP/9.9\r\n\r\n", b"POST " + b"a" * 200_000, b"x: y\r\n" * 100):
        with Raw(session.address) as raw:
            raw.send(garbage)
    with Raw(session.address) as raw:
        raw.send(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * 200_000 + b"\r\n\r\n")
    assert post(session, ASK)[0] == 200


def test_clients_may_write_v1_or_not(session):
    root = session.address.removesuffix("/v1")
    assert post(session, ASK, address=root)[0] == 200
    assert post(session, ASK, address=root + "/v1/v1")[0] == 200


# --- calls under way --------------------------------------------------------------------------------------------------


def waits_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def slow(server, delay=30.0):
    session = EchoSession(delay)
    session.address, session.key = server.open(session)
    return session


def begin(raw: Raw, session, body) -> None:
    data = json.dumps(body).encode()
    head = f"POST {raw.base}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.key}\r\n"
    raw.send(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_call(server, stream):
    session = slow(server)
    with Raw(session.address) as raw:
        begin(raw, session, {**ASK, "stream": stream})
        if stream:
            raw.socket.recv(100)
        waits_until(lambda: session.calls)
    waits_until(lambda: session.cancelled == 1)
    waits_until(lambda: server.gateway.sessions.running == 0)


def test_a_call_has_a_limit_of_time(server):
    session = slow(server)
    status, body = post(session, ASK)
    assert status == 408 and "1.5 s" in body["error"]["message"]
    waits_until(lambda: session.cancelled == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_closing_a_session_ends_its_calls_with_409(server, stream):
    session = slow(server)
    with Raw(session.address) as raw:
        begin(raw, session, {**ASK, "stream": stream})
        waits_until(lambda: session.calls)
        if stream:
            time.sleep(0.1)
        server.close(session.key)
        if stream:
            said = b""
            while b"session_closed" not in said:
                said += (more := raw.socket.recv(65536))
                assert more, said
            assert b": the response is being sampled" in said
        else:
            assert raw.read()[0] == 409
            assert raw.headers["x-should-retry"] == "false"
    waits_until(lambda: session.cancelled == 1)


def test_calls_under_way_are_limited_by_session_and_in_all(server):
    first, second = slow(server), slow(server)
    connections = []
    for session, count in ((first, 4), (second, 2)):
        for _ in range(count):
            connections.append(Raw(session.address))
            begin(connections[-1], session, ASK)
        waits_until(lambda session=session, count=count: len(session.calls) == count)
    for session in (first, second):
        with Raw(session.address) as raw:
            begin(raw, session, ASK)
            assert raw.read()[0] == 429
            assert raw.headers["x-should-retry"] == "true"
    for connection in connections:
        connection.__exit__()
    waits_until(lambda: server.gateway.sessions.running == 0)
    assert (first.cancelled, second.cancelled) == (4, 2)


def test_connections_that_ask_for_nothing_keep_nobody_out_and_are_closed():
    with served(GatewayLimits(calls=2, idle_seconds=1)) as server:
        session = EchoSession()
        address, key = server.open(session)
        with contextlib.ExitStack() as held:
            silent = [held.enter_context(Raw(address)) for _ in range(20)]
            for connection in silent[:10]:
                with contextlib.suppress(OSError):
                    connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
            session.address, session.key = address, key
            assert post(session, ASK)[0] == 200
            for connection in silent:
                connection.socket.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.socket.recv(1) == b"", "it was closed"


def test_a_slow_reader_of_a_stream_does_not_hold_up_others(server, session):
    with Raw(session.address) as raw:
        begin(raw, session, {**ASK, "n": 128, "stream": True})
        assert post(session, ASK)[0] == 200
        waits_until(lambda: raw.socket.recv(1 << 20))


# --- fuzz -------------------------------------------------------------------------------------------------------------


class Door:
    """The application without a network."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.sessions = Sessions(GatewayLimits())
        self.key = new_key()
        self.session = EchoSession()
        self.path = self.sessions.open(self.session, self.key)
        self.app = App(self.sessions)

    def post(self, route: str, body: bytes) -> tuple[int, bytes]:
        return self.loop.run_until_complete(asyncio.wait_for(self._post(route, body), 20))

    async def _post(self, route: str, body: bytes) -> tuple[int, bytes]:
        events = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict] = []

        async def receive() -> dict:
            if events:
                return events.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(event) -> None:
            sent.append(event)

        headers = [(b"authorization", b"Bearer " + self.key.encode())]
        scope = {"type": "http", "method": "POST", "path": f"{self.path}/v1/{route}", "headers": headers}
        await self.app({**scope, "query_string": b"", "scheme": "http", "server": ("x", 1)}, receive, send)
        return sent[0]["status"], b"".join(event.get("body", b"") for event in sent[1:])


BODIES = {
    "chat/completions": {
        **ASK,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "b"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}],
        "tool_choice": "auto", "n": 2, "max_tokens": 3, "stop": ["x"], "seed": 1, "temperature": 1, "top_p": 1,
        "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 0, "user": "u",
    },
    "messages": {
        "model": "policy", "max_tokens": 4, "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "i", "name": "f", "input": {"x": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "r"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}, "stream": True,
        "stop_sequences": ["x"], "temperature": 1, "top_k": 0,
    },
    "responses": {
        "model": "policy", "instructions": "i", "store": True, "stream": True, "max_output_tokens": 5,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "auto", "metadata": {"a": "b"},
    },
}  # fmt: skip

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.sampled_from(["auto", "none", "text", "user", "tool", "policy", "", "function", "{}"]),
)  # fmt: skip
NAMES = st.one_of(st.text(max_size=5), st.sampled_from(["type", "role", "content", "name", "function", "text", "id"]))
JSON = st.recursive(
    SCALARS, lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=3), max_leaves=8
)


def places(value, at=()):
    """Every place of a JSON value, itself included."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from places(below, (*at, key))


@st.composite
def mutated(draw):
    """A route, and a body that was one of its requests until a few places of it were replaced."""
    route = draw(st.sampled_from(sorted(BODIES)))
    body = copy.deepcopy(BODIES[route])
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.sampled_from(list(places(body))))
        if not at:
            return route, draw(JSON)
        inside = body
        for key in at[:-1]:
            inside = inside[key]
        if draw(st.booleans()) and isinstance(inside, dict):
            inside[draw(NAMES)] = draw(JSON)
        else:
            inside[at[-1]] = draw(JSON)
    return route, body


@pytest.fixture(scope="module")
def door():
    door = Door()
    yield door
    door.loop.close()


def ask_mutated(door: Door, route: str, body: object) -> None:
    status, said = door.post(route, json.dumps(body).encode())
    assert status in (200, 400), (status, said)
    if status == 400:
        assert json.loads(said)["error"]["message"]
    assert door.sessions.running == 0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(mutated())
def test_no_request_makes_the_endpoint_fail(door, asked):
    ask_mutated(door, *asked)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(BODIES)), st.binary(max_size=200))
def test_no_bytes_make_the_endpoint_fail(door, route, body):
    assert door.post(route, body)[0] in (200, 400)


def test_the_requests_that_are_mutated_are_right(door):
    for route, body in BODIES.items():
        assert door.post(route, json.dumps(body).encode())[0] == 200
