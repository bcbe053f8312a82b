"""The event loop that owns an engine, what waits for it, and the engine's death.

Whatever goes wrong inside the engine ends it for good: everything that is called later raises `EngineDied`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from roll.strategies.base import EngineDied
from roll.utils.loop_thread import LoopThread

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineLoop:
    """A loop in a thread of its own. `name` is the engine's in messages; operations may take `timeout` seconds."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self.timeout = timeout
        self.changed = threading.Condition()
        """Guards what callers' threads touch too: `cause`, `closed`, and the responses in flight."""
        self.cause: BaseException | None = None
        """What the engine died of."""
        self.closed = False
        self.dead = asyncio.Event()
        self.on_death: Callable[[], None] = self.dead.set
        """Called on the loop when the engine has died; sets `dead`."""
        self.thread = LoopThread(f"{name} loop")

    def require_alive(self) -> None:
        """Raise `EngineDied` when the engine is dead or closed."""
        if self.cause is not None:
            raise EngineDied(f"{self.name} died: {type(self.cause).__name__}: {self.cause}") from self.cause
        if self.closed:
            raise EngineDied(f"{self.name} is closed")

    def call(self, coroutine: Coroutine[Any, Any, T], what: str, timeout: float | None = None) -> T:
        """Return the result of a coroutine that runs on the loop; `what` says in messages what was waited for."""
        if self.closed:
            coroutine.close()
            raise EngineDied(f"{self.name} is closed")
        return self.result(self.thread.submit(coroutine), what, timeout)

    def result(self, future: Future[T], what: str, timeout: float | None = None) -> T:
        """Return the result of an operation, or end an engine whose loop doesn't answer within `timeout` seconds."""
        timeout = self.timeout if timeout is None else timeout
        try:  # operations have the same limit on the loop; this one is for a loop that is stuck itself
            return future.result(timeout + 10.0)
        except FutureTimeout:
            if future.done():
                raise  # the operation's own
            future.cancel()
            error = TimeoutError(f"waited {timeout:g} s {what}")
            self.die(error)
            raise EngineDied(str(error)) from error

    def die(self, cause: BaseException) -> None:
        """Mark the engine as dead and end its responses."""
        with self.changed:
            if self.cause is not None:
                return
            self.cause = cause
            self.changed.notify_all()
        if not self.closed:
            logger.error("%s died: %s: %s", self.name, type(cause).__name__, cause)
        self.thread.loop.call_soon_threadsafe(self.on_death)

    @contextlib.contextmanager
    def deadly(self) -> Iterator[None]:
        """Declare the engine dead if anything is raised inside."""
        try:
            yield
        except Exception as error:
            self.die(error)
            raise

    async def exclusive(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Return the result of `coroutine`, unless the engine dies or the time is over first."""
        task = asyncio.ensure_future(coroutine)
        death = asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait({task, death}, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        if task.done():
            return task.result()
        task.cancel()
        self.require_alive()
        raise TimeoutError(f"waited {self.timeout:g} s for {self.name}: {what}")
