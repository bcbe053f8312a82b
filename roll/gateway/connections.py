"""Connections of the gateway's server: one that asks for nothing is closed, sooner where others need its place."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_JOINED = 64 << 10
"""Bytes that are sent at once."""


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


class Connection(H11Protocol):
    """One connection. It has `timeout_keep_alive` seconds to send the next request's head, from its first moment on:
    uvicorn itself waits for ever for the first one, and for one that has begun."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._idle_since = 0.0
        self._giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Where there are as many as may be, the one that has been idle the longest makes room."""
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

    def on_response_complete(self) -> None:
        """The next request may take its time, too."""
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
