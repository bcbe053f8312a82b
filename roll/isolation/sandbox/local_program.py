"""One program in a warm parent: its pipes, its limits, its end.

Everything happens in `_pump`, in the caller's thread: it moves bytes, watches what the program uses, and notices the
end. The warm parent enforces the wall time by itself, whether the caller comes back or not.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from roll.isolation.sandbox import usage
from roll.isolation.sandbox.base import Ending, Limits, Outcome, Program, Running, SandboxError
from roll.isolation.sandbox.parent_process import WarmParent, is_readable

_TICK_S = 0.05
_SOON_S = 0.005
_GRACE_S = 5.0  # Beyond the wall time, before the warm parent itself is given up
_CHUNK = 65_536
_MAX_FILES = 2_000
_FOLDER_SIZE_FACTOR = 8  # Times `Limits.file_mb`


class LocalProgram(Running):
    """See `Running`."""

    def __init__(
        self,
        parent: WarmParent,
        program: Program,
        limits: Limits,
        *,
        interactive: bool,
        contained: str,
        done: Callable[[WarmParent], None],
    ) -> None:
        self._parent, self._limits, self._done = parent, limits, done
        self._name = parent.next_name()
        self._home = os.path.join(parent.home, self._name)
        self._fds: dict[str, int] = {}
        self._out, self._err = bytearray(), bytearray()
        self._printed = {"out": 0, "err": 0}
        self._outcome: Outcome | None = None
        self._released = False
        self._unread = False
        self._killed: tuple[Ending, str] | None = None
        self._began = time.monotonic()
        self._deadline = self._began + limits.wall_s
        self._next_tick = self._began + _TICK_S
        body = json.dumps(
            {"source": program.source, "arguments": program.arguments, "interactive": interactive}
        ).encode()
        self._input = bytearray(struct.pack("!Q", len(body)) + body + program.stdin)
        self._input_ends = False
        try:
            self._begin(program, nproc=limits.processes + 1 if contained == "bwrap" and os.geteuid() != 0 else None)
        except BaseException:
            self._parent.usable = False
            self._release()
            raise

    def _begin(self, program: Program, nproc: int | None) -> None:
        os.mkdir(self._home, 0o700)
        for path, content in program.files.items():
            _write_file(self._home, path, content)
        theirs: list[int] = []
        try:
            for name in ("in", "out", "err"):
                reading, writing = os.pipe()
                self._fds[name] = writing if name == "in" else reading
                theirs.append(reading if name == "in" else writing)
                os.set_blocking(self._fds[name], False)
            self._serve("in")  # what the pipe takes: the program needn't wait for it
            limits = {
                "cpu_s": self._limits.cpu_s,
                "memory": self._parent.mapped + (self._limits.memory_mb << 20),
                "open_files": self._limits.open_files,
                "file_mb": self._limits.file_mb,
                "processes": nproc,
            }
            self._parent.ask(theirs, program=self._name, folder=self._home, wall_s=self._limits.wall_s, limits=limits)
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def _expect(self, what: str, timeout_s: float) -> dict[str, Any]:
        while True:
            answer = self._parent.answer(timeout_s)
            if answer.get(what) == self._name:
                return answer

    @property
    def parent_pid(self) -> int:
        """Return the process id of its warm parent."""
        return self._parent.pid

    # --- the seam ----------------------------------------------------------------------

    def write(self, data: bytes, timeout_s: float | None = None) -> bool:
        if self._input_ends:
            raise ValueError("the program's input was closed")
        self._input += data
        self._pump(timeout_s, lambda: not self._input)
        return not self._input and not self._unread

    def close_input(self) -> None:
        self._input_ends = True
        self._close_finished_input()

    def read_line(self, timeout_s: float | None = None) -> bytes | None:
        self._pump(timeout_s, lambda: b"\n" in self._out)
        end = self._out.find(b"\n") + 1
        if not end:
            return None
        line = bytes(self._out[:end])
        del self._out[:end]
        return line

    def wait(self) -> Outcome:
        if "in" not in self._fds and self._outcome is None and not self._parent.has_buffered():
            # Most programs end soon: their caller wakes up once then, and not for every pipe, too.
            is_readable(self._parent.answers, _SOON_S)
        self._pump(None, lambda: False)
        assert self._outcome is not None
        return self._outcome

    def kill(self) -> None:
        if self._outcome is None:
            self._stop("killed", "by its caller")
            with contextlib.suppress(SandboxError):
                self.wait()

    # --- the work ----------------------------------------------------------------------

    def _pump(self, timeout_s: float | None, enough: Callable[[], bool]) -> None:
        """Move bytes until `enough`, the time is over, or the program has ended."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self._outcome is None and not enough():
                now = time.monotonic()
                if until is not None and now >= until:
                    return
                if now >= self._next_tick:
                    self._watch()
                    self._next_tick = time.monotonic() + _TICK_S
                if now > self._deadline + _GRACE_S:
                    raise SandboxError(
                        f"the program didn't end {_GRACE_S:g} s after its limit of {self._limits.wall_s:g} s"
                    )
                left = self._next_tick - now if until is None else min(self._next_tick, until) - now
                self._move(max(0.0, left))
        except BaseException:
            self._parent.usable = False
            self._outcome = self._outcome or Outcome(
                ending="killed", exit_code=None, stdout=b"", stderr=b"", seconds=0.0, note="the sandbox failed"
            )
            self._release()
            raise

    def _move(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._parent.answers, select.POLLIN)
        names = {descriptor: name for name, descriptor in self._fds.items()}
        for descriptor, name in names.items():
            if name == "in" and not self._input:
                continue
            poll.register(descriptor, select.POLLOUT if name == "in" else select.POLLIN)
        if self._parent.has_buffered():
            timeout_s = 0
        events = dict(poll.poll(timeout_s * 1000))
        for descriptor in events:
            if descriptor in names:
                self._serve(names[descriptor])
        if self._parent.answers in events or self._parent.has_buffered():
            self._finish(self._expect("ended", 10.0))

    def _serve(self, name: str) -> None:
        descriptor = self._fds[name]
        if name == "in":
            try:
                del self._input[: os.write(descriptor, self._input[:_CHUNK])]
            except BlockingIOError:
                return
            except OSError:  # it doesn't read any more
                self._input.clear()
                self._unread = True
                self._close("in")
            self._close_finished_input()
            return
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._close(name)
            return
        buffer = self._out if name == "out" else self._err
        room = self._limits.output_bytes - self._printed[name]
        self._printed[name] += len(data)
        buffer += data[: max(0, room)]
        if len(data) > room:
            self._stop("output", f"more than {self._limits.output_bytes} bytes on std{name}")

    def _close_finished_input(self) -> None:
        if self._input_ends and not self._input:
            self._close("in")

    def _watch(self) -> None:
        """Kill the program if it uses more than it may, in sum over its processes."""
        used, limits = self._parent.usage(), self._limits
        if used.memory > limits.memory_mb << 20:
            self._stop("memory", f"more than {limits.memory_mb} MiB")
        elif used.processes > limits.processes:
            self._stop("processes", f"more than {limits.processes} processes and threads")
        elif used.cpu_s > limits.cpu_s:
            self._stop("timeout", f"more than {limits.cpu_s:g} s of CPU")
        else:
            entries, size = usage.folder_usage(self._home)
            if entries > _MAX_FILES or size > (limits.file_mb << 20) * _FOLDER_SIZE_FACTOR:
                self._stop(
                    "killed", f"more than {_MAX_FILES} files, or {_FOLDER_SIZE_FACTOR * limits.file_mb} MiB of them"
                )

    def _stop(self, ending: Ending, note: str) -> None:
        if self._killed is None and self._outcome is None:
            self._killed = (ending, note)
            self._parent.ask(kill=self._name)

    def _finish(self, answer: dict[str, Any]) -> None:
        for name in ("out", "err"):
            while name in self._fds and self._drained(name):
                pass
        ending, note = self._ending(answer)
        code = answer["code"] if ending == "exited" else None
        seconds = time.monotonic() - self._began
        self._outcome = Outcome(
            ending=ending, exit_code=code, stdout=bytes(self._out), stderr=bytes(self._err), seconds=seconds, note=note
        )
        if not answer["clean"]:
            self._parent.usable = False
        self._release()
        if not answer["confined"]:
            raise SandboxError("the program couldn't be confined, and wasn't run")

    def _drained(self, name: str) -> bool:
        """Read once what is left in a pipe whose writers are gone; return whether there may be more."""
        try:
            before = self._printed[name]
            self._serve(name)
        except OSError:
            return False
        return self._printed[name] > before

    def _ending(self, answer: dict[str, Any]) -> tuple[Ending, str]:
        number = answer["signal"]
        if self._killed is not None:
            return self._killed
        if answer["because"] == "deadline":
            return "timeout", f"{self._limits.wall_s:g} s on the clock"
        if number == signal.SIGXCPU or (number == signal.SIGKILL and answer["cpu_s"] >= self._limits.cpu_s):
            return "timeout", f"{self._limits.cpu_s:g} s of CPU"
        if number:
            return "killed", f"by signal {number}"
        if self._err.endswith(b"MemoryError\n"):
            return "exited", f"with a MemoryError: it may have {self._limits.memory_mb} MiB"
        return "exited", ""

    def _close(self, name: str) -> None:
        if name in self._fds:
            os.close(self._fds.pop(name))

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        for name in list(self._fds):
            self._close(name)
        with contextlib.suppress(OSError):
            usage.remove_tree(self._home)
        if not self._parent.is_clean():
            self._parent.usable = False  # a new one, with a new folder
        self._done(self._parent)


def _write_file(folder: str, path: str, content: bytes) -> None:
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts:
        raise ValueError(f"program file {path!r}: expected a relative path without '..'")
    file = Path(folder, relative)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
