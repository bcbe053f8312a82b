"""One environment process, seen from its parent: what it was asked, what it is doing, how it ended.

All methods run in the thread of the pool's event loop, and none of them waits for the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import pickle
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from roll.envs.env_registry import EnvSpec
from roll.envs.messages import Frames, frame
from roll.utils.child import ChildProcess

_READ_BYTES = 1 << 20
_READS_AT_END = 1000


@dataclass(slots=True, eq=False)
class Call:
    """One request, from when it is sent until it is answered."""

    instance: int
    kind: Literal["open", "step", "close"]
    arguments: tuple[Any, ...]
    doing: str
    """What it is, for error messages."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended, or why it was killed."""

    status: Literal["env_error", "timeout"]
    reason: str
    """A clause for error messages."""
    running: Call | None
    """The call that was under way."""
    load_error: bool
    """It said that it can't load the environments: starting another is no use."""


class Owner(Protocol):
    """Who is told."""

    def ready(self, process: EnvProcess) -> None:
        """It has loaded its environments."""

    def answered(self, process: EnvProcess, call: Call, answer: tuple[Any, ...]) -> None:
        """A call has come back: `("ok", result)`, `("error", text)` or `("closed", megabytes, error)`."""

    def ended(self, process: EnvProcess, ended: Ended) -> None:
        """It is gone, with all it started; nothing further will be told about it."""


class EnvProcess:
    """A child that holds many instances."""

    def __init__(
        self, owner: Owner, specs: Mapping[str, EnvSpec], *, index: int, timeout_s: float, start_timeout_s: float
    ) -> None:
        """Start it; `owner.ready` follows. Calls may be sent at once: they wait in the pipe."""
        self.index = index
        self.is_ready = False
        self.gone = False
        self.resident_mb = 0.0
        self._owner = owner
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._outbox: list[tuple[Any, ...]] = []
        self._unsent = bytearray(frame(pickle.dumps(dict(specs))))
        self._frames = Frames()
        self._started_at = self._heard_at = time.monotonic()
        ours, theirs = socket.socketpair()
        self._pipe = ours
        with tempfile.TemporaryFile() as shared, theirs:
            shared.truncate(16)
            self._memory = mmap.mmap(shared.fileno(), 16)
            self._progress = memoryview(self._memory).cast("Q")
            fds = (theirs.fileno(), shared.fileno())
            code = f"from roll.envs.env_worker import main; main({fds[0]}, {fds[1]}, {timeout_s * 1.25 + 5.0})"
            try:
                self._child = ChildProcess(code, fds)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._loop.add_reader(ours, self._read)
        self._write()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._child.pid

    @property
    def idle(self) -> bool:
        """Whether it has answered everything."""
        return not self._calls

    def send(self, call: Call) -> None:
        """Ask for something. What is asked in one tick of the event loop goes in one write."""
        assert not self.gone, "a process that has ended was sent a call"
        if not self._outbox:
            self._loop.call_soon(self._write)
            if not self._calls:
                self._heard_at = time.monotonic()  # it has been idle until now
        number = next(self._numbers)
        self._calls[number] = call
        self._outbox.append((number, call.kind, call.instance, *call.arguments))

    def check(self) -> None:
        """Notice, from time to time, what no message tells: a call or a start that takes too long, or the end of a
        process whose pipe a grandchild holds open.
        """
        if self.gone:
            return
        if self._child.has_ended():
            self._read_rest()
            self._died()
            return
        self._child.limit_stderr()
        now = time.monotonic()
        if not self.is_ready:
            if now - self._started_at > self._start_timeout_s:
                self._end("timeout", f"its process took over {self._start_timeout_s:g} s to load the environments")
            return
        running, started_at = self._running()
        if running is not None:
            if now - started_at > self._timeout_s:
                self._end("timeout", f"{running.doing} took over {self._timeout_s:g} s", running)
        elif self._calls and now - max(self._heard_at, started_at) > self._timeout_s:
            # Between two calls for so long: it was stopped, or something in it holds all threads up.
            self._end("timeout", f"its process did nothing for over {self._timeout_s:g} s between calls")

    def kill(self) -> None:
        """End it without telling the owner."""
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._pipe)
        self._loop.remove_writer(self._pipe)
        self._pipe.close()
        self._child.kill()
        self._progress.release()
        self._memory.close()

    def _running(self) -> tuple[Call | None, float]:
        """The call under way, and when it started, or the last one did."""
        number, started_ns = self._progress[0], self._progress[1]
        if self._progress[0] != number:
            return None, time.monotonic()  # just now
        return self._calls.get(number), started_ns / 1e9

    def _write(self) -> None:
        if self.gone:
            return
        if self._outbox:
            self._unsent += frame(self._outbox)
            self._outbox.clear()
        with contextlib.suppress(BlockingIOError, OSError):  # an end is noticed by the reader
            while self._unsent:
                sent = self._pipe.send(self._unsent)
                del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._pipe, self._write)
        else:
            self._loop.remove_writer(self._pipe)

    def _read(self) -> None:
        try:
            piece = self._pipe.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if piece:
            self._take(piece)
        elif not self.gone:
            self._died()

    def _read_rest(self) -> None:
        """What it said before it ended."""
        with contextlib.suppress(BlockingIOError, OSError):
            for _ in range(_READS_AT_END):
                piece = b"" if self.gone else self._pipe.recv(_READ_BYTES)
                if not piece:
                    return
                self._take(piece)

    def _take(self, piece: bytes) -> None:
        self._heard_at = time.monotonic()
        for message in self._frames.feed(piece):
            if self.is_ready:
                self._hand_on(message)
            elif message[0] == "ready":
                self.is_ready, self.resident_mb = True, message[1]
                self._owner.ready(self)
            else:
                self._end("env_error", f"its process can't load the environments:\n{message[1]}", load_error=True)
            if self.gone:
                return

    def _hand_on(self, answers: list[tuple[Any, ...]]) -> None:
        for answer in answers:
            call = self._calls.pop(answer[0])
            if answer[1] == "closed":
                self.resident_mb = answer[2]
            self._owner.answered(self, call, answer[1:])

    def _died(self) -> None:
        running = self._running()[0]
        doing = f"during {running.doing}" if running else "between calls" if self.is_ready else "while it started"
        self._end("env_error", f"its process {self._child.how_it_ended(doing)}", running)

    def _end(
        self,
        status: Literal["env_error", "timeout"],
        reason: str,
        running: Call | None = None,
        *,
        load_error: bool = False,
    ) -> None:
        self.kill()
        self._owner.ended(self, Ended(status, reason, running, load_error))
