"""The child's side: takes requests from a pipe and answers them in order.

One thread answers all requests. It takes those that have come, and sends the answers together unless a call took long.
It writes what it is doing into memory that it shares with its parent: number and start of the call that runs. So the
parent can tell a call that hangs from one that waits behind it, and whose call ended the process.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import psutil

from roll.processes.child import short_traceback
from roll.processes.frames import Frames, frame

_READ_BYTES = 1 << 20
_FLUSH_NS = 2_000_000
_PROCESS = psutil.Process()


class Handler(Protocol):
    """What the process is for."""

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> tuple[Any, ...]:
        """Return the answer to one request: a kind and what it is about, made of plain values (`frames.py`).

        What it raises ends the process. `restart_clock` begins the call's time limit anew.
        """


def serve(fd: int, progress_fd: int, alarm_s: float, load: Callable[[Any], Handler]) -> None:
    """Serve until the pipe closes, then kill all that the process has started.

    Args:
        fd: the pipe. Its first message is pickled, and given to `load`.
        progress_fd: a file of 16 bytes that the parent maps as well.
        alarm_s: seconds after which a call ends the process, if it lets no other thread run and its parent is gone: the
            parent's own limit is shorter.
        load: makes the handler; what it raises is reported to the parent.
    """
    for inherited in (fd, progress_fd):
        os.set_inheritable(inherited, False)
    threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()
    pipe = socket.socket(fileno=fd)
    progress = memoryview(mmap.mmap(progress_fd, 0)).cast("Q")
    os.close(progress_fd)
    frames = Frames()
    requests: list[Any] = []
    while not requests:
        requests = frames.feed(_read(pipe))
    try:
        handler = load(pickle.loads(requests.pop(0)))
    except BaseException:  # noqa: BLE001 - the boundary: reported to the parent, which raises it
        pipe.sendall(frame(("failed", short_traceback(skip=1))))
        return
    gc.collect()
    gc.freeze()  # what is loaded stays: later collections needn't look at it
    pipe.sendall(frame(("ready", resident_mb())))
    server = _Server(pipe, handler, progress, alarm_s)
    while True:
        for batch in requests:
            server.serve(batch)
        server.flush()
        requests = frames.feed(_read(pipe))


def _end_with_parent(fd: int) -> None:
    """Kill this process and all that it started when the parent closes its end of the pipe, also during a call."""
    hangup = select.poll()
    hangup.register(fd, 0)  # a hang-up is always reported
    hangup.poll()
    _kill_group()


def _kill_group() -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _read(pipe: socket.socket) -> bytes:
    piece = b""
    with contextlib.suppress(ConnectionResetError):
        piece = pipe.recv(_READ_BYTES)
    if not piece:
        _kill_group()
    return piece


class _Server:
    """The answers that haven't been sent yet, and the clock of the call under way."""

    def __init__(self, pipe: socket.socket, handler: Handler, progress: memoryview, alarm_s: float) -> None:
        self._pipe = pipe
        self._handler = handler
        self._progress = progress
        self._alarm_s = alarm_s
        self._armed_at = 0
        self._number = 0
        self._answers: list[tuple[Any, ...]] = []
        self._flushed_at = time.monotonic_ns()

    def serve(self, batch: list[tuple[Any, ...]]) -> None:
        for self._number, *request in batch:
            self._restart_clock()
            self._answers.append((self._number, *self._handler.answer(tuple(request), self._restart_clock)))
            self._progress[0] = 0
            if time.monotonic_ns() - self._flushed_at > _FLUSH_NS:
                self._send()

    def flush(self) -> None:
        """Send what there is, before waiting for more."""
        if self._armed_at:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._armed_at = 0
        self._send()

    def _send(self) -> None:
        if self._answers:
            self._pipe.sendall(frame(self._answers))
            self._answers.clear()
        self._flushed_at = time.monotonic_ns()

    def _restart_clock(self) -> None:
        """Note that the call starts now. Time first: whoever reads between the two sees a call that is younger."""
        now = time.monotonic_ns()
        self._progress[1] = now
        self._progress[0] = self._number
        if not self._armed_at or now - self._armed_at > 1_000_000_000:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # what ran before may have left its own handler
            signal.setitimer(signal.ITIMER_REAL, self._alarm_s)
            self._armed_at = now


def resident_mb() -> float:
    """Return the memory of this process."""
    return float(_PROCESS.memory_info().rss / 2**20)
