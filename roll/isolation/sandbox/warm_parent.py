"""The warm parent: an interpreter that is started once, confined, and forks a process for every program.

It runs by itself, on the standard library alone: `WarmParent` in `parent_process.py` sends it this file and those it
imports. It reads one line of JSON per program from descriptor 0 and answers with two on descriptor 1, `started` and
`ended`. It never sees what a program is made of: the forked process, confined by then, reads that from its own input.
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
    rules, filter_ = -1, b""
    if setup["confined"]:
        confine.drop_privileges()
        filter_ = confine.seccomp_program()
        if confine.landlock_abi() > 0:
            rules = confine.landlock_rules(setup["paths"])
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
    gc.collect()
    gc.freeze()  # programs share these pages as long as nothing writes to them
    _tell(ready=True, pid=os.getpid())
    requests = _Requests(wakeup)
    while (request := requests.next(None)) is not None:
        if "program" in request:
            _run(request, requests, rules, filter_)
    shutil.rmtree(setup["folder"], ignore_errors=True)


def _tell(**fields: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller is gone, and descriptor 0 says so too
        os.write(1, json.dumps(fields).encode() + b"\n")


class _Requests:
    """The lines of descriptor 0, and the news of dead children."""

    def __init__(self, wakeup: int) -> None:
        self._wakeup = wakeup
        self._data = b""
        self.ended = False

    def next(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the next line; None when a child changed, the time is over, or there are no more."""
        while b"\n" not in self._data:
            ready = select.select([0, self._wakeup], [], [], timeout_s)[0]
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            if 0 in ready:
                data = os.read(0, 65536)
                self.ended = self.ended or not data
                self._data += data
                if self.ended:
                    return None
            elif timeout_s is not None:
                return None
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]


def _run(request: dict[str, Any], requests: _Requests, rules: int, filter_: bytes) -> None:
    deadline = time.monotonic() + request["wall_s"]
    names = request["pipes"]
    pipes = [os.open(names[0], os.O_RDONLY | os.O_NONBLOCK)]
    pipes += [os.open(name, os.O_WRONLY | os.O_NONBLOCK) for name in names[1:]]
    confined, confirm = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            signal.set_wakeup_fd(-1)
            _become_program(request, [*pipes, confirm], parent, rules, filter_)
        finally:
            os._exit(70)  # confinement failed: nothing was run
    os.close(confirm)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # the child does so too: whoever is first
    for pipe in pipes:
        os.close(pipe)
    _tell(started=request["program"])
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

    The group lasts as long as its first process isn't reaped, so that this can't hit another one.
    """
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


def _become_program(request: dict[str, Any], pipes: list[int], parent: int, rules: int, filter_: bytes) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    confine.die_with_parent(parent)
    for number, pipe in enumerate(pipes):
        os.set_blocking(pipe, True)
        os.dup2(pipe, 100 + number)
    if rules >= 0:
        rules = os.dup2(rules, 100 + len(pipes))
    for number in range(len(pipes)):
        os.dup2(100 + number, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.chdir(request["folder"])
    confine.limit_resources(**request["limits"])
    if rules >= 0:
        confine.landlock_enter(rules)
        # The first set was made once, for the folder of all programs; this one leaves each its own.
        own = {request["folder"]: confine.WRITE, "/dev/null": confine.DEVICE}
        confine.landlock_enter(confine.landlock_rules(own, writes_alone=True))
    os.closerange(4, 1 << 16)
    if filter_:
        confine.seccomp_enter(filter_)
    os.write(3, b"1")  # the warm parent knows now that this happened; without it, how it ended means nothing
    os.close(3)
    environment = {"HOME": request["folder"], "TMPDIR": request["folder"], "PWD": request["folder"]}
    os.environ.update(environment)
    (length,) = struct.unpack("!Q", _read_exactly(8))
    body = json.loads(_read_exactly(length))
    source = body["source"].encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    _execute(source, body["arguments"], line_buffered=body["interactive"])


def _read_exactly(length: int) -> bytes:
    pieces = []
    while length:
        piece = os.read(0, min(length, 1 << 16))
        if not piece:
            os._exit(71)  # the caller went away
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def _execute(source: str, arguments: list[str], *, line_buffered: bool) -> None:
    """Run the source as `__main__` of a fresh interpreter would, and end the process."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    out = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(out, "utf-8", line_buffering=line_buffered)
    err = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(err, "utf-8", "backslashreplace", line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv = ["main.py", *arguments]
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
