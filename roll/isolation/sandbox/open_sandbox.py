"""From a name in YAML to a sandbox."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from roll.isolation.sandbox.base import Limits, Outcome, Program, Running, Sandbox, SandboxError, SandboxUnavailable
from roll.isolation.sandbox.local import LocalSandbox
from roll.isolation.sandbox.mechanisms import MECHANISMS
from roll.isolation.sandbox.remote import RemoteSandbox

AUTO = ("sandlock", "bwrap")
"""What `auto` tries, in this order; never `unconfined`."""
WHAT_TO_DO = (
    "Install one (pip install sandlock; apt-get install bubblewrap), use a kernel with Landlock, or give the address "
    "of a sandbox server; docs/sandbox.md says how to choose. `sandbox: unconfined` runs what the model writes without "
    "any containment"
)
_GREETING = b"contained\n"


def open_sandbox(name: str) -> Sandbox:
    """Open the sandbox called `auto`, `sandlock`, `bwrap`, `unconfined` or by the address of a remote one.

    Raises:
        SandboxUnavailable: it doesn't work on this machine. Nothing else is taken in its place.
    """
    if name.startswith(("http://", "https://")):
        remote = RemoteSandbox(name)
        try:
            remote.check()
            _greet(remote)
        except (SandboxUnavailable, SandboxError) as error:
            raise SandboxUnavailable(f"The sandbox server doesn't work: {error}. {WHAT_TO_DO}") from error
        return remote
    if name != "auto" and name not in MECHANISMS:
        raise SandboxUnavailable(f"sandbox {name!r}: expected auto, {', '.join(MECHANISMS)}, or an http(s) address")
    tried = []
    for mechanism in AUTO if name == "auto" else (name,):
        try:
            return _opened(mechanism)
        except (SandboxUnavailable, SandboxError) as error:
            tried.append(f"{mechanism}: {error}")
    raise SandboxUnavailable(f"No sandbox works here. Tried {'; '.join(tried)}. {WHAT_TO_DO}")


def _opened(mechanism: str) -> Sandbox:
    sandbox = LocalSandbox(mechanism)
    try:
        _greet(sandbox)
    except BaseException:
        sandbox.close()
        raise
    return sandbox


def _greet(sandbox: Sandbox) -> None:
    """Run a small program; raise `SandboxError` unless it ends well."""
    outcome = sandbox.run(Program(source=f"print({_GREETING.decode().strip()!r})"), Limits(wall_s=30.0))
    if outcome.stdout != _GREETING:
        stderr = outcome.stderr.decode(errors="replace")[-500:]
        raise SandboxError(f"a program that prints a word ended as {outcome.ending} {outcome.note}: {stderr}")


def probe_sandbox(name: str) -> str:
    """Open a sandbox, run a small program in it, and return which one it is.

    Raises:
        SandboxUnavailable: it doesn't work on this machine.
        SandboxError: it failed.
    """
    with open_sandbox(name) as sandbox:
        return sandbox.name


class SandboxOnDemand(Sandbox):
    """For functions that execute model output for some tasks alone: a run without such tasks starts nothing.

    Every method that runs something raises `SandboxUnavailable` where the sandbox doesn't work.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._opened: Sandbox | None = None
        self._lock = threading.Lock()

    def _open(self) -> Sandbox:
        with self._lock:
            if self._opened is None:
                self._opened = open_sandbox(self.name)
            return self._opened

    def run(self, program: Program, limits: Limits) -> Outcome:
        return self._open().run(program, limits)

    def start(self, program: Program, limits: Limits) -> Running:
        return self._open().start(program, limits)

    def extended(self, import_paths: Sequence[str], preload: Sequence[str] = ()) -> Sandbox:
        return self._open().extended(import_paths, preload)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
