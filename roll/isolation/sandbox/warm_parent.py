"""The warm parent: an interpreter that is started once, confined, and forks a process for every program.

It runs by itself, on the standard library alone: `WarmParent` in `parent_process.py` sends it this file and those it
imports. Per program it reads one line of JSON from the socket on descriptor 0, with the program's pipes as descriptors
beside it, and answers with one on descriptor 1 when the program has ended. It never sees what a program is made of:
the forked process, confined by then, reads that from its own input.

The kernel checks a set of rules whenever a process enters it, and under sandlock every call that opens a path or makes
a process waits for the supervisor. So the warm parent enters the long sets of Landlock and seccomp once, itself, and
programs inherit them. A program opens its folder alone: it adds a rule set for that, and refuses what is left.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import linecache
import os
import random
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any

from roll.isolation.sandbox import confine

_GIVE_UP_S = 5.0  # After a kill: until then everything is gone, or the caller is told that it isn't


def serve(setup: dict[str, Any]) -> None:
    """Fork programs until descriptor 0 ends."""
    os.closerange(3, 1 << 16)
    confine.adopt_orphans()
    if setup["confined"]:
        confine.drop_privileges()
    sys.path[:] = setup["import_path"]
    for name in setup["preload"]:
        __import__(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "roll"]:
        del sys.modules[name]
    wakeup, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    streams = _standard_streams()
    confinement = _Confinement(setup["paths"]) if setup["confined"] else None
    gc.collect()
    gc.freeze()  # programs share these pages as long as nothing writes to them
    _tell(ready=True, pid=os.getpid())
    requests = _Requests(wakeup)
    while (request := requests.next(None)) is not None:
        if "program" in request:
            _run(request, requests, streams, confinement)
    shutil.rmtree(setup["home"], ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(setup["errors"])


class _Confinement:
    """What the warm parent enters for good, and what each program adds to it."""

    def __init__(self, paths: dict[str, int]) -> None:
        self._landlock = confine.landlock_abi() > 0
        self._null = os.open("/dev/null", os.O_PATH) if os.path.exists("/dev/null") else -1
        self._rest = confine.seccomp_rest()
        if self._landlock:
            rules = confine.landlock_rules(paths)
            confine.landlock_enter(rules)
            os.close(rules)
        confine.seccomp_enter(confine.seccomp_program())

    def own_folder(self, path: str) -> None:
        """Let this process write into its own folder alone: the warm parent may into that of all programs."""
        if self._landlock:
            folder = os.open(path, os.O_PATH)  # not its caller's: behind that, `..` would lead out of bwrap's namespace
            confine.landlock_enter(confine.landlock_own_rules(folder, self._null))

    def finish(self) -> None:
        """Refuse this process the calls that confine: nothing is added, and nothing undone."""
        confine.seccomp_enter(self._rest)


def _tell(**fields: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller is gone, and descriptor 0 says so too
        os.write(1, json.dumps(fields).encode() + b"\n")


class _Requests:
    """The lines of descriptor 0, the descriptors beside them, and the news of dead children."""

    def __init__(self, wakeup: int) -> None:
        self._wakeup = wakeup
        self._socket = socket.socket(fileno=0)
        self._data = b""
        self.ended = False
        self.descriptors: list[int] = []
        """A program's pipes."""

    def next(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the next line; None when a child changed, the time is over, or there are no more."""
        while b"\n" not in self._data:
            ready = select.select([0, self._wakeup], [], [], timeout_s)[0]
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            if 0 in ready:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 65536, 3)
                self.descriptors += descriptors
                self.ended = self.ended or not data
                self._data += data
                if self.ended:
                    return None
            elif timeout_s is not None:
                return None
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]


def _run(
    request: dict[str, Any], requests: _Requests, streams: list[io.TextIOWrapper], confinement: _Confinement | None
) -> None:
    deadline = time.monotonic() + request["wall_s"]
    pipes, requests.descriptors = requests.descriptors, []
    confined, confirm = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            signal.set_wakeup_fd(-1)
            body = _become_program(request, [*pipes, confirm], parent, confinement)
            _execute(body, streams)
        finally:
            os._exit(70)  # confinement failed: nothing was run
    for descriptor in (*pipes, confirm):
        os.close(descriptor)
    because = ""
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        asked = requests.next(max(0.0, deadline - time.monotonic()))
        if requests.ended or (asked is not None and asked.get("kill") == request["program"]):
            because = "asked"
            break
        if time.monotonic() >= deadline:
            because = "deadline"
            break
    status, used, clean = _end(child)
    exited = os.WIFEXITED(status)
    _tell(
        ended=request["program"],
        code=os.WEXITSTATUS(status) if exited else None,
        signal=0 if exited else os.WTERMSIG(status),
        cpu_s=used,
        because=because,
        clean=clean,
        confined=bool(os.read(confined, 1)) if clean else True,
    )
    os.close(confined)


def _end(child: int) -> tuple[int, float, bool]:
    """Kill a program's group and reap all of it: its status, processor time, and whether nothing is left.

    The group lasts as long as its first process isn't reaped, so that this can't hit another one. There is none if that
    process was killed before it made one, and then it has started nothing.
    """
    os.kill(child, signal.SIGKILL)  # from here on it can't make a group either
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status, used, give_up = 0, 0.0, time.monotonic() + _GIVE_UP_S
    pause = 0.0002
    while True:
        try:
            pid, code, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return status, used, True
        if pid == 0:
            if time.monotonic() > give_up:
                return status, used, False
            _kill_strays(os.getpid())
            time.sleep(pause)
            pause = min(0.01, 2 * pause)
            continue
        used += usage.ru_utime + usage.ru_stime
        if pid == child:
            status = code


def _kill_strays(pid: int) -> None:
    """Kill what left the group; only an unconfined program can, and there /proc is to be seen."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = [int(child) for child in file.read().split()]
    except OSError:
        return
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _become_program(
    request: dict[str, Any], pipes: list[int], parent: int, confinement: _Confinement | None
) -> dict[str, Any]:
    """Confine this process; then read what the program is."""
    os.setpgid(0, 0)
    confine.die_with_parent(parent)
    os.chdir(request["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if confinement:
        confinement.own_folder(request["folder"])
    assert len(pipes) == 4 <= min(pipes), "a pipe would be overwritten before it is in its place"
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
    os.closerange(len(pipes), 1 << 16)
    confine.limit_resources(**request["limits"])
    if confinement:
        confinement.finish()
    os.write(3, b"1")  # the warm parent knows now that this happened; without it, how it ended means nothing
    os.close(3)
    environment = {"HOME": request["folder"], "TMPDIR": request["folder"], "PWD": request["folder"]}
    os.environ.update(environment)
    (length,) = struct.unpack("!Q", _read_exactly(8))
    return json.loads(_read_exactly(length))  # type: ignore[no-any-return]


def _read_exactly(length: int) -> bytes:
    pieces = []
    while length:
        piece = os.read(0, min(length, 1 << 16))
        if not piece:
            os._exit(71)  # the caller went away
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def _standard_streams() -> list[io.TextIOWrapper]:
    """Return what a program has as standard input, output and errors, unused.

    They are made once, over pipes as programs have them: each asks for the kind and the position of what is behind it,
    and in a program sandlock's supervisor would have to answer that.
    """
    reading, writing = os.pipe()
    kept = [os.dup(number) for number in range(3)]
    for number, end in enumerate((reading, writing, writing)):
        os.dup2(end, number)
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    out, err = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    stdout, stderr = io.TextIOWrapper(out, "utf-8"), io.TextIOWrapper(err, "utf-8", "backslashreplace")
    stderr.reconfigure(line_buffering=True)
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, number)
    for descriptor in (*kept, reading, writing):
        os.close(descriptor)
    return [stdin, stdout, stderr]


def _execute(body: dict[str, Any], streams: list[io.TextIOWrapper]) -> None:
    """Run the source as `__main__` of a fresh interpreter would, and end the process."""
    source = body["source"].encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    sys.stdin, sys.stdout, sys.stderr = streams
    if body["interactive"]:
        sys.stdout.reconfigure(line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv = ["main.py", *body["arguments"]]
    random.seed()
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__="main.py")
    sys.modules["__main__"] = module
    linecache.cache["main.py"] = (len(source), None, source.splitlines(keepends=True), "main.py")
    code = 1
    try:
        exec(compile(source, "main.py", "exec"), module.__dict__)
        code = 0
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:  # noqa: BLE001 - as an interpreter does at the top
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        with contextlib.suppress(BaseException):
            traceback.print_exception(type(error), error, frames)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001 - closed, or replaced by the program
            code = code or 120
    os._exit(code)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(BaseException):
        sys.stderr.write(f"{code}\n")
    return 1
