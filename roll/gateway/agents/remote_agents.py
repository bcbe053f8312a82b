"""Agents that run elsewhere: they ask for episodes by `POST /work`, and end one by `POST <base_url>/score`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from roll.gateway.agents.logs import AgentLog
from roll.gateway.agents.runners import MODEL, AgentOutcome, Order
from roll.gateway.base import ChatAnswer, ChatCall, RefusedCall, Session
from roll.rollout.engine_driver import EngineDriver

_LONGEST_WAIT_S = 60.0


class WorkQueue:
    """Episodes that wait for an agent, first come, first served.

    Args:
        engines: are told who waits: there may be fewer agents than episodes.
    """

    def __init__(self, engines: EngineDriver) -> None:
        self._engines = engines
        self._offers: deque[tuple[str, Order, asyncio.Future[None]]] = deque()
        self._news = asyncio.Event()

    async def offer(self, tag: str, order: Order) -> None:
        """Wait until an agent has taken the episode."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        offer = (tag, order, taken)
        self._offers.append(offer)
        self._news.set()
        self._engines.mark_blocked(order.episode)
        try:
            await taken
        except asyncio.CancelledError:
            if taken.cancelled():
                self._engines.mark_busy(order.episode, "cancelled")  # live until it has ended
            raise
        finally:
            if offer in self._offers:
                self._offers.remove(offer)

    async def work(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer `POST /work`: the next episode, or none after `wait_s` seconds. `tag`: only episodes of that one.

        Raises:
            RefusedCall: a field is wrong.
        """
        unknown = sorted(set(body) - {"wait_s", "tag"})
        if unknown:
            raise RefusedCall(400, f"unknown field {unknown[0][:80]!r}; known are wait_s and tag", unknown[0][:80])
        wait_s, tag = body.get("wait_s", 30), body.get("tag")
        if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not 0 <= wait_s <= _LONGEST_WAIT_S:
            raise RefusedCall(400, f"wait_s: expected seconds from 0 to {_LONGEST_WAIT_S:g}", "wait_s")
        if not (tag is None or isinstance(tag, str)):
            raise RefusedCall(400, "tag: expected a text", "tag")
        deadline = asyncio.get_running_loop().time() + wait_s
        while (order := self._take(tag)) is None:
            self._news.clear()
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return {"task": None}
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                return {"task": None}
        return {
            "task": order.task,
            "episode": order.episode,
            "base_url": order.base_url,
            "api_key": order.api_key,
            "model": MODEL,
            "timeout_s": order.timeout_s,
        }

    def _take(self, tag: str | None) -> Order | None:
        for offer in self._offers:
            if tag in (None, offer[0]) and not offer[2].done():
                self._offers.remove(offer)
                self._engines.mark_busy(offer[1].episode, "an agent elsewhere")  # from now, not from when it wakes up
                offer[2].set_result(None)
                return offer[1]
        return None


class NoModel(Session):
    """The session at the run's own address, where there is work but no model."""

    @property
    def models(self) -> Sequence[str]:
        """Return no models; there are none."""
        return ()

    async def complete(self, call: ChatCall) -> ChatAnswer:  # noqa: ARG002 - whatever it is
        """Refuse the call."""
        raise RefusedCall(
            404, "this address gives out work (POST /work); the model is at the base_url that comes with it"
        )

    async def count(self, call: ChatCall) -> int:
        """Refuse the call."""
        await self.complete(call)
        raise AssertionError("it refuses every call")


class RemoteRunner:
    """Waits for an agent that takes the episode, and for its word that it is over."""

    def __init__(self, tag: str, queue: WorkQueue) -> None:
        self._tag, self._queue = tag, queue
        self._over: dict[str, asyncio.Future[None]] = {}
        self.taken: set[str] = set()
        """Episodes under way that an agent has."""

    async def run(self, order: Order, log: AgentLog) -> AgentOutcome:  # noqa: ARG002 - it prints elsewhere
        over = self._over[order.episode] = asyncio.get_running_loop().create_future()
        try:
            await self._queue.offer(self._tag, order)
            self.taken.add(order.episode)
            await over
        finally:
            del self._over[order.episode]
            self.taken.discard(order.episode)
        return AgentOutcome(how="it said so")

    def end(self, episode: str) -> None:
        """Note that the agent has posted how its episode ended."""
        over = self._over.get(episode)
        if over is not None and not over.done():
            over.set_result(None)

    async def close(self) -> None:
        """Keep nothing, so close nothing."""
