"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


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


def settle(future: asyncio.Future[T], answer: T, error: BaseException | None = None) -> None:
    """End a future with `answer` or `error`, unless it ended already: nobody may wait for it any more."""
    if not future.done():
        future.set_result(answer) if error is None else future.set_exception(error)
