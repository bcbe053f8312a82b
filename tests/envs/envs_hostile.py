"""Environments that do harm to whoever tests them: `how` says what, in which call."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from roll.envs.base import Env, InvalidAction, Observation, ResetNeeded, StepResult


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def harm(how: str) -> Any:
    if how == "os_exit":
        os._exit(3)
    if how == "sys_exit":
        sys.exit(4)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fork":
        os.fork()
    if how == "bomb":
        return [bytearray(1 << 30) for _ in range(64)]
    if how == "sleep":
        time.sleep(1000.0)
    if how == "slow":
        time.sleep(0.1)
    if how == "careless":
        while True:
            try:
                time.sleep(1000.0)
            except Exception:  # noqa: BLE001
                continue
    if how == "stubborn":
        while True:
            try:
                time.sleep(1000.0)
            except BaseException:  # noqa: BLE001
                continue
    if how == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(1000.0)
    if how == "flood":
        sys.stdout.write("x" * 3_000_000)
        os.write(1, b"x" * 1_000_000)
        os.write(2, b"x" * 1_000_000)
    if how == "close_files":
        os.closerange(3, 70_000)
    if how == "unprintable":
        raise Unprintable
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "no_exception":
        raise GeneratorExit
    if how == "thread":
        threading.Thread(target=time.sleep, args=(1000.0,), daemon=True).start()
    return None


class Hostile(Env):
    """Two steps long, and right but for what it is told to do."""

    actions = ("a", "b")

    def __init__(self, how: str = "", when: str = "step") -> None:
        self.how, self.when = how, when
        self.do("init")

    def do(self, when: str) -> None:
        if when == self.when:
            harm(self.how)

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.do("reset")
        self.steps = 0
        return Observation.of({"giant": "x" * 3_000_000, "long": "x" * 30_000}.get(self.how, f"seed {seed}"))

    def step(self, action: str) -> StepResult:
        if action not in self.actions:
            raise InvalidAction("unknown")
        if self.steps == 2:
            raise ResetNeeded("reset")
        self.do("step")
        self.steps += 1
        over = self.steps == 2
        rewards: dict[str, Any] = {"nan": float("nan"), "text_reward": "much", "infinite": float("inf")}
        texts = {"surrogate": "half a \ud800"}
        return StepResult(
            reward=rewards.get(self.how, 0.5),
            terminated="yes" if self.how == "text_flag" else over,  # type: ignore[arg-type]
            observation=None if over else Observation.of(texts.get(self.how, f"step {self.steps}")),
        )

    def close(self) -> None:
        self.do("close")
