"""A sandbox server: runs programs that clients post, each in the sandbox of this machine.

    ROLL_SANDBOX_TOKEN=... python examples/sandbox_server/server.py --host 0.0.0.0 --port 8321

The protocol is in docs/sandbox.md. Put TLS in front of it where the network isn't yours.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from roll.isolation.sandbox.base import Sandbox, SandboxError
from roll.isolation.sandbox.open_sandbox import open_sandbox
from roll.isolation.sandbox.remote import TOKEN_VARIABLE, outcome_to_json, program_from_json

MAX_REQUEST_BYTES = 64 << 20
MAX_WALL_S = 120.0


def make_server(sandbox: Sandbox, host: str, port: int, token: str) -> ThreadingHTTPServer:
    """Return a server that isn't serving yet."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 30.0  # seconds of silence, so that a client that stops sending doesn't keep a thread

        def do_POST(self) -> None:
            given = self.headers.get("Authorization", "")
            if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return self.answer(401, {"error": "wrong or missing token"})
            try:
                length = int(self.headers.get("Content-Length", ""))
                if not 0 <= length <= MAX_REQUEST_BYTES:
                    raise ValueError(f"a request of {length} bytes")
                request = json.loads(self.rfile.read(length))
                if self.path == "/health":
                    return self.answer(200, {"contained": sandbox.name != "unconfined", "sandbox": sandbox.name})
                if self.path != "/run":
                    return self.answer(404, {"error": "expected /run or /health"})
                program, limits = program_from_json(request)
                if not 0 < limits.wall_s <= MAX_WALL_S:  # not a number is refused, too
                    raise ValueError(f"wall_s: expected more than 0 and at most {MAX_WALL_S:g}")
                return self.answer(200, outcome_to_json(sandbox.run(program, limits)))
            except ValueError as error:
                return self.answer(400, {"error": str(error)})
            except SandboxError as error:
                return self.answer(503, {"error": str(error)})

        def answer(self, code: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="Run programs that clients post, each in a sandbox.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--sandbox", default="auto", help="auto (default), sandlock or bwrap")
    options = parser.parse_args()
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token and options.host not in ("127.0.0.1", "localhost", "::1"):
        parser.error(f"set {TOKEN_VARIABLE}: without a token anybody could run programs here")
    with open_sandbox(options.sandbox) as sandbox:
        print(f"{sandbox.name} at http://{options.host}:{options.port}", flush=True)
        make_server(sandbox, options.host, options.port, token).serve_forever()


if __name__ == "__main__":
    main()
