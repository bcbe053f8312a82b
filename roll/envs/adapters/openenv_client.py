"""The wire of OpenEnv (https://github.com/meta-pytorch/OpenEnv): JSON over a WebSocket, or over HTTP.

A WebSocket is a session: `{"type": "reset", "data": {...}}` and `{"type": "step", "data": <action>}` are answered by a
message of type `observation` with `data` of `observation`, `reward` and `done`, or of type `error` with `data` of
`message` and `code`.
Over HTTP it is `POST /reset` and `POST /step` with `{"action": <action>}`: a server keeps one episode for all, or none.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

_MAX_MESSAGE_BYTES = 16 * 2**20
_SHOWN = 300


class OpenEnvError(RuntimeError):
    """What a server says is wrong, or that it can't be understood; `code` is one of OpenEnv's, or an HTTP status."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class OpenEnvSession(Protocol):
    """One episode at a server."""

    def reset(self, arguments: Mapping[str, Any]) -> Any:
        """Begin; what the server answers."""

    def step(self, action: Mapping[str, Any]) -> Any:
        """Do an action; what the server answers."""

    def close(self) -> None:
        """Leave."""


def fetched(url: str, headers: Mapping[str, str], timeout_s: float, body: Any = None) -> Any:
    """Fetch the JSON at an address; posts `body` if there is one. Raises `OpenEnvError`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    for name, value in headers.items():
        request.add_unredirected_header(name, value)  # a token is for this server, not for where it points
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read(_MAX_MESSAGE_BYTES + 1)
    except urllib.error.HTTPError as error:
        reply = error.read(_SHOWN).decode(errors="replace")
        raise OpenEnvError(f"{url} answered {error.code}: {reply}", str(error.code)) from None
    except (OSError, ValueError) as error:
        raise OpenEnvError(f"{url} can't be reached: {error}") from None
    return _parsed(text, url)


def _parsed(text: bytes | str, url: str) -> Any:
    if len(text) > _MAX_MESSAGE_BYTES:
        raise OpenEnvError(f"{url} answered with more than {_MAX_MESSAGE_BYTES:,} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OpenEnvError(f"{url} answered with what isn't JSON: {error}") from None


class HttpSession:
    """Requests that follow each other; whose episode they are in is the server's business."""

    def __init__(self, base: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._base, self._headers, self._timeout_s = base, headers, timeout_s

    def reset(self, arguments: Mapping[str, Any]) -> Any:
        return fetched(f"{self._base}/reset", self._headers, self._timeout_s, dict(arguments))

    def step(self, action: Mapping[str, Any]) -> Any:
        return fetched(f"{self._base}/step", self._headers, self._timeout_s, {"action": dict(action)})

    def close(self) -> None:
        """Nothing is held."""


class WebSocketSession:
    """A connection whose episode is its own. Each has an event loop of its own, which runs during calls only."""

    def __init__(self, base: str, headers: Mapping[str, str], timeout_s: float) -> None:
        """Connect; raises `OpenEnvError`."""
        self._url = f"ws{base.removeprefix('http')}/ws"
        self._headers, self._timeout_s = dict(headers), timeout_s
        self._client: Any = None
        self._socket: Any = None
        self._loop = asyncio.new_event_loop()
        try:
            self._wait(self._connect(), "connecting")
        except BaseException:
            self.close()
            raise

    def reset(self, arguments: Mapping[str, Any]) -> Any:
        return self._ask({"type": "reset", "data": dict(arguments)})

    def step(self, action: Mapping[str, Any]) -> Any:
        return self._ask({"type": "step", "data": dict(action)})

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._leave())
            self._loop.close()

    def _ask(self, message: Mapping[str, Any]) -> Any:
        answer = self._wait(self._exchange(message), message["type"])
        match answer:
            case {"type": "observation", "data": dict(data)}:
                return data
            case {"type": "error", "data": dict(data)}:
                details = f" {data['errors']}" if data.get("errors") else ""
                problem = f"{self._url}: {data.get('message')}{details}"[:_SHOWN]
                raise OpenEnvError(problem, str(data.get("code", "")))
        raise OpenEnvError(f"{self._url} answered {str(answer)[:_SHOWN]!r}, expected an observation")

    def _wait(self, doing: Any, what: str) -> Any:
        import aiohttp

        try:
            return self._loop.run_until_complete(asyncio.wait_for(doing, self._timeout_s))
        except TimeoutError:
            raise OpenEnvError(f"{self._url} gave no answer to {what} in {self._timeout_s:g} s") from None
        except (OSError, aiohttp.ClientError) as error:
            raise OpenEnvError(f"{self._url} can't be reached: {error}") from None

    async def _connect(self) -> None:
        import aiohttp

        self._client = aiohttp.ClientSession(headers=self._headers)
        self._socket = await self._client.ws_connect(self._url, max_msg_size=_MAX_MESSAGE_BYTES)

    async def _exchange(self, message: Mapping[str, Any]) -> Any:
        import aiohttp

        await self._socket.send_str(json.dumps(message))
        answer = await self._socket.receive()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise OpenEnvError(f"{self._url} ended the connection ({answer.type.name.lower()}, {answer.data!r:.80})")
        return _parsed(answer.data, self._url)

    async def _leave(self) -> None:
        if self._socket is not None and not self._socket.closed:
            try:
                await asyncio.wait_for(self._socket.send_str('{"type": "close"}'), 1.0)
                await asyncio.wait_for(self._socket.close(), 2.0)
            except (TimeoutError, OSError):
                pass  # it is gone already
        if self._client is not None:
            await self._client.close()
