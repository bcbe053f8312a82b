"""From a name in YAML to a sandbox."""

from __future__ import annotations

from roll.sandbox.base import Limits, Program, Sandbox, SandboxError, SandboxUnavailable

_GREETING = b"contained\n"


def open_sandbox(name: str) -> Sandbox:
    """Open the sandbox called `auto`, `sandlock`, `bwrap`, `unconfined` or by the address of a remote one.

    Raises:
        SandboxUnavailable: it doesn't work on this machine. Nothing else is taken in its place.
    """
    raise SandboxUnavailable(f"sandbox {name!r}: not there yet")


def probe_sandbox(name: str) -> str:
    """Open a sandbox, run a small program in it, and return which one it is.

    Raises:
        SandboxUnavailable: it doesn't work on this machine.
        SandboxError: it failed.
    """
    with open_sandbox(name) as sandbox:
        outcome = sandbox.run(Program(source=f"print({_GREETING.decode().strip()!r})"), Limits(wall_s=30.0))
        if outcome.stdout != _GREETING:
            said = outcome.stderr.decode(errors="replace")[-500:]
            raise SandboxError(
                f"sandbox {sandbox.name}: a program that prints a word ended as {outcome.ending}: {said}"
            )
        return sandbox.name
