"""Child processes that are forked from one which has imported what they import.

A run in a test starts a process for its reward or its environments, and half of the CPU time of a small run goes into
that process's imports; a whole run in a process of its own imports for seconds. Here one process does it once, and
every child is a fork of it: with the environment, folder, import path, files and process group that a started one has.
Tests of the pools and of commands start real ones.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

_MAX_REQUEST_BYTES = 1_000_000
_STANDARD_FILES = 3
POOLS = ("roll.envs.env_worker", "roll.isolation.processes.child_requests", "roll.rewards.reward_worker")
"""What the children of pools import."""


class ForkServer:
    """The parent's side: `start` stands for `subprocess.Popen` in `roll.isolation.processes.child`."""

    def __init__(self, *modules: str, **environment: str) -> None:
        """Start it; it imports the modules, and has these variables besides those of this process."""
        from roll.isolation.processes.child import child_environment

        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST_BYTES)
        self.environment = {**child_environment(), **environment}
        self.environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import fork_server; fork_server.serve({theirs.fileno()}, {modules})"],
            pass_fds=[theirs.fileno()],
            env=self.environment,
            start_new_session=True,
        )
        theirs.close()

    def start(self, command: list[str], *, pass_fds: Any, stderr: Any, env: dict[str, str], **others: Any) -> Any:
        """Fork the child that `command` would start, or start it where it is another interpreter's."""
        if command[0] != sys.executable or env["PYTHONHASHSEED"] != "0":
            return subprocess.Popen(command, pass_fds=pass_fds, stderr=stderr, env=env, **others)
        return self.fork(command[-1], env, stderr.fileno(), pass_fds)

    def fork(self, code: str, environment: dict[str, str], stderr: int, files: Sequence[int] = ()) -> ForkedChild:
        """Run code in a child, which inherits the files."""
        request = (code, environment, os.getcwd(), tuple(files))
        return ForkedChild(self, self.ask(request, [stderr, *files]))

    def ask(self, request: object, files: Sequence[int] = ()) -> int:
        """Return the answer to one request: the id of a child, or the exit code of one."""
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(request)], files)
            return int(self._socket.recv(64))

    def close(self) -> None:
        """End the server; it goes when the socket does."""
        self._socket.close()
        self._process.wait()


class ForkedChild:
    """What `ChildProcess` needs of a `Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._server, self._ended, self._lock = server, os.pidfd_open(pid), threading.Lock()

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code."""
        with self._lock:
            if self.returncode is None:
                if not select.select([self._ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
                self.returncode = self._server.ask(self.pid)
                os.close(self._ended)
        return self.returncode


def serve(number: int, modules: tuple[str, ...]) -> None:
    """Fork a child for each request, and tell how one that has ended did so, until the parent is gone."""
    for module in modules:
        importlib.import_module(module)
    parent = socket.socket(fileno=number)
    while True:
        message, files, _, _ = socket.recv_fds(parent, _MAX_REQUEST_BYTES, 8)
        if not message:
            return
        request = pickle.loads(message)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            parent.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            parent.close()
            _become(*request, files)
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        for file in files:
            os.close(file)
        parent.send(str(pid).encode())


def _become(code: str, environment: dict[str, str], folder: str, numbers: tuple[int, ...], files: list[int]) -> None:
    """Run `code` as a process of its own would, in the forked child, and exit."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = dict.fromkeys([*environment["PYTHONPATH"].split(os.pathsep), *sys.path])
        nothing = os.open(os.devnull, os.O_RDWR)
        # Above every number that they are to have, so that none takes another's place.
        above = max(numbers, default=0) + _STANDARD_FILES + len(files) + 1
        for offset, file in enumerate([nothing, nothing, *files]):
            os.dup2(file, above + offset)
        for offset, target in enumerate([0, 1, 2, *numbers]):
            os.dup2(above + offset, target, inheritable=True)
        for file in {nothing, *files, *range(above, above + 2 + len(files))} - {0, 1, 2, *numbers}:
            os.close(file)
        time.tzset()
        sys.argv = ["-c"]
        exec(code, {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter would at its end
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def forking(server: ForkServer) -> Iterator[None]:
    """Have the pools of this process fork their children."""
    from roll.isolation.processes import child

    stand_in = SimpleNamespace(**vars(subprocess) | {"Popen": server.start})
    with mock.patch.object(child, "subprocess", stand_in):
        yield
