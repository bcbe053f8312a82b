"""Who may see the page: whoever brings its token, and on this machine the user whose page it is.

Loopback keeps other machines out, not other users of this one, and a run's files may be readable by their owner alone.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_ESTABLISHED = "01"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
Address = tuple[str, int]


class AccessMiddleware:
    """Middleware: refuses visitors, and puts the headers on every answer.

    Args:
        token: what a visitor must bring, as `?token=` once (a cookie keeps it) or as a bearer token. None: nothing, and
            only requests that name this machine itself are answered, so that no page of another site can read a run.
        by_user: whether requests that name this machine and come from this process's user need no token.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], token: str | None, by_user: bool = False) -> None:
        self._app, self._token, self._by_user = app, token, by_user

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http":
            await (self._refusal(Request(scope)) or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Any) -> Any:
        """Return what is answered instead of the page; None: it may be shown."""
        from starlette.responses import JSONResponse, RedirectResponse

        def refused(status: int, why: str) -> JSONResponse:
            return JSONResponse({"error": why}, status_code=status)

        if request.method not in ("GET", "HEAD"):
            return refused(405, "the page only reads")
        names_this_machine = is_loopback(request.url.hostname or "")
        if self._token is None:
            return None if names_this_machine else refused(403, "the page is for this machine; open it as 127.0.0.1")
        offered = request.query_params.get("token")
        cookie = cookie_name(request.url.port)
        if offered is not None and _same(offered, self._token):
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(cookie, self._token, httponly=True, samesite="strict", max_age=30 * 86400)
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _same(request.cookies.get(cookie, ""), self._token) or _same(bearer, self._token):
            return None
        # The name is asked for as well: a page of another site runs in this user's browser, under its own name.
        if self._by_user and names_this_machine and is_of_this_user(request.scope["client"], request.scope["server"]):
            return None
        return refused(401, "open the page with the address that `roll view` printed; on this machine, as its user")


def cookie_name(port: int | None) -> str:
    """Return the cookie's name: browsers send cookies to every port of a host, so each page has its own."""
    return f"roll_view_token_{port}" if port else "roll_view_token"


def is_loopback(host: str) -> bool:
    """Return whether a name or address is that of this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_of_this_user(client: Address | None, server: Address | None) -> bool:
    """Return whether a connection's other end is a socket of this process's user, or of root, on this machine."""
    if client is None or server is None:
        return False
    try:
        ends = {_hexadecimal(client), _hexadecimal(client, mapped=True)}
        others = {_hexadecimal(server), _hexadecimal(server, mapped=True)}
    except ValueError:
        return False
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[1] in ends and fields[2] in others and fields[3] == _ESTABLISHED:
                return int(fields[7]) in (os.geteuid(), 0)
    return False


def users_are_known() -> bool:
    """Return whether the system tells whose a connection is: found by trying it."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.create_connection(listening.getsockname(), timeout=5) as client,
        ):
            return is_of_this_user(client.getsockname(), listening.getsockname())
    except OSError:
        return False


def _hexadecimal(address: Address, *, mapped: bool = False) -> str:
    """Return an address as the kernel's tables have it: words of four bytes in the machine's order, and the port."""
    address_parsed = ipaddress.ip_address(address[0])
    packed = address_parsed.packed
    if mapped and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{address[1]:04X}"


def _same(sent: str, token: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "replace"), token.encode())
