"""A fair semaphore: so many episodes at once, first come, first served.

Waiting happens here, on the engines' event loop, and not in a pool of environments: lockstep engines must know that an
episode waits for another one to end, or each would wait for the other. Who comes first is served first, so which
episodes are under way is the same in every run of a plan.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from roll.rollout.engine_driver import EngineDriver
from roll.tracking import spans


class EpisodeSlots:
    """Slots that episodes hold while they have an environment.

    Args:
        engines: are told who waits.
    """

    def __init__(self, engines: EngineDriver, count: int) -> None:
        self._engines = engines
        self._free = count
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def acquire(self, episode: str) -> AsyncIterator[None]:
        """Hold a slot from here to the end of the block; waits for one."""
        await self._take(episode)
        try:
            yield
        finally:
            self._give()

    async def _take(self, episode: str) -> None:
        if self._free:
            self._free -= 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((episode, slot))
        self._engines.mark_blocked(episode)
        try:
            with spans.span("wait for a slot"):
                await slot
        except asyncio.CancelledError:
            if slot.cancelled():
                self._engines.mark_busy(episode, "cancelled")  # live until it has ended
            else:  # it got the slot in the same moment
                self._give()
            raise

    def _give(self) -> None:
        """Hand the slot to the next in the queue, who is busy from this moment and not from when they wake up."""
        while self._waiting:
            episode, slot = self._waiting.popleft()
            if not slot.done():
                self._engines.mark_busy(episode, "starting")
                slot.set_result(None)
                return
        self._free += 1
