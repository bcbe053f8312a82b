"""Waiting for something to happen, with a limit on how long nothing may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Progress:
    """One timer for all waits: `asyncio.wait_for` would cost a task and a timer for each.

    Args:
        timeout: seconds without progress after which whoever waits gets an error.
        stalled: makes that error.
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
        """Something has happened: wake those who wait, or else the next who does."""
        self._made = True
        for waiter in self._take_waiters():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until something happens; at once if it has since the last wait."""
        if not self._made:
            self._waits_since = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout, self._look)
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
        self._made = False

    def _look(self) -> None:
        """The limit may have passed since a wait that is long over."""
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
