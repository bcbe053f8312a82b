"""The ways to start a warm parent: contained by sandlock, by bubblewrap, or not at all.

Each takes what to start and returns pipes and a handle. Whether it really contains is the red-team suite's to say
(tests/isolation).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from roll.isolation.sandbox import usage
from roll.isolation.sandbox.base import SandboxUnavailable
from roll.isolation.sandbox.readable import Interpreter

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True, kw_only=True)
class Start:
    """What to start."""

    interpreter: Interpreter
    command: list[str]
    folder: str
    """The only place that it may write to."""
    environment: Mapping[str, str]
    processes: int
    """How many there may be at once, the warm parent included."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A process with the ways to it."""

    pid: int
    """As this process sees it."""
    requests: socket.socket
    """To write to; it takes descriptors, too."""
    answers: int
    """Descriptor to read from."""
    kill: Callable[[], None]
    """End it with all that it started, and free it."""
    errors: Callable[[], str] = str
    """The end of what it wrote to its standard error."""


def start_unconfined(start: Start) -> Started:
    """Start it as it is."""
    return _popen(start.command, start)


def start_bwrap(start: Start) -> Started:
    """Start it in namespaces of its own: files, processes, network, IPC."""
    tool = shutil.which("bwrap")
    if tool is None:
        raise SandboxUnavailable("bwrap isn't installed; apt-get install bubblewrap")
    command = [tool, "--unshare-all", "--as-pid-1", "--new-session", "--cap-drop", "ALL", "--dir", "/tmp"]
    for path in start.interpreter.coarse:
        real = os.path.realpath(path)
        command += ["--ro-bind", real, real]
        if real != path:
            command += ["--ro-bind", real, path]
    for device in _DEVICES:
        if os.path.exists(device):
            command += ["--dev-bind", device, device]
    command += ["--bind", start.folder, start.folder, "--chdir", start.folder, "--"]
    return _popen([*command, *start.command], start)


def start_sandlock(start: Start) -> Started:
    """Start it under Landlock and seccomp, with sandlock as its supervisor."""
    try:
        import sandlock
    except ImportError as error:
        raise SandboxUnavailable(f"sandlock can't be imported ({error}); pip install sandlock==0.9.0") from error
    abi, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if abi < needed:
        raise SandboxUnavailable(
            f"sandlock needs Landlock ABI {needed}, and this kernel has {abi}; use Linux 6.12 or later, with landlock "
            "in its list of security modules (lsm=)"
        )
    devices = [path for path in _DEVICES if os.path.exists(path)]
    policy = {
        "fs_readable": [*start.interpreter.coarse, *devices],
        "fs_writable": [start.folder, *devices[:1]],
        "max_processes": start.processes,
        "clean_env": True,
        "env": dict(start.environment),
        "cwd": start.folder,
    }
    # Its supervisor keeps a descriptor for every process that ever was: in a process of its own, not in the caller's.
    command = [sys.executable, "-c", _SUPERVISOR, json.dumps(policy), *start.command]
    return _popen(command, start, PYTHONPATH=str(Path(str(sandlock.__file__)).parents[1]))


_SUPERVISOR = """
import json, resource, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
import sandlock
same = sandlock.StdioMode.INHERIT
sandlock.Sandbox(**json.loads(sys.argv[1])).popen(sys.argv[2:], stdin=same, stdout=same, stderr=same).wait()
"""


def _popen(command: list[str], start: Start, **environment: str) -> Started:
    file = Path(start.folder, "errors")
    requests, theirs = socket.socketpair()
    try:
        with theirs, file.open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**start.environment, **environment},
                cwd=start.folder,
                start_new_session=True,
            )
    except OSError as error:
        requests.close()
        raise SandboxUnavailable(f"{command[0]} can't be started: {error}") from error
    assert process.stdout is not None
    answers = process.stdout

    def kill() -> None:
        for way in (requests, answers):  # the warm parent ends its program and itself
            with contextlib.suppress(OSError):
                way.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3.0)
            return
        for pid in [*usage.descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)

    def errors_text() -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return file.read_text(encoding="utf-8", errors="replace")[-500:].strip()

    return Started(pid=process.pid, requests=requests, answers=answers.fileno(), kill=kill, errors=errors_text)


MECHANISMS: dict[str, Callable[[Start], Started]] = {
    "sandlock": start_sandlock,
    "bwrap": start_bwrap,
    "unconfined": start_unconfined,
}
