"""The HTTP server of a run: each session has an address and a key of its own, and is served in the caller's event loop.

    http://127.0.0.1:PORT/s/<id>/v1    chat/completions, messages, responses, models: of the session with that id
    http://127.0.0.1:PORT/v1           the same, of the session that was opened with `root`

Requests are hostile input: sizes and times have limits, and whatever a client sends, it gets an answer that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib.util
import resource
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from roll.gateway.base import Session
from roll.gateway.bodies import GatewayLimits
from roll.gateway.registry import Handler, Sessions

PACKAGES = ("httptools", "uvicorn")
INSTALL = "pip install 'roll-rl[serve]'"
_GC_THRESHOLD = 20_000
"""Objects between two collections of the youngest. Python's 700 are gone through once or twice in every request."""
_STOP_SECONDS = 5.0
_BACKLOG = 2048


class MissingPackage(ValueError):
    """The server's packages aren't installed."""


class Gateway:
    """Serves sessions. All methods belong to the event loop in which `start` was called.

    Args:
        host: loopback by default; another one lets other machines reach it, with nothing but the keys in the way.
        port: 0: a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, limits: GatewayLimits | None = None) -> None:
        self.sessions = Sessions(limits or GatewayLimits())
        self._host, self._port = host, port
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises `MissingPackage`, and `OSError` when the port is taken."""
        if gc.get_threshold()[0] < _GC_THRESHOLD:  # what is loaded stays: a collection of it stops every client
            gc.collect()
            gc.freeze()
            gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
        server = _make_server(self.sessions)
        listener = _listener(self._host, self._port)
        self._port = listener.getsockname()[1]
        self._server = server
        self._serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        while not server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the gateway's server ended while it started")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Close every session and the server. A second call does nothing."""
        self.sessions.close_all()
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait([serving], timeout=_STOP_SECONDS)
        if not done:
            self._server.force_exit = True
            serving.cancel()
            await asyncio.wait([serving], timeout=_STOP_SECONDS)

    @property
    def address(self) -> str:
        """Return where it listens, such as `http://127.0.0.1:8000`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    def open(
        self,
        session: Session,
        key: str,
        *,
        ignore_fields: Collection[str] = (),
        handlers: Mapping[str, Handler] | None = None,
        root: bool = False,
    ) -> str:
        """Serve a session to whoever has the key; returns its address, which ends in `/v1`.

        Args:
            key: from `new_key()`; it names the session too.
            ignore_fields: of requests, that are left out where they would be refused.
            handlers: further POST routes below the address, by name, e.g. `score`.
            root: at the server's own `/v1`.
        """
        path = self.sessions.open(session, key, ignore_fields=ignore_fields, handlers=handlers, root=root)
        return f"{self.address}{path}/v1"

    def close(self, key: str) -> None:
        """Stop serving the session with this key: its calls, those under way too, get 409. Unknown: does nothing."""
        self.sessions.close(key)


def _listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises `OSError` with the address in its words."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        fix = "; name another port" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"can't listen at {host}:{port}: {error.strerror or error}{fix}") from None
    return listener


def check_packages() -> None:
    """Raise `MissingPackage` if a package of the server isn't installed."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"the endpoint needs the package {name}: {INSTALL}")


def _most_connections(limits: GatewayLimits) -> int:
    """Return how many clients may connect: the run needs file descriptors for more than them."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4 * limits.calls if files < 0 else min(4 * limits.calls, max(files // 2, 16))


def _make_server(sessions: Sessions) -> Any:
    check_packages()
    import uvicorn

    from roll.gateway.app import App
    from roll.gateway.connections import Connection

    class InLoopServer(uvicorn.Server):
        """One that leaves signals to the run."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    settings = uvicorn.Config(
        App(sessions),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # nobody asks who the client is
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=sessions.limits.idle_seconds,
        timeout_graceful_shutdown=1,
        limit_concurrency=_most_connections(sessions.limits),
    )
    return InLoopServer(settings)
