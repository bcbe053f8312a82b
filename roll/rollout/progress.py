"""Waiting for something to happen, with a limit on how long nothing may."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from roll.rollout.engine_driver import RolloutStalled

T = TypeVar("T")


class Progress:
    """One timer for all waits: `asyncio.wait_for` would cost a task and a timer for each.

    Args:
        timeout: seconds without progress after which whoever waits gets an error.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float, stalled: Callable[[], Exception]) -> None:
        self._loop = loop
        self._timeout = timeout
        self._stalled = stalled
        self._made = False
        self._waiters: list[asyncio.Future[None]] = []
        self._waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def made(self) -> None:
        """Note that something has happened: wake those who wait, or else the next who does."""
        self._made = True
        for waiter in self._take_waiters():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until something happens; return at once if it has since the last wait."""
        if not self._made:
            self._waits_since = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout, self._look)
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
        self._made = False

    def _look(self) -> None:
        """Raise for those who wait if the limit has passed; the wait that set the timer may be long over."""
        self._timer = None
        self._waiters = [waiter for waiter in self._waiters if not waiter.done()]
        if not self._waiters:
            return
        left = self._waits_since + self._timeout - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        for waiter in self._take_waiters():
            waiter.set_exception(self._stalled())

    def _take_waiters(self) -> list[asyncio.Future[None]]:
        waiters, self._waiters = self._waiters, []
        return [waiter for waiter in waiters if not waiter.done()]


def result_from(
    thread: threading.Thread, loop: asyncio.AbstractEventLoop, future: concurrent.futures.Future[T], timeout: float
) -> T:
    """Return the result of a coroutine on the loop of another thread.

    Raises `RolloutStalled` with the line that the thread is at when the loop itself stands still for `timeout` seconds;
    no limit that is kept on the loop can act then.
    """
    while not concurrent.futures.wait([future], timeout).done:
        beat = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        if not concurrent.futures.wait([beat], timeout).done:
            frame = sys._current_frames().get(thread.ident or 0)
            where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else "an unknown place\n"
            raise RolloutStalled(
                f"the event loop of rollouts has stood still for {timeout:.0f} s. Something on it waits without "
                f"`await`, perhaps a rollout of your own; call it by asyncio.to_thread. It is at\n{where}"
            )
    return future.result()
