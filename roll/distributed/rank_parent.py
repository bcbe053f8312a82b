"""The warm parent of ranks: a process that imports once what every rank needs, and forks each of them.

Several ranks on few cores would import torch and transformers one beside the other. Ray has every worker started by a
program that may be named (`py_executable`); ours is `rank_launcher.py`, which hands what Ray gave it (arguments,
environment, folder, standard streams) to the warm parent, and becomes an ordinary Python where that doesn't answer.

    controller     starts the warm parent, and holds the end of a pipe that tells it to end
    warm parent    imports in a single thread, then forks for every connection; a child runs Ray's script of a worker
    launcher       lives as long as the child, for Ray, which has started it

A fork has whatever libraries had read from the environment by then. So only a rank is forked whose variables are all
those of the warm parent; and where an accelerator is visible none is, for its driver may not be forked.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from roll.utils.importing import keep_imports, long_imports

THREADS = "OMP_NUM_THREADS"
_CLOSE_SECONDS = 5.0


def rank_threads(slots: int, slots_of_machine: int) -> int:
    """Return the threads of a rank with so many slots of its machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // slots_of_machine) * max(1, slots)


def rank_variables() -> dict[str, str]:
    """Return the variables by which ranks import what the controller imports."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class RankParent:
    """The warm parent as the controller knows it."""

    def __init__(self, folder: Path, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it in a private `folder`, without waiting for it to import `modules`.

        `environment` is that of the ranks, which have no other variables before their worker is built.
        """
        self._environment = dict(environment)
        self._socket = folder / "ranks"
        read_end, self._alive = os.pipe()
        try:
            # Bound here: a launcher that came too soon would find nobody.
            with socket.socket(socket.AF_UNIX) as listener, open(folder / "ranks.log", "wb") as log:
                listener.bind(str(self._socket))
                listener.listen(64)
                code = "from roll.distributed.rank_parent import main; "
                code += f"main({listener.fileno()}, {read_end}, {list(modules)!r})"
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=(listener.fileno(), read_end),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,  # Ctrl-C is for the controller
                )
        except BaseException:
            os.close(self._alive)
            raise
        finally:
            os.close(read_end)

    def command(self, variables: Mapping[str, str]) -> str | None:
        """Return the command that starts a rank with these variables; None: it isn't one to be forked."""
        if self._process.poll() is not None or any(self._environment.get(n) != v for n, v in variables.items()):
            return None
        launcher = Path(__file__).with_name("rank_launcher.py")
        return shlex.join([sys.executable, "-I", "-S", str(launcher), str(self._socket)])

    def close(self) -> None:
        """End it, and every rank that is left."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
            try:
                self._process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def main(listener: int, controller: int, modules: Sequence[str]) -> None:
    """Import, then fork ranks until the controller closes its end of the pipe; each of them returns from here."""
    keep_imports()
    with long_imports():
        for module in modules:
            importlib.import_module(module)
    # A fork has one of several threads alone, and the locks that the others hold. And Ray reads from the environment,
    # when it is imported, which worker of which job this is.
    if len(os.listdir("/proc/self/task")) > 1 or "ray" in sys.modules:
        return
    serve(socket.socket(fileno=listener), controller)


def serve(listener: socket.socket, controller: int) -> None:
    """Fork ranks until the pipe ends; then kill those that are left."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    ranks: list[int] = []
    while True:
        ready = select.select([listener.fileno(), controller], [], [])[0]
        if controller in ready:  # nothing is ever written to it
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
            return
        connection = listener.accept()[0]
        pid = os.fork()
        if pid == 0:
            for descriptor in (listener.fileno(), controller, *ranks):
                os.close(descriptor)
            run_rank(connection)
            return
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            ranks.append(os.pidfd_open(pid))


def run_rank(connection: socket.socket) -> None:
    """Become the worker that a launcher asks for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # as a worker of Ray's own leaves the group of who started it
    length, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        about = json.loads(stream.read(int.from_bytes(length, "big")))
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(about["environment"])
    os.chdir(about["folder"])
    sys.argv = about["arguments"]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        connection.send(b"1")
    except BrokenPipeError:
        return  # it didn't wait, and is a worker by itself
    runpy.run_path(sys.argv[0], run_name="__main__")
