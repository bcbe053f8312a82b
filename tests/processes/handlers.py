"""What the processes of these tests do."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Obedient:
    """A process that does as it is told."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        if (self._folder / "exit").exists():
            os._exit(3)
        if (self._folder / "write").exists():
            _write((self._folder / "write").rename(self._folder / "written").read_bytes())

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> tuple[Any, ...]:
        word = request[0]
        if word == "grandchild":
            child = subprocess.Popen(["sleep", "100"])
            (self._folder / "grandchild").write_text(str(child.pid))
        elif word == "hang":
            time.sleep(100)
        elif word == "slowly":
            for _ in range(5):
                time.sleep(0.25)
                restart_clock()
        elif word.startswith("write "):
            _write(bytes.fromhex(word.removeprefix("write ")))
        elif word.startswith("last words "):
            _write(bytes.fromhex(word.removeprefix("last words ")))
            os._exit(3)
        elif word == "object":
            return ("ok", self._folder)
        return ("ok", word)


def _write(content: bytes) -> None:
    """Write to the pipe past the server."""
    links = {fd: os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    (pipe,) = [int(fd.name) for fd, link in links.items() if link.startswith("socket:")]
    os.write(pipe, content)
