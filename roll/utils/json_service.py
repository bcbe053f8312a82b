"""An HTTP service that takes and gives JSON, asked from an event loop: tries, deadlines, a key that is never shown."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

_LONGEST_DELAY = 60.0
_AGAIN = frozenset({408, 409, 425, 429})
"""HTTP statuses that pass; those of 500 and more do too."""
_SHOWN = 300
"""Characters of a reply that an error shows."""
_PROBE_SECONDS = 2.0


class EndpointFailed(RuntimeError):
    """A request without an answer."""

    def __init__(self, text: str, attempts: int = 1) -> None:
        super().__init__(text)
        self.attempts = attempts


class _PassingError(RuntimeError):
    """A failure after which another try may succeed."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


def why_unreachable(endpoint: str, timeout: float = _PROBE_SECONDS) -> str | None:
    """Return why nothing listens at the endpoint's address, or None. Sends nothing."""
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=timeout).close()
    except OSError as error:
        return f"{parts.hostname}:{port} can't be reached: {error.strerror or error}"
    return None


def key_in(environ: Mapping[str, str], variable: str | None) -> str | None:
    """Return the key that the environment variable holds, "" if there is no variable to look at; None: it isn't set."""
    return (environ.get(variable, "").strip() or None) if variable is not None else ""


def service_key(path: str, endpoint: str, variable: str | None, environ: Mapping[str, str]) -> str:
    """Return the key of a service that a run needs, once something listens at its address.

    Raises `ValueError` naming the key of the configuration, in the section at `path`.
    """
    key = key_in(environ, variable)
    if key is None:
        raise ValueError(
            f"{path}.api_key_env: the environment variable {variable} is not set; export it with the service's key, or "
            "remove the key if it needs none"
        )
    why = why_unreachable(endpoint)
    if why is not None:
        raise ValueError(f"{path}.endpoint: {why}; start the service, or correct the address")
    return key


class Endpoint:
    """Posts JSON to one address. All methods belong to one event loop. Close it.

    Args:
        url: where requests go.
        who: how messages call the service, such as `the judge`.
        key: sent as a bearer token and taken out of every message; empty: none.
        timeout: seconds for one request, from its first byte to its last.
        retries: further tries after a failure that may pass.
        delay: seconds before the first of them; doubled each time, at most 60, at least what `Retry-After` says.
        connections: requests at once.
    """

    def __init__(
        self, url: str, *, who: str, key: str, timeout: float, retries: int, delay: float, connections: int
    ) -> None:
        self._url, self._who, self._key = url, who, key
        self._timeout, self._retries, self._delay, self._connections = timeout, retries, delay, connections
        self._session: Any = None
        self._slots = asyncio.Semaphore(connections)
        self.retried = 0
        """Tries after the first, of all requests so far."""

    async def ask(
        self,
        body: Mapping[str, Any],
        *,
        largest: int = 4 << 20,
        before_try: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """Return the reply's JSON, at most `largest` bytes of it; raises `EndpointFailed`. `before_try` may wait."""
        async with self._slots:
            delay = self._delay
            for attempt in range(1, self._retries + 2):
                if before_try is not None:
                    await before_try()
                try:
                    return self._parsed(await self._post(body, largest))
                except _PassingError as error:
                    if attempt > self._retries:
                        raise EndpointFailed(str(error), attempt) from None
                    self.retried += 1
                    # Jitter: requests that failed together don't come back together.
                    await asyncio.sleep(max(error.wait, min(delay, _LONGEST_DELAY) * random.uniform(0.8, 1.2)))
                    delay *= 2
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def clean(self, text: str) -> str:
        """Return the text without the key, which some services repeat, and not too long."""
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text[:_SHOWN].split())

    async def _post(self, body: Mapping[str, Any], largest: int) -> str:
        import aiohttp

        if self._session is None:
            # No redirects below: the key goes to the configured address and nowhere else.
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            timeout = aiohttp.ClientTimeout(total=self._timeout)
            connector = aiohttp.TCPConnector(limit=self._connections)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        who = self._who
        try:
            async with self._session.post(self._url, json=dict(body), allow_redirects=False) as reply:
                data = await self._read(reply.content, largest)
                status, wait = reply.status, _seconds(reply.headers.get("Retry-After"))
        except TimeoutError:
            raise _PassingError(f"{who} didn't answer within {self._timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _PassingError(self.clean(f"{who} can't be reached: {type(error).__name__}: {error}")) from None
        text = data.decode("utf-8", "replace")
        if status != 200:
            what = self.clean(f"{who} replied with HTTP {status}: {text}")
            if status in _AGAIN or status >= 500:
                raise _PassingError(what, wait)
            raise EndpointFailed(what)
        return text

    async def _read(self, content: Any, largest: int) -> bytes:
        data = bytearray()
        async for chunk in content.iter_chunked(1 << 16):
            data += chunk
            if len(data) > largest:
                raise EndpointFailed(f"{self._who}'s reply is larger than {largest >> 20} MiB")
        return bytes(data)

    def _parsed(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise EndpointFailed(self.clean(f"{self._who}'s reply isn't JSON: {text}")) from None


def endpoint_url(address: str, path: str) -> str:
    """Return the address of a route of an OpenAI-compatible service, whose own ends in `/v1`."""
    return address.rstrip("/") + path


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or 0), 0.0), _LONGEST_DELAY)
    except ValueError:
        return 0.0  # a date
