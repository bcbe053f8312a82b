"""Environments that misbehave on demand: the response, or `options`, says how."""

from __future__ import annotations

import ast
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.envs.base import Env, Observation, StepResult

KEPT: list[bytes] = []


def misbehave(how: str, folder: Path) -> Any:
    word, _, rest = how.partition(" ")
    if word == "raise":
        raise IndexError(f"deliberate: {rest}")
    if word == "sys_exit":
        sys.exit(4)
    if word == "hang":
        time.sleep(1000.0)
    if word == "spin":
        while True:
            pass
    if word == "sleep":
        time.sleep(float(rest))
    if word == "os_exit":
        os.write(2, b"about to go\n")
        os._exit(int(rest))
    if word == "segfault":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(0)
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "leak":
        KEPT.append(b"x" * (int(rest) << 20))
    if word == "print":
        sys.stdout.write("x" * 10_000_000)
        os.write(1, b"x" * 1_000_000)
        sys.stderr.write("e" * 3_000_000)
    if word == "grandchild":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], close_fds=False)
        (folder / "grandchild").write_text(str(child.pid))
    if word == "fork":  # the grandchild keeps the pipe to the parent open
        if os.fork() == 0:
            time.sleep(1000.0)
        os._exit(0)
    if word == "answer":  # past the server, under the number of this call
        frame = sys._getframe()
        while not hasattr(server := frame.f_locals.get("self"), "_answers"):
            frame = frame.f_back
        server._answers.append((server._number, *ast.literal_eval(rest)))
        server._send()
        time.sleep(1000.0)
    if word == "double":  # the child comes back from the call, too
        os.fork()
    if word == "once":  # the first time in this folder only
        flag = folder / "once"
        if not flag.exists():
            flag.touch()
            misbehave(rest, folder)
    return None


class Counter(Env):
    """Adds the numbers it is told to its seed. Solved by `done`."""

    def __init__(self, folder: str = "", on_init: str = "", drift: bool = False) -> None:
        self._folder = Path(folder)
        self._drift = drift
        self._total = 0
        misbehave(on_init, self._folder)

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self._options = dict(options)
        misbehave(self._options.get("on_reset", ""), self._folder)
        if self._options.get("reset_type"):
            return "an observation"  # type: ignore[return-value]
        self._total = seed
        return self._seen()

    def step(self, action: str) -> StepResult:
        word, _, rest = action.partition(" ")
        if word == "add":
            self._total += int(rest)
        elif word == "pid":
            return StepResult(reward=float(os.getpid()), terminated=False, observation=self._seen())
        elif word == "show":
            text = {"surrogate": "half a \ud800", "much": "x" * 5_000_000, "fine": "x" * 900_000}[rest]
            return StepResult(reward=0.0, terminated=False, observation=Observation.of(text))
        elif word == "wrong_type":
            return (self._seen(), 1.0, False)  # type: ignore[return-value]
        elif word == "wrong_reward":
            return StepResult(reward="much", terminated=False, observation=self._seen())  # type: ignore[arg-type]
        elif word != "done":
            misbehave(action, self._folder)
        over = word == "done"
        return StepResult(
            reward=float(self._total),
            terminated=over,
            observation=None if over else self._seen(),
            metrics={"success": 1.0} if over else {},
        )

    def close(self) -> None:
        misbehave(self._options.get("on_close", ""), self._folder)
        if self._folder != Path():
            with open(self._folder / "closed", "a") as file:
                file.write(f"{self._total}\n")

    def _seen(self) -> Observation:
        return Observation.of(f"total {self._total}" + (f" {os.getpid()}" if self._drift else ""))
