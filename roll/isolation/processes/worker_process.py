"""One process of a pool, seen from its parent: what it was asked, what it is doing, how it ended.

All methods run in the thread of the pool's event loop, and none of them waits for the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import pickle
import secrets
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from roll.isolation.processes.child import ChildProcess
from roll.isolation.processes.frames import PACKET_BYTES, SECRET_BYTES, Frames, packets

T = TypeVar("T")

_READS_AT_ONCE = 64
_READS_AT_END = 20_000
_ASYNC_GRACE_S = 2.0  # Beyond the time limit, for a call that its own process has to cancel


@dataclass(slots=True, eq=False)
class Call:
    """One request, from when it is sent until it is answered."""

    key: int  # Whose it is: a key of `WorkerProcess.assigned`
    arguments: tuple[Any, ...]
    doing: str  # What it is, for error messages: `step 2`
    when: str | None = None  # The same as a clause; None: `during step 2`
    parts: int = 1  # How often it may restart its clock, which bounds the whole
    sent_at: float = 0.0
    began_at: float = 0.0  # When it was first seen running


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a process ended, or why it was killed."""

    status: Literal["died", "timeout"]
    reason: str  # A clause for error messages
    running: Call | None  # The call that was under way
    was_ready: bool
    load_error: bool  # It reported that it can't load what it needs: starting another is no use
    blamed: tuple[Call, ...] = ()  # The calls that it may be the doing of


class Pool(Protocol, Generic[T]):
    """What it needs of its `ProcessPool`: settings, and whom to tell."""

    handler: ClassVar[str]
    what: ClassVar[str]
    setup: bytes
    timeout_s: float
    start_timeout_s: float
    memory_mb: float
    environment: Mapping[str, str] | None
    python: str | None
    hash_seed: int
    counters: Counter[str]

    def ready(self, process: WorkerProcess[T]) -> None:
        """Note that it has loaded what it needs."""

    def answered(self, process: WorkerProcess[T], call: Call, answer: tuple[Any, ...]) -> None:
        """Take the answer to a call."""

    def ended(self, process: WorkerProcess[T], ended: WorkerExit) -> None:
        """Note that it is gone, with all it started; no other method is called for it again."""


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
        self.slots = 0
        """Calls that it takes at once, if it says so itself."""
        self.mode = ""
        """`batch`, `async`, or one after the other."""
        self._calls: dict[int, Call] = {}
        self._random_numbers: list[int] = []
        self._outbox: list[tuple[int, tuple[Any, ...]]] = []
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._unsent = deque(packets(pool.setup, self._secret))
        self._frames = Frames(self._secret)
        self._started_at = self._heard_at = time.monotonic()
        self._last_progress: tuple[int, int, float] = (
            0,
            0,
            0.0,
        )  # The shared memory, and when it was first seen like that
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pipe = ours
        shared = os.memfd_create("progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.truncate(shared, 16)
            self._memory = mmap.mmap(shared, 16)
            self._progress = memoryview(self._memory).cast("Q")
            fds = (theirs.fileno(), shared)
            module, name = pool.handler.split(":")
            # The handler is imported once the parent can be told that this fails.
            load = f"lambda setup: __import__({module!r}, fromlist=[{name!r}]).{name}(setup)"
            serve = f"serve({fds[0]}, {fds[1]}, {pool.timeout_s}, {load}, memory_mb={pool.memory_mb})"
            code = f"from roll.isolation.processes.child_requests import serve; {serve}"
            self._child = ChildProcess(code, fds, pool.environment, pool.python, pool.hash_seed)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(shared)
        ours.setblocking(False)
        self._loop.add_reader(ours, self._read)
        self._write()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._child.pid

    @property
    def idle(self) -> bool:
        """Return whether it has answered everything."""
        return not self._calls

    def send(self, call: Call) -> None:
        """Ask for something. What is asked in one tick of the event loop goes in one write."""
        assert not self.gone, "a process that has ended was sent a call"
        if not self._outbox:
            self._loop.call_soon(self._write)
            if not self._calls:
                self._heard_at = time.monotonic()  # it has been idle until now
        if not self._random_numbers:  # each draw asks the system, so many are drawn at once
            self._random_numbers = list(struct.unpack("256Q", os.urandom(2048)))
        number = (self._random_numbers.pop() >> 2) + 1  # an answer to anything but what is asked now can't be made up
        call.sent_at = time.monotonic()
        self._calls[number] = call
        self._outbox.append((number, call.arguments))

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
        if self.mode == "async":
            self._check_async(now)
            return
        running, started_at = self._running()
        if running is not None:
            self._heard_at = now
            running.began_at = running.began_at or started_at
            if now - started_at > pool.timeout_s or now - running.began_at > running.parts * pool.timeout_s + 1.0:
                self._end("timeout", f"{running.doing} took over {pool.timeout_s:g} s", running)
        elif self._calls and now - self._heard_at > pool.timeout_s:
            # Between two calls for so long: it was stopped, or something in it holds all threads up.
            self._end("timeout", f"its process did nothing for over {pool.timeout_s:g} s between calls")

    def _check_async(self, now: float) -> None:
        """End the process if a call outlives its cancellation at its deadline: something blocks the event loop then."""
        limit_s = self._pool.timeout_s
        overdue = [call for call in self._calls.values() if now - call.sent_at > limit_s * 1.1 + _ASYNC_GRACE_S]
        if overdue:
            running = self._running()[0]
            reason = f"{(running or overdue[0]).doing} took over {limit_s:g} s and held up its process"
            self._end("timeout", reason, running, blamed=(running,) if running is not None else tuple(overdue))

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
        """Return the call under way, and when it started. The memory is the child's, so its times are only believed
        between when the call was sent and when it was first seen."""
        now = time.monotonic()
        number, started_ns = self._progress[0], self._progress[1]
        if self._progress[0] != number:
            return None, now  # just now
        if self._last_progress[:2] != (number, started_ns):
            self._last_progress = (number, started_ns, now)
        call = self._calls.get(number)
        if call is None:
            return None, now
        return call, max(min(started_ns / 1e9, self._last_progress[2]), call.sent_at)

    def _write(self) -> None:
        if self.gone:
            return
        if self._outbox:
            self._unsent += packets(self._outbox, self._secret)
            self._outbox.clear()
        with contextlib.suppress(BlockingIOError, OSError):  # an end is noticed by the reader
            while self._unsent:
                self._pipe.send(self._unsent[0])
                self._unsent.popleft()
        if self._unsent:
            self._loop.add_writer(self._pipe, self._write)
        else:
            self._loop.remove_writer(self._pipe)

    def _read(self) -> None:
        for _ in range(_READS_AT_ONCE):
            try:
                packet = self._pipe.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if packet:
                self._take(packet)
            else:
                self._died()
            if self.gone:
                return

    def _read_rest(self) -> None:
        """Take what it wrote before it ended."""
        with contextlib.suppress(BlockingIOError, OSError):
            for _ in range(_READS_AT_END):
                packet = b"" if self.gone else self._pipe.recv(PACKET_BYTES)
                if not packet:
                    return
                self._take(packet)

    def _take(self, packet: bytes) -> None:
        discarded = self._frames.discarded
        try:
            messages = self._frames.feed(packet)
        except pickle.UnpicklingError as error:
            self.refuse(str(error))
            return
        if self._frames.discarded != discarded:
            self._pool.counters["discarded"] += 1
        for message in messages:
            if self.is_ready:
                self._hand_on(message)
            else:
                self._note_start(message)
            if self.gone:
                return

    def _note_start(self, message: Any) -> None:
        match message:
            case ("ready", float(resident_mb), int(slots), str(mode)):
                self.is_ready, self.resident_mb, self.slots, self.mode = True, resident_mb, slots, mode
                self._heard_at = time.monotonic()
                self._pool.ready(self)
            case ("failed", str(why)):
                self._end("died", f"its process can't load {self._pool.what}:\n{why}", load_error=True)
            case _:
                self.refuse("it sent an unknown message")

    def _hand_on(self, answers: Any) -> None:
        """Pass on what answers a call under way; anything else is dropped and counted."""
        listed: list[Any] = answers if isinstance(answers, list) else [None]
        for answer in listed:
            is_one = isinstance(answer, tuple) and len(answer) > 1 and isinstance(answer[0], int)
            call = self._calls.pop(answer[0], None) if is_one else None
            if call is None:
                self._pool.counters["discarded"] += 1
                continue
            self.answers += 1
            self._heard_at = time.monotonic()
            self._pool.answered(self, call, answer[1:])
            if self.gone:
                return

    def refuse(self, why: str, call: Call | None = None) -> None:
        """Kill it for what it wrote, as an answer to `call` if that is known."""
        self._end("died", f"its process was killed: {why}", call or self._running()[0])

    def _died(self) -> None:
        running = self._running()[0]
        when = "between calls" if self.is_ready else "while it started"
        if running is not None:
            when = f"during {running.doing}" if running.when is None else running.when
        self._end("died", f"its process {self._child.how_it_ended(when)}", running)

    def _end(
        self,
        status: Literal["died", "timeout"],
        reason: str,
        running: Call | None = None,
        *,
        load_error: bool = False,
        blamed: tuple[Call, ...] = (),
    ) -> None:
        if self.mode == "batch":
            blamed, running = tuple(self._calls.values()), None
        elif running is not None:
            blamed = blamed or (running,)
        elif self.mode == "async":
            blamed = blamed or tuple(self._calls.values())
        self.kill()
        self._pool.ended(self, WorkerExit(status, reason, running, self.is_ready, load_error, blamed))
