"""Connections of the gateway's server: one that asks for nothing is closed, sooner where others need its place."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """One connection. It has `timeout_keep_alive` seconds to send the next request's head, from its first moment on:
    uvicorn itself waits for ever for the first one, and for one that has begun."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._idle_since = 0.0
        self._giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Where there are as many as may be, the one that has been idle the longest makes room."""
        super().connection_made(transport)
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
