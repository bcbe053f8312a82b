"""The page's server: answers of `Api` as JSON, the page's own files, pictures of episodes.

What a run has recorded is text of a model, so it is data everywhere: JSON with its own content type, put on the page as
text, and a policy that lets no script run but the page's own files.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from roll.workbench.view.api import Api
from roll.workbench.view.rows import BadQuery
from roll.workbench.view.visitors import AccessMiddleware

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HERE = Path(__file__).parent
STATIC, THIRD_PARTY = HERE / "static", HERE / "third_party"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
logger = logging.getLogger(__name__)


def make_app(api: Api, *, token: str | None = None, by_user: bool = False) -> Starlette:
    """Return the application, which answers the visitors that `AccessMiddleware` lets in."""
    from starlette.applications import Starlette
    from starlette.responses import FileResponse, JSONResponse, Response
    from starlette.routing import Route

    files = _own_files()

    def answer(request: Request) -> Response:
        parameters: dict[str, list[str]] = {}
        for name, value in request.query_params.multi_items():
            if name != "token":
                parameters.setdefault(name, []).append(value)
        try:
            body = json.dumps(api.answer(request.url.path, parameters), ensure_ascii=True, allow_nan=False)
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
    app.add_middleware(AccessMiddleware, token=token, by_user=by_user)
    return app


def _own_files() -> dict[str, Path]:
    """Return the page's files by the name in their address: no request names a path."""
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in _TYPES}
    for path in sorted(THIRD_PARTY.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            files[f"third_party/{path.relative_to(THIRD_PARTY).as_posix()}"] = path
    return files


def serve(api: Api, *, host: str, port: int, token: str, by_user: bool, ready: Callable[[str], None]) -> None:
    """Serve until interrupted. `ready` gets the page's address once it can be opened, with the token if it is needed.

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
    app = make_app(api, token=token, by_user=by_user)
    # No proxy is believed: what a visitor's headers say of its address would decide who it is.
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", proxy_headers=False)
    server = uvicorn.Server(config)
    api.warm()
    ready(address if by_user else f"{address}?token={token}")
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
