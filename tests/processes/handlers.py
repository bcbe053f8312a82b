"""What the processes of these tests do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Obedient:
    """A process that does as it is told."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

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
        elif word == "object":
            return ("ok", self._folder)
        return ("ok", word)
