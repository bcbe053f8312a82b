"""The remote sandbox, against the server of examples/."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roll.isolation.sandbox.base import Limits, Program, SandboxError, SandboxUnavailable
from roll.isolation.sandbox.local import LocalSandbox
from roll.isolation.sandbox.open_sandbox import open_sandbox
from roll.isolation.sandbox.remote import RemoteSandbox

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "sandbox_server"))
from server import make_server

LIMITS = Limits(wall_s=20.0)


@contextmanager
def serving(server: http.server.HTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def local() -> Iterator[LocalSandbox]:
    with LocalSandbox("unconfined", parallel=1) as sandbox:  # what contains is tested elsewhere
        yield sandbox


@pytest.fixture(scope="module")
def address(local: LocalSandbox) -> Iterator[str]:
    with serving(make_server(local, "127.0.0.1", 0, "secret")) as found:
        yield found


def test_a_program_runs_far_away_as_it_does_here(address: str):
    source = (
        "import sys; print(sys.argv, sys.stdin.read(), open('a').read()); print('\\ud800'.encode('utf8', 'replace'))"
    )
    program = Program(source=source, stdin=b"x\xc3\xa4", arguments=("1",), files={"a": b"z"})
    outcome = RemoteSandbox(address, token="secret").run(program, LIMITS)
    assert outcome.stdout.decode() == "['main.py', '1'] xä z\nb'?'\n"
    assert (outcome.ending, outcome.exit_code) == ("exited", 0)
    outcome = RemoteSandbox(address, token="secret").run(
        Program(source="import time; time.sleep(9)"), Limits(wall_s=0.5)
    )
    assert outcome.ending == "timeout"


def test_a_wrong_token_is_refused_and_said(address: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SandboxError, match=r"answered 401.*ROLL_SANDBOX_TOKEN"):
        RemoteSandbox(address, token="other").run(Program(source="print(1)"), LIMITS)
    monkeypatch.setenv("ROLL_SANDBOX_TOKEN", "secret")
    assert RemoteSandbox(address).run(Program(source="print(1)"), LIMITS).stdout == b"1\n"


def test_a_server_that_contains_nothing_is_not_opened(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLL_SANDBOX_TOKEN", "secret")
    with pytest.raises(SandboxUnavailable, match="doesn't contain programs"):
        open_sandbox(address)


def test_a_bad_request_is_an_error_of_the_sandbox(address: str):
    with pytest.raises(SandboxError, match=r"answered 400.*wall_s"):
        RemoteSandbox(address, token="secret").run(Program(source=""), Limits(wall_s=1e6))
    with pytest.raises(SandboxError, match=r"answered 400.*relative path"):
        RemoteSandbox(address, token="secret").run(Program(source="", files={"/x": b""}), LIMITS)
    with pytest.raises(SandboxError, match="use a local one"):
        RemoteSandbox(address).start(Program(source=""), LIMITS)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"ending": "won", "exit_code": 0, "stdout": "", "stderr": "", "seconds": 1, "note": ""}'],
)
def test_an_answer_that_is_not_as_documented_is_an_error(body: bytes):
    class Odd(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with serving(http.server.HTTPServer(("127.0.0.1", 0), Odd)) as odd, pytest.raises(SandboxError, match="documented"):
        RemoteSandbox(odd).run(Program(source=""), LIMITS)


def test_nobody_there_is_an_error():
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    port = server.server_address[1]
    server.server_close()
    with pytest.raises(SandboxUnavailable, match=r"can't be reached.*docs/sandbox.md"):
        open_sandbox(f"http://127.0.0.1:{port}")
