"""A sandbox on another machine, over HTTP: docs/sandbox.md has the protocol, examples/sandbox_server a server."""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

from roll.isolation.sandbox.base import Ending, Limits, Outcome, Program, Sandbox, SandboxError, SandboxUnavailable

TOKEN_VARIABLE = "ROLL_SANDBOX_TOKEN"
"""The environment variable with the token that a server asks for."""
_GRACE_S = 10.0  # Beyond the wall time, for the way there and back
_CONNECTIONS = 3
_MAX_RESPONSE_BYTES = 64 << 20


class RemoteSandbox(Sandbox):
    """Sends programs to a server. It holds no connection."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        """`token`: None takes it from the environment; a server may do without."""
        self.name = address.rstrip("/")
        self._token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def check(self) -> None:
        """Ask the server whether it contains programs; raise `SandboxUnavailable` if not."""
        try:
            health = self._post("/health", {}, timeout_s=10.0)
        except SandboxError as error:
            raise SandboxUnavailable(str(error)) from error
        if health.get("contained") is not True:
            raise SandboxUnavailable(f"{self.name} doesn't contain programs; start it with a sandbox that does")

    def run(self, program: Program, limits: Limits) -> Outcome:
        request = {
            "program": {
                "source": program.source,
                "stdin": _encode(program.stdin),
                "arguments": list(program.arguments),
                "files": {path: _encode(content) for path, content in program.files.items()},
            },
            "limits": asdict(limits),
        }
        return outcome_from_json(self._post("/run", request, timeout_s=limits.wall_s + _GRACE_S), limits)

    def start(self, program: Program, limits: Limits) -> Any:  # noqa: ARG002 - see `Sandbox`
        raise SandboxError(f"{self.name}: a remote sandbox can't talk with a program that runs; use a local one")

    def extended(self, import_paths: Sequence[str], preload: Sequence[str] = ()) -> Sandbox:  # noqa: ARG002
        raise SandboxError(
            f"{self.name}: a remote sandbox has no folders of this machine ({', '.join(import_paths)}); use a local one"
        )

    def close(self) -> None:
        pass

    def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        # Lone surrogates in a source are escaped by JSON and come through.
        request = urllib.request.Request(self.name + path, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + timeout_s
        for attempt in range(1, _CONNECTIONS + 1):
            try:
                with self._opener.open(request, timeout=max(0.1, deadline - time.monotonic())) as response:
                    answer = json.loads(_read(response, deadline))
                if not isinstance(answer, dict):
                    raise ValueError("expected an object")
                return answer
            except urllib.error.HTTPError as error:
                body_text = error.read(500).decode(errors="replace")
                hint = f"; set {TOKEN_VARIABLE} to its token" if error.code == 401 else ""
                raise SandboxError(f"{self.name}{path} answered {error.code}: {body_text}{hint}") from error
            except urllib.error.URLError as error:
                # Only a connection that wasn't made is tried again: otherwise the program may have run already.
                refused = isinstance(error.reason, ConnectionRefusedError)
                if not refused or attempt == _CONNECTIONS or time.monotonic() + attempt * 0.2 > deadline:
                    raise SandboxError(f"{self.name} can't be reached: {error.reason}") from error
                time.sleep(0.2 * attempt)
            except (OSError, ValueError) as error:
                raise SandboxError(f"{self.name}{path} didn't answer as documented: {error}") from error
        raise AssertionError("the last attempt returns or raises")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would send programs and the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _read(response: Any, deadline: float) -> bytes:
    data = bytearray()
    while chunk := response.read1(65_536):
        data += chunk
        if len(data) > _MAX_RESPONSE_BYTES:
            raise ValueError(f"more than {_MAX_RESPONSE_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("not all of it came in time")
    return bytes(data)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"), validate=True)


def program_from_json(request: dict[str, Any]) -> tuple[Program, Limits]:
    """Return what a client sent; raise `ValueError` for anything that isn't as documented."""
    try:
        sent = request["program"]
        program = Program(
            source=str(sent["source"]),
            stdin=_decode(sent["stdin"]),
            arguments=tuple(str(argument) for argument in sent["arguments"]),
            files={str(path): _decode(content) for path, content in sent["files"].items()},
        )
        known = {name: type(value) for name, value in asdict(Limits()).items()}
        limits = Limits(**{name: known[name](value) for name, value in request["limits"].items()})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a request as documented: {type(error).__name__} {error}") from error
    return program, limits


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return what a client reads."""
    return {**asdict(outcome), "stdout": _encode(outcome.stdout), "stderr": _encode(outcome.stderr)}


def outcome_from_json(answer: dict[str, Any], limits: Limits) -> Outcome:
    """Return what a server answered; raise `SandboxError` for anything that isn't as documented."""
    try:
        if answer["ending"] not in get_args(Ending):
            raise ValueError(f"ending {answer['ending']!r}")
        code = answer["exit_code"]
        if code is not None and type(code) is not int:
            raise ValueError(f"exit_code {code!r}")
        return Outcome(
            ending=answer["ending"],
            exit_code=code,
            stdout=_decode(answer["stdout"])[: limits.output_bytes],
            stderr=_decode(answer["stderr"])[: limits.output_bytes],
            seconds=float(answer["seconds"]),
            note=str(answer["note"])[:1000],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SandboxError(
            f"the sandbox server's answer isn't as documented: {type(error).__name__} {error}"
        ) from error
