"""The sessions that are served: by address and key, open or closed, with how many calls are under way."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.gateway.base import Session
from roll.gateway.bodies import GatewayLimits
from roll.gateway.protocols import wire_formats
from roll.gateway.protocols.wire import WireFormat

_REMEMBERED = 20_000
"""Sessions that were closed, whose late requests get 409 and not 404."""

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Answers a POST of JSON with JSON; raises `RefusedCall`."""


def new_key() -> str:
    """Return a key for a session, which nobody can guess."""
    return f"sk-roll-{secrets.token_urlsafe(32)}"


@dataclass(eq=False, slots=True)
class OpenSession:
    """A session that is served."""

    session: Session
    key: str
    ignored: frozenset[str]
    handlers: Mapping[str, Handler]
    formats: Mapping[str, WireFormat] = field(default_factory=wire_formats)
    running: int = 0
    _closed: bool = False
    _waiting: set[asyncio.Future[None]] = field(default_factory=set)

    def until_closed(self) -> asyncio.Future[None]:
        """Return what is done once the session is closed; whoever waits no longer cancels it."""
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(closed)
        closed.add_done_callback(self._waiting.discard)
        if self._closed:
            closed.set_result(None)
        return closed

    def close(self) -> None:
        """Tell the calls under way."""
        self._closed = True
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def has_key(self, key: str) -> bool:
        """Compare in a time that says nothing about the key."""
        return hmac.compare_digest(self.key.encode(), key.encode("utf-8", "replace"))


class Sessions:
    """What is served. All methods belong to one event loop."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.limits = limits
        self.running = 0
        """Calls under way."""
        self._open: dict[str, OpenSession] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()  # id -> digest of its key

    def open(
        self,
        session: Session,
        key: str,
        *,
        ignore_fields: Collection[str] = (),
        handlers: Mapping[str, Handler] | None = None,
        root: bool = False,
    ) -> str:
        """Serve a session to whoever has the key; returns its path, without `/v1`."""
        name = "" if root else _session_id(key)
        if not key:
            raise ValueError("a session without a key would answer anybody")
        if name in self._open:
            raise ValueError("a session at this address is open already")
        self._closed.pop(name, None)
        self._open[name] = OpenSession(session, key, frozenset(ignore_fields), dict(handlers or {}))
        return f"/s/{name}" if name else ""

    def close(self, key: str) -> None:
        """Stop serving the session with this key: its calls, those under way too, get 409. Unknown: does nothing."""
        for name in (_session_id(key), ""):
            opened = self._open.get(name)
            if opened is not None and opened.key == key:
                del self._open[name]
                opened.close()
                self._closed[name] = _digest(key)
                while len(self._closed) > _REMEMBERED:
                    self._closed.popitem(last=False)

    def close_all(self) -> None:
        """Close every session."""
        for opened in list(self._open.values()):
            self.close(opened.key)

    def find(self, name: str, key: str) -> OpenSession | int:
        """Return the session of an address, or the status of HTTP that says why there is none."""
        opened = self._open.get(name)
        if opened is not None:
            return opened if opened.has_key(key) else 401
        digest = self._closed.get(name)
        if digest is None:
            return 404
        return 409 if hmac.compare_digest(digest, _digest(key)) else 401

    @contextlib.contextmanager
    def counted(self, opened: OpenSession) -> Iterator[bool]:
        """Count a call while it is under way; false: there are as many as may be."""
        if self.running >= self.limits.calls or opened.running >= self.limits.session_calls:
            yield False
            return
        self.running += 1
        opened.running += 1
        try:
            yield True
        finally:
            self.running -= 1
            opened.running -= 1


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def _session_id(key: str) -> str:
    """Return the name of a session in addresses, which says nothing about its key."""
    return hashlib.sha256(b"session" + key.encode("utf-8", "replace")).hexdigest()[:24]
