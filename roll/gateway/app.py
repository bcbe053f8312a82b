"""The application that the server runs: from a request to its session and back."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, TypeVar

from roll.gateway.base import RefusedCall
from roll.gateway.bodies import read_json
from roll.gateway.protocols.openai_chat import openai_error
from roll.gateway.protocols.wire import ProtocolRequest, WireFormat
from roll.gateway.registry import OpenSession, Sessions

logger = logging.getLogger(__name__)
T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_WHY = {
    401: "the key is missing or isn't this session's: send it as `Authorization: Bearer <key>` or `x-api-key: <key>`",
    404: "there is no session at this address",
    409: "this session is closed: its episode is over or was given up",
}
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
_PIECE = 32 << 10


class _Disconnected(Exception):
    """The client has gone."""


class _Request:
    """What is asked, and how it is answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.name, self.route = _split(scope["path"])
        self.receive, self.send = receive, send
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]

    def header(self, name: bytes, default: str = "") -> str:
        """Return the first header of a name, which is in small letters."""
        return next((value.decode("latin-1") for other, value in self._headers if other == name), default)

    def count(self, name: bytes) -> int:
        """Return how many headers of a name there are."""
        return sum(other == name for other, _ in self._headers)

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises `_Disconnected`."""
        more = True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            yield message.get("body", b"")
            more = message.get("more_body", False)

    async def answer(
        self, body: Mapping[str, Any], status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """Send JSON. Raises `_Disconnected`."""
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        length = (b"content-length", str(len(data)).encode())
        head = [length, (b"content-type", b"application/json"), *headers]
        try:
            await self.send({"type": "http.response.start", "status": status, "headers": head})
            await self.send({"type": "http.response.body", "body": data})
        except OSError:
            raise _Disconnected from None

    async def start_stream(self) -> None:
        """Begin to send events."""
        await self.send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def send_text(self, text: str, last: bool = False) -> None:
        """Send a piece of the stream. Raises `_Disconnected`."""
        body = text.encode("utf-8", "replace")
        try:
            await self.send({"type": "http.response.body", "body": body, "more_body": not last})
        except OSError:
            raise _Disconnected from None


class App:
    """An ASGI application over the sessions of a gateway."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._limits = sessions.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        request = _Request(scope, receive, send)
        wire: WireFormat | None = None
        try:
            opened = self._find(request)
            wire = opened.formats.get(request.route)
            await self._serve(opened, wire, request)
        except RefusedCall as refused:
            await _refuse(refused, wire, request)
        except _Disconnected:
            return
        except Exception:
            logger.exception("the gateway failed at a request to %s", request.route)
            failure = RefusedCall(500, "the endpoint failed at this request; its log says why")
            await _refuse(failure, wire, request)

    def _find(self, request: _Request) -> OpenSession:
        session = self._sessions.find(request.name, _key(request))
        if isinstance(session, int):
            raise RefusedCall(session, _WHY[session], code="session_closed" if session == 409 else "")
        return session

    async def _serve(self, opened: OpenSession, wire: WireFormat | None, request: _Request) -> None:
        route = request.route
        if route == "models" or route.startswith("models/"):
            _expect("GET", request)
            await request.answer(_models(opened, route.removeprefix("models").lstrip("/")))
            return
        handler = opened.handlers.get(route)
        if wire is None and handler is None:
            known = ", ".join([*opened.formats, "models", *opened.handlers])
            raise RefusedCall(404, f"there is no route {route[:80]!r} here; there are {known}")
        _expect("POST", request)
        with self._sessions.counted(opened) as admitted:
            if not admitted:
                raise RefusedCall(429, "as many calls are under way as this endpoint takes", again=True)
            body, sent = await self._body(request)
            if handler is not None:
                await request.answer(await self._answered(opened, handler(_object(body)), request))
                return
            assert wire is not None
            parsed = wire.read(body, opened.ignored)
            retries = request.header(b"x-stainless-retry-count")  # of the official clients of OpenAI and Anthropic
            if retries.isdecimal():
                call = replace(parsed.call, body_hash=sent.digest(), repeated=retries.strip("0") != "")
                parsed = replace(parsed, call=call)
            if wire.counts:
                count = await self._answered(opened, opened.session.count(parsed.call), request)
                await request.answer({"input_tokens": count})
            elif parsed.stream:
                await self._stream(opened, parsed, wire, request)
            else:
                answer = await self._answered(opened, opened.session.complete(parsed.call), request)
                await request.answer(wire.answer(parsed, answer))

    async def _body(self, request: _Request) -> tuple[Any, hashlib.blake2b]:
        """Return what the body holds, and a hash of its bytes and its route."""
        if request.header(b"content-encoding", "identity") != "identity":
            raise RefusedCall(400, "compressed bodies aren't taken", "content-encoding")
        length = request.header(b"content-length")
        if length.isdigit() and int(length[:20]) > self._limits.body_bytes:
            raise RefusedCall(413, f"the body is larger than {self._limits.body_bytes} bytes")
        sent = hashlib.blake2b(request.route.encode())

        async def hashed() -> AsyncIterator[bytes]:
            async for piece in request.body():
                sent.update(piece)
                yield piece

        return await read_json(hashed(), self._limits), sent

    async def _answered(self, opened: OpenSession, call: Awaitable[T], request: _Request) -> T:
        """Return what a call gives, unless the client leaves, the session is closed or time is up before."""
        waiting = _Waiting(opened, call, request.receive, self._limits.call_seconds)
        try:
            await waiting.wait(None)
            return waiting.result()
        finally:
            await waiting.end()

    async def _stream(self, opened: OpenSession, parsed: ProtocolRequest, wire: WireFormat, request: _Request) -> None:
        """Send the response once it is whole; comments show until then that the connection is alive.

        What goes wrong before the first of them is an error of HTTP, later it is an event.
        """
        waiting = _Waiting(opened, opened.session.complete(parsed.call), request.receive, self._limits.call_seconds)
        begun = False
        try:
            while not await waiting.wait(self._limits.keep_alive_seconds):
                if not begun:
                    await request.start_stream()
                    begun = True
                await request.send_text(": the response is being sampled\n\n")
            try:
                answer = waiting.result()
            except RefusedCall as refused:
                if not begun:
                    raise
                await request.send_text(wire.stream_error(refused), last=True)
                return
            except _Disconnected:
                raise
            except Exception:
                if not begun:
                    raise
                logger.exception("the gateway failed at a streamed request")
                failure = RefusedCall(500, "the endpoint failed; its log says why")
                await request.send_text(wire.stream_error(failure), last=True)
                return
            if not begun:
                await request.start_stream()
            for text in _joined(wire.events(parsed, answer)):
                await request.send_text(text)
            await request.send_text("", last=True)
        finally:
            await waiting.end()


class _Waiting:
    """A call under way, and what may end it early."""

    def __init__(self, opened: OpenSession, call: Awaitable[T], receive: Receive, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._call: asyncio.Future[Any] = asyncio.ensure_future(call)
        self._gone = loop.create_task(_gone(receive))
        self._closed = opened.until_closed()
        self._seconds = seconds
        self._deadline = loop.time() + seconds

    async def wait(self, seconds: float | None) -> bool:
        """Wait for the end, at most so long; whether there is one."""
        left = max(0.0, self._deadline - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait(
            [self._call, self._gone, self._closed],
            timeout=left if seconds is None else min(seconds, left),
            return_when=asyncio.FIRST_COMPLETED,
        )
        return bool(done) or asyncio.get_running_loop().time() >= self._deadline

    def result(self) -> Any:
        """Return the call's result. Raises what it raised, or why it was ended."""
        if self._call.done() and not self._call.cancelled():
            return self._call.result()
        if self._gone.done():
            raise _Disconnected
        if self._closed.done() or self._call.cancelled():
            raise RefusedCall(409, _WHY[409], code="session_closed")
        raise RefusedCall(408, f"no response within {self._seconds:g} s, the limit of this endpoint")

    async def end(self) -> None:
        """Cancel what still runs, and wait for it."""
        self._closed.cancel()
        running = [task for task in (self._call, self._gone) if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if not self._call.cancelled():
            self._call.exception()  # Seen, also where the call was over too late for its client


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _split(path: str) -> tuple[str, str]:
    """Return the session's name and the route of a path; clients differ in whether they add `v1`."""
    parts = [part for part in path[:2048].split("/") if part]
    name = ""
    if len(parts) >= 2 and parts[0] == "s":
        name, parts = parts[1], parts[2:]
    while parts and parts[0] == "v1":
        parts = parts[1:]
    return name, "/".join(parts)


def _key(request: _Request) -> str:
    if request.count(b"authorization") > 1:  # a proxy in front may have checked the other one
        raise RefusedCall(400, "the header authorization is there twice")
    scheme, _, token = request.header(b"authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else request.header(b"x-api-key").strip()


def _expect(method: str, request: _Request) -> None:
    if request.method != method:
        raise RefusedCall(405, f"{request.route[:80]} takes {method}, got {request.method[:20]}")


def _object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise RefusedCall(400, "the body isn't a JSON object")
    return body


def _models(opened: OpenSession, name: str) -> dict[str, Any]:
    known = list(opened.session.models)
    shown = [
        {"id": model, "object": "model", "type": "model", "display_name": model, "created": 0,
         "created_at": "1970-01-01T00:00:00Z", "owned_by": "roll"}
        for model in known
    ]  # fmt: skip
    if not name:
        first, last = (known[0], known[-1]) if known else (None, None)
        return {"object": "list", "data": shown, "has_more": False, "first_id": first, "last_id": last}
    if name not in known:
        raise RefusedCall(404, f"there is no model {name[:80]!r}; there are {', '.join(known)}", "model")
    return shown[known.index(name)]


async def _refuse(refused: RefusedCall, wire: WireFormat | None, request: _Request) -> None:
    form = wire.error if wire is not None else openai_error
    # Both official clients would ask again after 408, 409, 429 and 5xx, unless they are told.
    headers = [(b"x-should-retry", b"true" if refused.again else b"false")]
    if refused.again:
        headers.append((b"retry-after", b"1"))
    if refused.status == 413 or refused.status == 408:
        headers.append((b"connection", b"close"))
    with contextlib.suppress(_Disconnected):
        await request.answer(form(refused), refused.status, headers)


def _joined(events: Iterable[str]) -> Iterator[str]:
    """Yield events together, as many as make a piece of some size."""
    piece: list[str] = []
    size = 0
    for event in events:
        piece.append(event)
        size += len(event)
        if size >= _PIECE:
            yield "".join(piece)
            piece, size = [], 0
    yield "".join(piece)
