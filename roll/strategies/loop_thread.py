"""An event loop in a thread of its own: calls into it with a time limit, and iterables read outside and used inside."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 5.0  # seconds between two looks at whether the consumer is still there


class LoopThread:
    """A daemon thread that runs an event loop until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def cancel_all(self, timeout: float) -> None:
        """Cancel every task on the loop, and wait for them; raises `TimeoutError` after `timeout` seconds."""

        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.submit(cancel()).result(timeout)

    def stop(self, timeout: float) -> None:
        """End the loop and its thread; one that is stuck after `timeout` seconds is left alone."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self.loop.close()


class WeightFeed(AsyncIterator[T], Generic[T]):
    """Hands `items` one at a time to an event loop; `serve` reads them, in the thread that calls it.

    Streams of weights belong to their thread: they may use process groups or a current device.
    """

    def __init__(self, items: Iterable[T], loop: asyncio.AbstractEventLoop) -> None:
        self._items = iter(items)
        self._loop = loop
        self._asked: queue.SimpleQueue[asyncio.Future[tuple[T, ...]] | None] = queue.SimpleQueue()

    def __aiter__(self) -> WeightFeed[T]:
        return self

    async def __anext__(self) -> T:
        wanted: asyncio.Future[tuple[T, ...]] = self._loop.create_future()
        self._asked.put(wanted)
        answer = await wanted
        if not answer:
            raise StopAsyncIteration
        return answer[0]

    def serve(self, consumer: Future[None]) -> None:
        """Read an item whenever one is asked for, until `consumer` is done; what reading raises, the consumer gets."""
        consumer.add_done_callback(lambda _: self._asked.put(None))
        while not consumer.done():
            try:
                wanted = self._asked.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if wanted is None:
                return
            try:
                answer = tuple(itertools.islice(self._items, 1))
            except Exception as error:  # noqa: BLE001 - raised where the items are used
                self._loop.call_soon_threadsafe(settle, wanted, (), error)
            else:
                self._loop.call_soon_threadsafe(settle, wanted, answer)
                del answer  # a weight's memory is used again once nobody holds the weight


def settle(future: asyncio.Future[T], answer: T, error: BaseException | None = None) -> None:
    """End a future with `answer` or `error`, unless it ended already: nobody may wait for it any more."""
    if not future.done():
        future.set_result(answer) if error is None else future.set_exception(error)
