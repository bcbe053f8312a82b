"""The page's server: answers of `Api` as JSON, the page's own files, pictures of episodes. Loopback, or with a token.

What a run has recorded is text of a model, so it is data everywhere: JSON with its own content type, put on the page as
text, and a policy that lets no script run but the page's own files.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.view.api import Api
from roll.view.rows import BadQuery

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HERE = Path(__file__).parent
STATIC, THIRD_PARTY = HERE / "static", HERE / "third_party"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
COOKIE = "roll_view_token"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
logger = logging.getLogger(__name__)


def make_app(api: Api, *, token: str | None = None) -> Starlette:
    """Return the application.

    Args:
        token: what a visitor must bring, as `?token=` once or as a bearer token. None: nothing, and only requests
            that name this machine itself are answered, so that no page of another site can read a run.
    """
    from starlette.applications import Starlette
    from starlette.responses import FileResponse, JSONResponse, Response
    from starlette.routing import Route

    files = _own_files()

    def answer(request: Request) -> Response:
        given: dict[str, list[str]] = {}
        for name, value in request.query_params.multi_items():
            if name != "token":
                given.setdefault(name, []).append(value)
        try:
            body = json.dumps(api.answer(request.url.path, given), ensure_ascii=True, allow_nan=False)
        except BadQuery as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except KeyError:
            return JSONResponse({"error": "there is no such page; docs/view.md lists them"}, status_code=404)
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    def file(request: Request) -> Response:
        try:
            run = api.run(request.path_params["number"])
            path = api.file(run, request.query_params.get("path", ""))
            # What isn't a picture is saved and not shown.
            return FileResponse(path, filename=None if path.suffix == ".png" else path.name)
        except BadQuery as error:
            return JSONResponse({"error": str(error)}, status_code=404)

    def own(request: Request) -> Response:
        path = files.get(request.path_params.get("name") or "index.html")
        if path is None:
            return JSONResponse({"error": "there is no such file"}, status_code=404)
        return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers={"Cache-Control": "no-cache"})

    routes = [Route("/api/runs/{number}/file", file), Route("/api/{rest:path}", answer), Route("/{name:path}", own)]
    app = Starlette(routes=routes)
    app.add_middleware(_Guard, token=token)
    return app


def _own_files() -> dict[str, Path]:
    """Return the page's files by the name in their address: no request names a path."""
    found = {path.name: path for path in STATIC.iterdir() if path.suffix in _TYPES}
    for path in sorted(THIRD_PARTY.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            found[f"third_party/{path.relative_to(THIRD_PARTY).as_posix()}"] = path
    return found


class _Guard:
    """Who may ask, and the headers of every answer."""

    def __init__(self, app: Callable[..., Awaitable[None]], token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http":
            await (self._refusal(Request(scope)) or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Any:
        """Return what is answered instead of the page; None: it may be shown."""
        from starlette.responses import JSONResponse, RedirectResponse

        def refused(status: int, why: str) -> JSONResponse:
            return JSONResponse({"error": why}, status_code=status)

        if request.method not in ("GET", "HEAD"):
            return refused(405, "the page only reads")
        if self._token is None:
            here = is_loopback(request.url.hostname or "")
            return None if here else refused(403, "the page is for this machine; open it as 127.0.0.1")
        offered = request.query_params.get("token")
        if offered is not None and _same(offered, self._token):
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", max_age=30 * 86400)
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _same(request.cookies.get(COOKIE, ""), self._token) or _same(bearer, self._token):
            return None
        return refused(401, "open the page with the address that `roll view` printed")


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def is_loopback(host: str) -> bool:
    """Return whether a name or address is that of this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def serve(api: Api, *, host: str, port: int, token: str | None, ready: Callable[[str], None]) -> None:
    """Serve until interrupted. `ready` gets the page's address once it can be opened.

    Raises:
        ValueError: the port is taken, or the host isn't this machine's.
    """
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ValueError(f"can't listen on {host}:{port}: {error}; give another --port, or 0 for any") from error
    listening.listen(128)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    config = uvicorn.Config(make_app(api, token=token), log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    api.warm()
    ready(address if token is None else f"{address}?token={token}")
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
