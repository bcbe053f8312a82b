"""What a connection takes as HTTP: heads within a limit, one meaning for every length, requests one after the other."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time

import pytest
from serving import EchoSession, opened, served
from test_gateway_hostile import ASK, Raw

from roll.gateway.bodies import GatewayLimits
from roll.gateway.connections import HEAD_BYTES
from roll.gateway.server import Gateway

LINE = b"x-more: " + b"y" * 1000 + b"\r\n"


@pytest.fixture(scope="module")
def server():
    with served(GatewayLimits(calls=64)) as running:
        yield running


@pytest.fixture
def session(server):
    with opened(server) as session:
        yield session


def answered(raw: Raw) -> bytes:
    """All that comes until the server closes the connection."""
    said = b""
    while more := raw.socket.recv(65536):
        said += more
    return said


def sent_until_closed(raw: Raw, line: bytes) -> int:
    """Bytes that the server took of a line again and again."""
    sent = 0
    try:
        while sent < 100 * HEAD_BYTES:
            raw.send(line)
            sent += len(line)
            time.sleep(0.001)
    except OSError:
        pass  # It has been closed
    return sent


def ask(raw: Raw, session, body=ASK, *more: str) -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {raw.base}/chat/completions HTTP/1.1", "host: x", f"authorization: Bearer {session.key}", *more]
    return "\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data


def test_a_head_that_never_ends_is_answered_and_its_connection_closed(session):
    with Raw(session.address) as raw:
        raw.send(b"GET / HTTP/1.1\r\n")
        sent = sent_until_closed(raw, LINE)
    assert HEAD_BYTES / 2 < sent < 10 * HEAD_BYTES
    assert not session.calls


@pytest.mark.parametrize("where", ["one header", "many headers", "the address"])
def test_a_head_that_comes_at_once_has_a_limit_too(session, where):
    with Raw(session.address) as raw:
        begin = ask(raw, session).partition(b"\r\n\r\n")[0]
        long = {
            "one header": begin + b"\r\nx-more: " + b"y" * HEAD_BYTES,
            "many headers": begin + b"\r\n" + LINE * 70 + b"x: y",
            "the address": begin.replace(b"/chat", b"/" + b"y" * HEAD_BYTES + b"/chat", 1),
        }[where]
        raw.send(long + b"\r\n\r\n")
        raw.socket.settimeout(10)
        assert answered(raw).startswith(b"HTTP/1.1 400 ")
    assert not session.calls


def test_a_head_just_within_the_limit_and_large_bodies_one_after_the_other_are_taken(session):
    large = {"model": "policy", "messages": [{"role": "user", "content": "b" * 300_000}]}
    with Raw(session.address) as raw:
        raw.send(ask(raw, session, ASK, f"x-more: {'y' * (HEAD_BYTES - 400)}"))
        assert raw.read()[0] == 200
        for _ in range(3):
            raw.send(ask(raw, session, large))
            assert raw.read()[0] == 200
    assert len(session.calls) == 4


def test_a_head_in_many_small_pieces_is_read_as_one(session):
    with Raw(session.address) as raw:
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = ask(raw, session)
        for start in range(0, len(data), 7):
            raw.send(data[start : start + 7])
        assert raw.read()[0] == 200


def test_two_requests_at_once_are_answered_in_their_order(session):
    first = {"model": "policy", "messages": [{"role": "user", "content": "first"}]}
    second = {"model": "policy", "messages": [{"role": "user", "content": "second"}]}
    with Raw(session.address) as raw:
        raw.send(ask(raw, session, first) + ask(raw, session, second, "connection: close"))
        said = answered(raw)
    assert said.count(b"HTTP/1.1 200 ") == 2
    assert said.index(b"0: first") < said.index(b"0: second")


@pytest.mark.parametrize(
    "head",
    ["content-length: 5\r\ntransfer-encoding: chunked", "content-length: 5\r\ncontent-length: 6",
     "transfer-encoding: chunked, identity", "content-length: +5", "content-length : 5", "bad name: x"],
)  # fmt: skip
def test_what_two_readers_could_read_in_two_ways_is_no_request(session, head):
    with Raw(session.address) as raw:
        raw.socket.settimeout(10)
        key = f"authorization: Bearer {session.key}"
        raw.send(f"POST {raw.base}/chat/completions HTTP/1.1\r\nhost: x\r\n{key}\r\n{head}\r\n\r\n0\r\n\r\n".encode())
        raw.socket.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 200 " not in answered(raw)
    assert not session.calls


def chunked(session, base: str, *more: str) -> bytes:
    head = [f"POST {base}/chat/completions HTTP/1.1", "host: x", f"authorization: Bearer {session.key}", *more]
    return "\r\n".join([*head, "transfer-encoding: chunked", "", ""]).encode()


@pytest.mark.parametrize("line", [LINE, b"y" * 1000])
def test_trailers_have_a_limit_and_are_no_headers(session, line):
    data = json.dumps(ASK).encode()
    body = b"%x\r\n%s\r\n0\r\n" % (len(data), data)
    with Raw(session.address) as raw:
        raw.send(chunked(session, raw.base) + body + b"content-encoding: gzip\r\n\r\n")
        assert raw.read()[0] == 200
    with Raw(session.address) as raw:
        raw.send(chunked(session, raw.base) + body)
        sent = sent_until_closed(raw, line)
    assert sent < 10 * HEAD_BYTES


def test_an_upgrade_is_refused_with_what_to_do(session):
    with Raw(session.address) as raw:
        raw.socket.settimeout(10)
        raw.send(ask(raw, session, ASK, "connection: upgrade", "upgrade: h2c"))
        said = answered(raw)
    assert said.startswith(b"HTTP/1.1 400 ") and b"leave out the header upgrade" in said


def test_two_keys_are_none(session):
    with Raw(session.address) as raw:
        raw.send(ask(raw, session, ASK, "authorization: Bearer other"))
        status, body = raw.read()
    assert status == 400 and "twice" in body["error"]["message"]


def test_a_client_that_does_not_read_keeps_its_connection_for_a_while_only(monkeypatch):
    monkeypatch.setattr("roll.gateway.connections._FLUSH_SECONDS", 0.2)
    with served(GatewayLimits(idle_seconds=1)) as server:
        session = EchoSession()
        address, session.key = server.open(session)
        large = {"model": "policy", "messages": [{"role": "user", "content": "b" * 7_000_000}]}
        with Raw(address) as raw:
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.send(ask(raw, session, large))
            state = server.gateway._server.server_state
            until = time.monotonic() + 20
            while not session.calls or state.connections:
                assert time.monotonic() < until, "the connection is kept"
                time.sleep(0.05)


def test_collections_become_rare_although_the_command_has_frozen_what_it_imported():
    async def start_and_stop():
        gateway = Gateway()
        await gateway.start()
        await gateway.stop()

    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.freeze()
    try:
        asyncio.run(start_and_stop())
        assert gc.get_threshold()[0] == 20_000
    finally:
        gc.set_threshold(*before)
