"""One process of a pool, seen from its parent: what it was asked, what it is doing, how it ended.

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
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from roll.processes.child import ChildProcess
from roll.processes.frames import Frames, frame

T = TypeVar("T")

_READ_BYTES = 1 << 20
_READS_AT_END = 1000


@dataclass(slots=True, eq=False)
class Call:
    """One request, from when it is sent until it is answered."""

    key: int  # Whose it is: a key of `WorkerProcess.assigned`
    arguments: tuple[Any, ...]
    doing: str  # What it is, for error messages: `step 2`
    when: str  # The same as a clause: `during step 2`


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended, or why it was killed."""

    status: Literal["died", "timeout"]
    reason: str  # A clause for error messages
    running: Call | None  # The call that was under way
    was_ready: bool
    load_error: bool  # It reported that it can't load what it needs: starting another is no use


class Pool(Protocol, Generic[T]):
    """What it needs of its `ProcessPool`: settings, and whom to tell."""

    handler: ClassVar[str]
    what: ClassVar[str]
    setup: bytes
    timeout_s: float
    start_timeout_s: float

    def ready(self, process: WorkerProcess[T]) -> None:
        """It has loaded what it needs."""

    def answered(self, process: WorkerProcess[T], call: Call, answer: tuple[Any, ...]) -> None:
        """A call has come back."""

    def ended(self, process: WorkerProcess[T], ended: Ended) -> None:
        """It is gone, with all it started; nothing further will be told about it."""


class WorkerProcess(Generic[T]):
    """A child that answers calls."""

    def __init__(self, pool: Pool[T], index: int) -> None:
        """Start it; `pool.ready` follows. Calls may be sent at once: they wait in the pipe."""
        self.assigned: dict[int, T] = {}  # What the pool has given it to do
        self.answers = 0
        self.index = index
        self.is_ready = False
        self.gone = False
        self.resident_mb = 0.0
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._outbox: list[tuple[Any, ...]] = []
        self._unsent = bytearray(frame(pool.setup))
        self._frames = Frames()
        self._started_at = self._heard_at = time.monotonic()
        ours, theirs = socket.socketpair()
        self._pipe = ours
        with tempfile.TemporaryFile() as shared, theirs:
            shared.truncate(16)
            self._memory = mmap.mmap(shared.fileno(), 16)
            self._progress = memoryview(self._memory).cast("Q")
            fds = (theirs.fileno(), shared.fileno())
            module, name = pool.handler.split(":")
            load = f"from roll.processes.serve import serve; from {module} import {name}"
            code = f"{load}; serve({fds[0]}, {fds[1]}, {pool.timeout_s * 1.25 + 5.0}, {name})"
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
        self._outbox.append((number, *call.arguments))

    def check(self) -> None:
        """Notice, from time to time, what no message tells: a call or a start that takes too long, or the end of a
        process whose pipe a grandchild holds open."""
        if self.gone:
            return
        if self._child.has_ended():
            self._read_rest()
            if not self.gone:
                self._died()
            return
        self._child.limit_stderr()
        pool, now = self._pool, time.monotonic()
        if not self.is_ready:
            if now - self._started_at > pool.start_timeout_s:
                self._end("timeout", f"its process took over {pool.start_timeout_s:g} s to load {pool.what}")
            return
        running, started_at = self._running()
        if running is not None:
            if now - started_at > pool.timeout_s:
                self._end("timeout", f"{running.doing} took over {pool.timeout_s:g} s", running)
        elif self._calls and now - max(self._heard_at, started_at) > pool.timeout_s:
            # Between two calls for so long: it was stopped, or something in it holds all threads up.
            self._end("timeout", f"its process did nothing for over {pool.timeout_s:g} s between calls")

    def kill(self) -> None:
        """Kill it and its process group without telling the pool."""
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
        """Take what it wrote before it ended."""
        with contextlib.suppress(BlockingIOError, OSError):
            for _ in range(_READS_AT_END):
                piece = b"" if self.gone else self._pipe.recv(_READ_BYTES)
                if not piece:
                    return
                self._take(piece)

    def _take(self, piece: bytes) -> None:
        self._heard_at = time.monotonic()
        try:
            messages = self._frames.feed(piece)
        except pickle.UnpicklingError as error:
            self.refuse(str(error))
            return
        for message in messages:
            if self.is_ready:
                self._hand_on(message)
            else:
                self._note_start(message)
            if self.gone:
                return

    def _note_start(self, message: Any) -> None:
        match message:
            case ("ready", float(resident_mb)):
                self.is_ready, self.resident_mb = True, resident_mb
                self._pool.ready(self)
            case ("failed", str(why)):
                self._end("died", f"its process can't load {self._pool.what}:\n{why}", load_error=True)
            case _:
                self.refuse("it sent an unknown message")

    def _hand_on(self, answers: Any) -> None:
        """What runs in the process can write to its pipe, too: so an answer is looked at before it is believed."""
        for answer in answers if isinstance(answers, list) else [None]:
            match answer:
                case (int(number), _, _, *_) if number in self._calls:
                    self.answers += 1
                    self._pool.answered(self, self._calls.pop(number), answer[1:])
                case _:
                    self.refuse("it answered what it wasn't asked")
            if self.gone:
                return

    def refuse(self, why: str, call: Call | None = None) -> None:
        """Kill it for what it wrote, as an answer to `call` if that is known."""
        self._end("died", f"its process was killed: {why}", call or self._running()[0])

    def _died(self) -> None:
        running = self._running()[0]
        when = running.when if running else "between calls" if self.is_ready else "while it started"
        self._end("died", f"its process {self._child.how_it_ended(when)}", running)

    def _end(
        self, status: Literal["died", "timeout"], reason: str, running: Call | None = None, *, load_error: bool = False
    ) -> None:
        self.kill()
        self._pool.ended(self, Ended(status, reason, running, self.is_ready, load_error))
