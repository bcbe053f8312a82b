"""Ends the process groups of a parent that was killed, whatever they are doing.

A child notices the end of its parent itself, but for one whose code holds Python's lock: no thread of it runs then.
And what the system can send to it at its parent's death reaches no process that it has started. So a small process
waits for the parent's end, and kills the groups that it was told of. It is run as a plain script, which needs little
time and memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading

_POLL_SECONDS = 1.0


class ProcessGuard:
    """The parent's side: starts the process when there is a first group, and tells it which groups there are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe = -1
        self._owner = 0

    def add(self, group: int) -> None:
        """Have a group killed when this process is gone."""
        with self._lock:
            if self._owner != os.getpid():  # the first time, or in a forked child: that one's parent has its own
                self._start()
            self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a group that has ended: its number may become another's."""
        with self._lock:
            if self._owner == os.getpid():
                self._tell(f"-{group}\n")

    def _start(self) -> None:
        self._owner, self._pipe = os.getpid(), -1
        read_end, write_end = os.pipe()
        try:
            subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(read_end), str(os.getpid())],
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", "")},
                start_new_session=True,  # Ctrl-C isn't for it, nor what kills the parent's group
            )
        except OSError:  # no further process can be started: then neither can what it would guard
            os.close(write_end)
        else:
            self._pipe = write_end
        finally:
            os.close(read_end)

    def _tell(self, line: str) -> None:
        if self._pipe >= 0:
            with contextlib.suppress(OSError):
                os.write(self._pipe, line.encode())


GUARD = ProcessGuard()
"""One for all children of this process."""


def watch(pipe: int, parent: int) -> set[int]:
    """Wait for the parent's end; return the groups that were left."""
    groups: set[int] = set()
    rest = b""
    while True:
        # A process that the parent has forked may hold the pipe open.
        if not select.select([pipe], [], [], _POLL_SECONDS)[0]:
            if os.getppid() != parent:
                return groups
            continue
        chunk = os.read(pipe, 65536)
        if not chunk:
            return groups
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))


def main() -> None:
    """Watch, then kill."""
    for group in watch(int(sys.argv[1]), int(sys.argv[2])):
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
