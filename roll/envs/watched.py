"""An environment whose every call has a time limit and says what it is doing: for those who test it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from roll.envs.base import Env, Observation, StepResult

_AGAIN_S = 1.0  # What was interrupted may catch it and go on: then it is interrupted again


class Hung(BaseException):
    """A call took longer than it may. No `Exception`, because an environment may catch those and go on."""


class OutOfTime(BaseException):
    """All calls together took longer than they may. Raised between two calls."""


class Clock:
    """Time limits, and whom to tell what is being done."""

    def __init__(self, timeout_s: float, budget_s: float, tell: Callable[[str], None] = lambda _: None) -> None:
        """`timeout_s`: of one call. `budget_s`: of all calls since `begin`."""
        self.timeout_s, self.budget_s, self._tell = timeout_s, budget_s, tell
        self.begin()

    def begin(self) -> None:
        """Start the budget anew."""
        self._until = time.monotonic() + self.budget_s

    @contextmanager
    def call(self, doing: str) -> Iterator[None]:
        """Time one call."""
        if time.monotonic() > self._until:
            raise OutOfTime(f"not done after {self.budget_s:g} s")
        self._tell(doing)
        process = os.getpid()
        try:
            with limit(self.timeout_s, doing):
                yield
        finally:
            if os.getpid() != process:  # a forked child has come back from the call: it isn't the one who tests
                os._exit(0)


class Watched(Env):
    """Passes everything on."""

    def __init__(self, make: Callable[[], Any], clock: Clock) -> None:
        with clock.call("__init__"):
            made = make()
        if not isinstance(made, Env):
            raise TypeError(
                f"got {type(made).__name__}, expected an instance of a class derived from roll.envs.base.Env"
            )
        self.env, self._clock, self._seed, self._steps = made, clock, 0, 0
        for name in Env.__annotations__:  # instructions, actions, ...: all that an environment says of itself
            setattr(self, name, getattr(made, name))

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self._seed, self._steps = seed, 0
        with self._clock.call(f"reset(seed={seed})"):
            observation = self.env.reset(seed, options)
        self.instructions = self.env.instructions
        return observation

    def step(self, action: str) -> StepResult:
        self._steps += 1
        with self._clock.call(f"step {self._steps} of seed {self._seed}, {action!r:.60}"):
            return self.env.step(action)

    def render(self) -> Any:
        with self._clock.call("render"):
            return self.env.render()

    def solution(self, max_actions: int) -> Sequence[str] | None:
        with self._clock.call("solution"):
            return self.env.solution(max_actions)

    def sample_action(self, rng: random.Random) -> str | None:
        with self._clock.call("sample_action"):
            return self.env.sample_action(rng)

    def close(self) -> None:
        with self._clock.call("close"):
            self.env.close()


@contextmanager
def limit(seconds: float, doing: str) -> Iterator[None]:
    """Raise `Hung` where the code is after so long. Only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(*_: Any) -> None:
        raise Hung(f"{doing} is not done after {seconds:g} s; here it was")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
