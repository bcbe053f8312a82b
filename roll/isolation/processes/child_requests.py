"""The child's side: takes requests from its parent and answers them.

One thread answers all requests, in order. It sends the answers of one message together unless a call took long. It
writes what it is doing into memory that it shares with its parent: number and start of the call that runs. So the
parent can tell a call that hangs from one that waits behind it, and whose call ended the process.

A handler may take several requests at once: `batch` ones get all that have come in one call, `async` ones run side by
side in an event loop (`serve_async.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from roll.isolation.processes.channel import Channel, kill_group
from roll.isolation.processes.child import short_traceback
from roll.isolation.processes.limits import limit_memory

_GATHER_MS = 2
"""What comes within so many milliseconds of each other is served together, in mode `batch`."""
_FLUSH_NS = 2_000_000
"""How long answers may wait for those that go with them: the parent has something to do while the rest is done."""
_SHARE_NS = 10_000_000
"""What wasn't begun by then may be another process's, in mode `share`."""
_SEAL_FUTURE_WRITE = 0x10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Handler(Protocol):
    """What the process is for. It may have `mode` (`batch` or `async`) and `slots`, the requests that it takes at once;
    then it has `answer_all` or `answer_async` as well. One with `mode` `share` answers those that it has no time for
    with `later`: any process may take them."""

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> tuple[Any, ...]:
        """Return the answer to one request: a kind and what it is about, made of plain values (`frames.py`).

        What it raises ends the process. `restart_clock` begins the call's time limit anew.
        """


class BatchHandler(Handler, Protocol):
    """One that answers several requests in one call."""

    def answer_all(self, requests: Sequence[tuple[Any, ...]], restart_clock: Callable[[], None]) -> list[Any]:
        """Return as many answers."""


def serve(fd: int, progress_fd: int, timeout_s: float, load: Callable[[Any], Any], *, memory_mb: float = 0.0) -> None:
    """Serve until the parent is gone, then kill all that the process has started.

    Args:
        fd: the socket to the parent. Its first message is pickled, and given to `load`.
        progress_fd: a file of 16 bytes that the parent maps as well.
        timeout_s: the parent's limit of one call. A call that lets no other thread run ends the process some time
            later, in case the parent is gone.
        load: makes the handler; what it raises is reported to the parent.
        memory_mb: what the process may allocate; 0: any amount.
    """
    channel = Channel(fd)
    threading.Thread(target=_end_with_parent, args=(channel.fd,), daemon=True).start()
    progress = memoryview(mmap.mmap(progress_fd, 0)).cast("Q")
    with contextlib.suppress(OSError):  # the map keeps a descriptor: nothing else is written to it
        fcntl.fcntl(progress_fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    os.close(progress_fd)
    requests: list[Any] = []
    while not requests:
        requests = channel.take()
    if memory_mb:
        limit_memory(memory_mb)
    try:
        handler = load(pickle.loads(requests[0]))
    except BaseException:  # noqa: BLE001 - the boundary: reported to the parent, which raises it
        channel.send(("failed", short_traceback(skip=1)))
        return
    gc.collect()
    gc.freeze()  # what is loaded stays: later collections needn't look at it
    mode = getattr(handler, "mode", "")
    channel.send(("ready", resident_mb(), int(getattr(handler, "slots", 0)), mode))
    if mode == "async":
        from roll.isolation.processes.serve_async import serve_side_by_side

        serve_side_by_side(channel, handler, progress, timeout_s)
        return
    server = _Server(channel, handler, progress, timeout_s * 1.25 + 5.0)
    while True:
        for batch in channel.take():
            if mode == "batch":
                server.serve_together([*batch, *channel.take_waiting(_GATHER_MS)])
            else:
                server.serve([*batch, *channel.take_waiting(0)])
            server.flush()


def _end_with_parent(fd: int) -> None:
    """Kill this process and all that it started when the parent closes its end of the pipe, also during a call."""
    hangup = select.poll()
    hangup.register(fd, 0)  # a hang-up is always reported
    hangup.poll()
    kill_group()


class _Server:
    """The answers that haven't been sent yet, and the clock of the call under way."""

    def __init__(self, channel: Channel, handler: Any, progress: memoryview, alarm_s: float) -> None:
        self._channel = channel
        self._handler = handler
        self._progress = progress
        self._alarm_s = alarm_s
        self._armed_at = 0
        self._number = 0
        self._returns_rest = getattr(handler, "mode", "") == "share"
        self._answers: list[tuple[Any, ...]] = []
        self._flushed_at = time.monotonic_ns()

    def serve(self, batch: list[tuple[int, tuple[Any, ...]]]) -> None:
        began_at = self._flushed_at = time.monotonic_ns()
        for position, (self._number, request) in enumerate(batch, start=1):
            self._restart_clock()
            forks = self._channel.raw_forks
            answer = self._handler.answer(request, self._restart_clock)
            self._channel.end_if_forked()
            if self._channel.raw_forks != forks and hasattr(self._handler, "forked"):
                answer = self._handler.forked(request, answer)
            self._answers.append((self._number, *answer))
            self._progress[0] = 0
            now = time.monotonic_ns()
            if self._returns_rest and now - began_at > _SHARE_NS:
                self._answers += [(number, "later") for number, _ in batch[position:]]
                return
            if now - self._flushed_at > _FLUSH_NS:
                self._send()

    def serve_together(self, batch: list[tuple[int, tuple[Any, ...]]]) -> None:
        self._number = batch[0][0]
        self._restart_clock()
        answers = self._handler.answer_all([request for _, request in batch], self._restart_clock)
        self._channel.end_if_forked()
        self._answers += [(number, *answer) for (number, _), answer in zip(batch, answers, strict=True)]
        self._progress[0] = 0

    def flush(self) -> None:
        """Send what there is, before waiting for more."""
        if self._armed_at:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._armed_at = 0
        self._send()

    def _send(self) -> None:
        if self._answers:
            self._channel.send(self._answers)
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
    file = os.open("/proc/self/statm", os.O_RDONLY)  # psutil isn't everywhere that environments run
    try:
        return int(os.read(file, 200).split()[1]) * _PAGE_BYTES / 2**20
    finally:
        os.close(file)
