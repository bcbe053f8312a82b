"""A warm parent seen from the process that uses it: started, asked to run a program, killed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roll.isolation.sandbox import confine, syscalls, usage, warm_parent
from roll.isolation.sandbox.base import SandboxError, SandboxUnavailable
from roll.isolation.sandbox.mechanisms import Start, Started
from roll.isolation.sandbox.readable import Interpreter

_START_S = 90.0  # it may import sympy first, on a machine that does other things
_ANSWER_BYTES = 65_536
_MAX_OPEN_FILES = 4_096

WARM_MODULES = (
    "abc", "array", "ast", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "math", "operator", "queue",
    "random", "re", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "time",
    "traceback", "types", "typing", "unittest", "unittest.mock", "weakref",
)  # fmt: skip
"""Imported once; a program that imports one of them pays nothing."""

_BOOTSTRAP = """
import json, os, sys, types
data = b""
while not data.endswith(b"\\n"):
    data += os.read(0, 1 if len(data) < 20 else min(65536, int(data[:20]) + 21 - len(data)))
setup = json.loads(data[20:])
for name in ("roll", "roll.isolation", "roll.isolation.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in setup.pop("modules"):
    module = sys.modules["roll.isolation.sandbox." + name] = types.ModuleType("roll.isolation.sandbox." + name)
    setattr(sys.modules["roll.isolation.sandbox"], name, module)
    exec(compile(source, name + ".py", "exec"), module.__dict__)
try:
    module.serve(setup)
except BaseException as error:
    os.write(1, json.dumps({"failed": f"{type(error).__name__}: {error}"[:2000]}).encode() + b"\\n")
"""
"""Reads a line: twenty digits with its length, then JSON. What is behind it stays in the pipe."""


class WarmParent:
    """One warm parent. It runs one program at a time; one thread at a time uses it."""

    def __init__(
        self,
        mechanism: Callable[[Start], Started],
        folder: str,
        interpreter: Interpreter,
        *,
        confined: bool,
        processes: int,
        preload: Sequence[str],
    ) -> None:
        """Start it and wait until it is ready.

        Raises:
            SandboxUnavailable: it can't be started here.
        """
        self.folder, self.processes = folder, processes
        self.home = os.path.join(folder, "home")
        """The folder of all its programs' folders."""
        os.makedirs(self.home)
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": folder,
            "PYTHONHASHSEED": "0",  # sets have an order, and a score is the same again
            "PYTHONDONTWRITEBYTECODE": "1",
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        }
        command = [interpreter.executable, "-s", "-S", "-B", "-X", "utf8", "-c", _BOOTSTRAP]
        # One program beside the warm parent, and one process that was killed and isn't gone yet.
        self._process = mechanism(
            Start(
                interpreter=interpreter,
                command=command,
                folder=folder,
                environment=environment,
                processes=processes + 2,
            )
        )
        self._process.requests.setblocking(False)
        self._data = b""
        self.usable = True
        """False: it can't be trusted with another program."""
        self.done = False
        """Nobody uses it."""
        self._closed = False
        self._programs = 0
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the supervisor's own
        self._most_open_files = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, hard // 4)
        setup = {
            "modules": list(read_sources().items()),
            "confined": confined,
            # Programs inherit these rights and write into their own folders alone; at the end it removes all that.
            "paths": {**interpreter.rights, self.home: confine.WRITE, folder: confine.REMOVE},
            "import_path": interpreter.import_path,
            "preload": [*WARM_MODULES, *preload],
            "home": self.home,
            "errors": os.path.join(folder, "errors"),
        }
        text = json.dumps(setup).encode()
        try:
            self.send(f"{len(text):020d}".encode() + text + b"\n", _START_S)
            self.answer(_START_S)
        except SandboxError as error:
            stderr = self._process.errors()
            self.close()
            skipped = ", ".join(interpreter.skipped)
            raise SandboxUnavailable(
                f"{error}, with {interpreter.executable}"
                + (f"; it wrote: {stderr}" if stderr else "")
                + (f"; paths that this user can't read: {skipped}" if skipped else "")
            ) from error
        self.pid = (usage.descendants(self._process.pid) or [self._process.pid])[-1]
        with contextlib.suppress(OSError):  # the kernel, short of memory, ends a program before anything else
            Path(f"/proc/{self.pid}/oom_score_adj").write_text("1000", encoding="ascii")
        self.mapped = usage.mapped_bytes(self.pid)

    @property
    def answers(self) -> int:
        """Return the descriptor that becomes readable when there is an answer."""
        return self._process.answers

    def send(self, data: bytes, timeout_s: float, descriptors: Sequence[int] = ()) -> None:
        """Write to it; `descriptors` go with the first byte."""
        deadline = time.monotonic() + timeout_s
        while data:
            try:
                sent = socket.send_fds(self._process.requests, [data], descriptors)
                data, descriptors = data[sent:], ()
                continue
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._failed(f"it ended ({error})") from error
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._failed(f"it took no request for {timeout_s:g} s")
            select.select([], [self._process.requests], [], left)

    def ask(self, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Send a request."""
        self.send(json.dumps(fields).encode() + b"\n", 5.0, descriptors)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return its next answer; raise `SandboxError` if there is none in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._data:
            left = deadline - time.monotonic()
            if left <= 0 or not is_readable(self._process.answers, left):
                raise self._failed(f"no answer within {timeout_s:g} s")
            data = os.read(self._process.answers, _ANSWER_BYTES)
            if not data:
                raise self._failed("it ended")
            self._data += data
            if len(self._data) > _ANSWER_BYTES:
                raise self._failed("it answered with too much")
        line, _, self._data = self._data.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise self._failed(f"it answered {line[:100]!r}") from error
        if not isinstance(answer, dict):
            raise self._failed(f"it answered {line[:100]!r}")
        if "failed" in answer:
            raise self._failed(str(answer["failed"]))
        return answer

    def has_buffered(self) -> bool:
        """Return whether a whole answer was read and not returned yet."""
        return b"\n" in self._data

    def next_name(self) -> str:
        """Return a name for its next program."""
        self._programs += 1
        return str(self._programs)

    def is_clean(self) -> bool:
        """Return whether no program has left anything in the folder of all programs."""
        return not os.listdir(self.home)

    def worn_out(self) -> bool:
        """Return whether its supervisor has so many files open that another should take its place."""
        try:
            open_files = os.stat(
                f"/proc/{self._process.pid}/fd"
            ).st_size  # 0 before Linux 6.2, where sandlock can't run
        except OSError:
            return False
        return open_files > self._most_open_files

    def usage(self) -> usage.Usage:
        """Return what its program and all that it started use now."""
        return usage.usage_of(usage.descendants(self.pid))

    def close(self) -> None:
        """Kill it with all that it started. Harmless when repeated."""
        self.usable = False
        if not self._closed:
            self._closed = True
            self._process.kill()
            with contextlib.suppress(OSError):
                usage.remove_tree(self.folder)

    def _failed(self, why: str) -> SandboxError:
        self.usable = False
        return SandboxError(f"the sandbox's warm parent failed: {why}")


def read_sources() -> dict[str, str]:
    """Return what the warm parent is made of, in the order of its imports: it can't read this project's folder."""
    return {
        str(module.__name__).rpartition(".")[2]: Path(str(module.__file__)).read_text(encoding="utf-8")
        for module in (syscalls, confine, warm_parent)
    }


def is_readable(descriptor: int, timeout_s: float) -> bool:
    """Return whether there is something to read within that time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
