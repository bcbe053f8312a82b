"""The child's side for handlers that wait for others most of the time: calls run side by side in an event loop.

Each call has its own time limit: beyond, it is cancelled, and the others go on. A call that blocks the loop, or doesn't
let itself be cancelled, ends the process: the parent sees to that.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from roll.isolation.processes.channel import Channel


class AsyncHandler(Protocol):
    """One that answers while other answers are awaited."""

    async def answer_async(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the answer to one request; may be cancelled."""


class _Noted(Coroutine[Any, Any, Any]):
    """A coroutine whose number stands in the shared memory while it runs: the parent knows who blocks the loop."""

    def __init__(self, inner: Coroutine[Any, Any, Any], number: int, progress: memoryview) -> None:
        self._inner, self._number, self._progress = inner, number, progress

    def send(self, value: Any) -> Any:
        self._progress[0] = self._number
        try:
            return self._inner.send(value)
        finally:
            self._progress[0] = 0

    def throw(self, *error: Any) -> Any:
        self._progress[0] = self._number
        try:
            return self._inner.throw(*error)
        finally:
            self._progress[0] = 0

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError  # it is only made a task of


def serve_side_by_side(channel: Channel, handler: AsyncHandler, progress: memoryview, timeout_s: float) -> None:
    """Serve until the parent is gone."""
    asyncio.run(_serve(channel, handler, progress, timeout_s))


async def _serve(channel: Channel, handler: AsyncHandler, progress: memoryview, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[Any]] = set()
    answers: list[tuple[Any, ...]] = []
    alarm_s = timeout_s * 1.25 + 10.0

    async def one(number: int, request: tuple[Any, ...]) -> tuple[Any, ...]:
        task = loop.create_task(_Noted(handler.answer_async(request), number, progress))
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if done:
            return (number, *task.result())
        task.cancel()
        await asyncio.wait([task])  # one that doesn't end is overdue: the parent ends the process
        return (number, "timeout")

    def answered(task: asyncio.Task[Any]) -> None:
        running.discard(task)
        channel.end_if_forked()
        if not answers:
            loop.call_soon(flush)
        answers.append(task.result())

    def flush() -> None:
        channel.send(answers)
        answers.clear()

    def take() -> None:
        for batch in channel.take():
            for number, request in batch:
                task = loop.create_task(one(number, request))
                running.add(task)
                task.add_done_callback(answered)

    # A parent that is gone can't end a loop that is blocked: this alarm does.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    loop.add_reader(channel.fd, take)
    while True:
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        await asyncio.sleep(min(1.0, timeout_s))
