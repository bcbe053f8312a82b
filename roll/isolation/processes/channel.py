"""The child's end of the socket to its parent: where nothing that runs in the process writes by accident.

Its descriptor is a random high number, children that are forked lose it, and only the process that it was made for
speaks on it: a forked child that comes back from the call which forked it ends there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import select
import signal
import socket
import sys
from typing import Any

from roll.isolation.processes.frames import PACKET_BYTES, Frames, packets

_LOWEST = 200
_HIGHEST = 100_000


class Channel:
    """Takes requests, sends answers. One thread uses it."""

    def __init__(self, fd: int) -> None:
        self.fd = _hidden(fd)
        self.socket = socket.socket(fileno=self.fd)
        self.raw_forks = 0
        """Calls of `os.fork` so far, other than those of `multiprocessing`."""
        self._pid = os.getpid()
        self._frames = Frames()
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        os.register_at_fork(before=self._count_fork, after_in_child=self._forget)

    def take(self) -> list[Any]:
        """Wait for a packet; return the message that it completes, if it does. The end of the parent ends this
        process with all that it started."""
        self.end_if_forked()
        packet = b""
        with contextlib.suppress(ConnectionResetError):
            packet = self.socket.recv(PACKET_BYTES)
        if not packet:
            kill_group()
        return self._frames.feed(packet)

    def take_waiting(self, patience_ms: int) -> list[Any]:
        """Return the requests that have come meanwhile, and those that follow each other within so many milliseconds:
        what is sent at once arrives one by one."""
        requests: list[Any] = []
        while self._poll.poll(patience_ms) or self._frames.incomplete:
            for batch in self.take():
                requests += batch
        return requests

    def send(self, message: Any) -> None:
        """Send a message as a whole."""
        self.end_if_forked()
        secret = self._frames.secret
        assert secret is not None, "the parent speaks first"
        for packet in packets(message, secret):
            self.socket.sendall(packet)

    def end_if_forked(self) -> None:
        """End here in a forked child."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _count_fork(self) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        self.raw_forks += not caller.startswith(("multiprocessing.", "subprocess"))

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


def _hidden(fd: int) -> int:
    """Move an end to a number that nobody guesses."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = min(most, _HIGHEST) if most > 0 else _HIGHEST
    moved = fd
    for _ in range(10):
        lowest = min(_LOWEST, highest // 2)
        with contextlib.suppress(OSError, ValueError):
            moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest + secrets.randbelow(max(1, highest - lowest)))
            os.close(fd)
            break
    os.set_inheritable(moved, False)
    return moved


def kill_group() -> None:
    """End this process with all that it started."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
