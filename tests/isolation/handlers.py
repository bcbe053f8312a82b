"""What the processes of these tests do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from roll.isolation.processes.channel import Channel


class Obedient:
    """A process that does as it is told."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        if (self._folder / "exit").exists():
            os._exit(3)
        if (self._folder / "write").exists():
            _say(pickle.loads((self._folder / "write").rename(self._folder / "written").read_bytes()))

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> tuple[Any, ...]:
        word = request[0]
        if word == "grandchild":
            child = subprocess.Popen(["sleep", "100"])
            (self._folder / "grandchild").write_text(str(child.pid))
        elif word == "hang":
            time.sleep(100)
        elif word == "hold":
            ctypes.PyDLL(None).sleep(100)  # with Python's lock: no other thread of this process runs
        elif word == "slowly":
            for _ in range(5):
                time.sleep(0.25)
                restart_clock()
        elif word.startswith("write "):
            _write(bytes.fromhex(word.removeprefix("write ")))
        elif word == "say":
            _say(pickle.loads((self._folder / "say").read_bytes()))
        elif word.startswith("fork"):
            _fork(word)
        elif word.startswith("garbage"):
            for fd in range(3, 100):
                with contextlib.suppress(OSError):
                    os.write(fd, b"\x7f" * 16)
            if word == "garbage and hang":
                time.sleep(100)
        elif word == "channel":
            return ("ok", _channel().fd)
        elif word == "allocate":
            try:
                bytearray(1 << 30)
            except MemoryError:
                return ("ok", "MemoryError")
        elif word == "object":
            return ("ok", self._folder)
        return ("ok", word)


def _channel() -> Channel:
    """Found by looking for it up the stack: its number can't be guessed."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and "channel" not in frame.f_locals:
        frame = frame.f_back
    assert frame is not None
    channel: Channel = frame.f_locals["channel"]
    return channel


def _write(content: bytes) -> None:
    """Write to the socket past the server."""
    os.write(_channel().fd, content)


def _say(message: Any) -> None:
    """Send a message of our own, with all that makes it look right."""
    _channel().send(message)


def _fork(word: str) -> None:
    pid = ctypes.CDLL(None).fork() if word == "fork in C" else os.fork()
    if pid == 0 and word == "fork and die":
        os._exit(1)
    if pid == 0 and word == "fork and hang":
        time.sleep(100)
