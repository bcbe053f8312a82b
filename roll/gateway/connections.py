"""Connections of the gateway's server: one that asks for nothing is closed, sooner where others need its place."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_JOINED = 64 << 10
"""Bytes that are sent at once."""
HEAD_BYTES = 64 << 10
"""Of a request's address and headers, all together."""


_FLUSH_SECONDS = 10.0
"""For a client to read what it asked for, once its connection is closed."""
_LONG_HEAD = f"The request's head, or what follows its body, is longer than {HEAD_BYTES} bytes."


class _JoinedWrites:
    """A transport that sends together what is written together: uvicorn writes the head of a response and its body
    apart, two system calls here and two awakenings of the client."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send this before the event loop does anything else than what runs now."""
        if data and not self._written:
            self._loop.call_soon(self._send)
        self._written += data
        if len(self._written) >= _JOINED:
            self._send()

    def close(self) -> None:
        """Close, once everything is sent."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        written, self._written = self._written, bytearray()
        if written:
            self._transport.write(bytes(written))


class Connection(HttpToolsProtocol):
    """One connection. It has `timeout_keep_alive` seconds to send the next request's head, from its first moment on:
    uvicorn itself waits for ever for the first one, and for one that has begun. It takes a head of any length, too."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._idle_since = 0.0
        self._giving_up: asyncio.TimerHandle | None = None
        self._in_head = False
        self._unread = 0  # Bytes since a head or a piece of a body was whole
        self._why = ""  # What is wrong with a request, where the parser can't say it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection; where there are as many as may be, drop the one that has been idle the longest."""
        super().connection_made(_JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._wait_for_request()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
            idle = [one for one in others if one._is_idle]
            if idle:
                min(idle, key=lambda one: one._idle_since).timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the time limit."""
        if self._giving_up is not None:
            self._giving_up.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Answer a head that goes on and on before it ends, and trailers, too."""
        if self.transport.is_closing():
            return
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(_LONG_HEAD)

    def send_400_response(self, msg: str) -> None:
        """Send a 400 with what is wrong, where this class knows."""
        super().send_400_response(self._why or msg)

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drop trailers, which come behind a body and which nobody reads."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Refuse a head that is too long though it came at once, and an upgrade: its body would be lost."""
        self._in_head, self._unread = False, 0
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES:
            self._why = _LONG_HEAD
        elif self.parser.should_upgrade():
            self._why = "This server speaks HTTP/1.1 and upgrades to nothing: leave out the header upgrade."
        if self._why:
            raise ValueError(self._why)  # the parser makes it an answer of 400
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._unread = 0
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close late clients: closing waits until everything is sent, and some never read it."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(_FLUSH_SECONDS, self.transport.abort)

    def on_response_complete(self) -> None:
        """Let the next request take its time, too."""
        self._wait_for_request()
        super().on_response_complete()

    def _wait_for_request(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._idle_since = self.loop.time()
        self._giving_up = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _give_up(self) -> None:
        if self._is_idle:
            self.timeout_keep_alive_handler()

    @property
    def _is_idle(self) -> bool:
        waits = self.cycle is None or self.cycle.response_complete
        return waits and not self.transport.is_closing()
