"""An event loop whose clock is made up: it jumps to the next timer instead of waiting for it.

Coroutines that wait only by this loop (`asyncio.sleep`, `wait_for`, events, futures, queues) run unchanged: hours of
rollouts pass in the time that their Python code takes, and twice the same program gives twice the same order of events.
Threads know nothing of this clock, so `asyncio.to_thread` and executors run their function at once, in the loop itself.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any


class NothingScheduled(RuntimeError):
    """Every coroutine waits for something that nobody will bring about: a deadlock in what is simulated."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time: `time()` starts at 0 and counts simulated seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call `func` here and now; no simulated time passes meanwhile."""
        del executor
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the future
            future.set_exception(error)
        return future

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise NothingScheduled(
                f"at {self._now:.3f} simulated seconds every coroutine waits, and no timer is set that could wake one"
            )
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Tells `jump` how long the loop would have slept, and returns at once."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []  # Something is ready; the loop's own pipe can wait.
        events = super().select(0)
        if not events:
            self._jump(timeout)
        return events
