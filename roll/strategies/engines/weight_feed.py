"""Iterables that one thread reads and an event loop in another uses."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from roll.utils.loop_thread import settle

T = TypeVar("T")

_POLL_SECONDS = 5.0  # seconds between two looks at whether the consumer is still there


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
