"""Many episodes on engines that compute only when they are told to (`hf_infer`), in rounds.

A round starts only when every live episode waits for tokens or for the end of another one (`episode_slots.py`), or has
ended, so what is batched together, and every decision of the scheduler in between, is a function of the plan and never
of who answered first: same seed, same run, on any number of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from roll.rollout.engine_driver import EngineDriver, EngineLoad, EngineRanks, RolloutStalled, aborted_completion
from roll.strategies.base import Completion, Request
from roll.tracking import spans

T = TypeVar("T")


class LockstepDriver(EngineDriver):
    """Lets engines compute round by round; see the module docstring.

    Args:
        round_steps: decode steps per round. Fewer: aborts act sooner, more barriers.
        timeout: seconds an episode may take outside the engine (its environment, its reward) before the step fails.
    """

    def __init__(self, ranks: EngineRanks, *, round_steps: int = 16, timeout: float = 3600.0) -> None:
        self._ranks = ranks
        self._round_steps = round_steps
        self._timeout = timeout
        self._busy: dict[str, str] = {}
        self._queued: list[Request] = []
        self._placed: dict[str, int] = {}
        self._futures: dict[str, tuple[asyncio.Future[tuple[Completion, int | None]], str]] = {}
        self._calls: Counter[str] = Counter()  # Under way, by episode
        self._cancelled: list[str] = []  # Requests in engines whose call was cancelled
        # One loop for the engines' life: their events belong to it.
        self._loop = asyncio.new_event_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._news = asyncio.Event()  # Some episode has gone on since `advance` last looked

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        task = self._loop.create_task(main)
        try:
            return self._loop.run_until_complete(task)
        finally:
            if not task.done():  # Ctrl-C: let every episode end, or each would complain when it is collected
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(task)

    def close(self) -> None:
        self._loop.close()

    def load(self) -> EngineLoad:
        placed = Counter(list(self._placed.values()))
        running = tuple(placed[rank] for rank in range(self._ranks.world_size))
        return EngineLoad(running, len(self._queued), busy=dict(Counter(list(self._busy.values()))))

    def mark_busy(self, episode: str, doing: str) -> None:
        """Mark it busy: no round starts until it is done."""
        self._busy[episode] = doing
        self._idle.clear()
        self._news.set()

    def mark_waiting(self, episode: str) -> None:
        if self._calls[episode]:
            self._busy.pop(episode, None)
            self._set_if_idle()

    def mark_blocked(self, episode: str) -> None:
        """Mark it blocked: rounds go on without it."""
        del self._busy[episode]
        self._set_if_idle()

    def mark_ended(self, episode: str) -> None:
        self._busy.pop(episode, None)
        self._set_if_idle()

    async def generate(self, episode: str, request: Request) -> Completion:
        future: asyncio.Future[tuple[Completion, int | None]] = asyncio.get_running_loop().create_future()
        self._futures[request.id] = (future, episode)
        self._queued.append(request)
        self._calls[episode] += 1
        self._busy.pop(episode, None)
        self._news.set()
        self._set_if_idle()
        try:
            completion, rank = await future
        except asyncio.CancelledError:
            self._forget(request.id, "cancelled")
            raise
        if rank is not None:
            spans.annotate(engine=rank)
        return completion

    def give_up(self, episode: str) -> None:
        for request_id in [request_id for request_id, (_, name) in self._futures.items() if name == episode]:
            future, _ = self._futures[request_id]
            self._forget(request_id, "ending")
            if not future.done():
                future.set_result((aborted_completion(request_id), None))

    def _forget(self, request_id: str, doing: str) -> None:
        """Forget a request that nobody waits for any more; an engine that has it is told before the next round."""
        entry = self._futures.pop(request_id, None)
        if entry is None:
            return  # its response came in the same moment
        if request_id in self._placed:
            self._cancelled.append(request_id)
        self._queued = [request for request in self._queued if request.id != request_id]
        self._end_call(entry[1], doing)

    def _end_call(self, episode: str, doing: str) -> None:
        """End a call: busy from now if it was the last under way, and not from when its coroutine runs: a faster
        sibling must not end `wait_idle`, and from Python 3.12 on `wait_for` looks at the event before a woken coroutine
        has had its turn."""
        self._calls[episode] -= 1
        if not self._calls[episode]:
            del self._calls[episode]
            self.mark_busy(episode, doing)

    def _set_if_idle(self) -> None:
        if not self._busy:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until every live episode waits for tokens; raises `RolloutStalled` naming those that don't."""
        while not self._idle.is_set() or self._cancelled:
            await self._stop_cancelled()  # a step that ends leaves nothing in engines that nobody waits for
            try:
                await asyncio.wait_for(self._idle.wait(), self._timeout)
            except TimeoutError:
                waiting = ", ".join(f"{name} ({what})" for name, what in sorted(self._busy.items())[:5])
                raise RolloutStalled(
                    f"no progress for {self._timeout:.0f} s; waiting for {len(self._busy)} episodes: {waiting}. "
                    "Raise rpc_timeout if they are merely slow."
                ) from None

    async def advance(self) -> None:
        """Hand out queued requests, let every engine work for one round, wake the episodes whose response is there."""
        self._news.clear()
        await self._place()
        used = sorted(set(self._placed.values()))
        if not used:
            if not self._busy:  # all live episodes are blocked; who is busy, such as a new group, `wait_idle` waits for
                await self._wait_for_news()
            return
        results = await asyncio.gather(*(self._ranks.poll(rank, self._round_steps) for rank in used))
        self._resolve([completion for result in results for completion in result])

    async def _wait_for_news(self) -> None:
        try:
            await asyncio.wait_for(self._news.wait(), self._timeout)
        except TimeoutError:
            raise RolloutStalled(
                f"no progress for {self._timeout:.0f} s: every episode waits for somebody else, such as an agent that "
                "asks for work. Raise rpc_timeout if they are merely slow."
            ) from None

    async def _stop_cancelled(self) -> None:
        by_rank: dict[int, list[str]] = {}
        for request_id in self._cancelled:
            by_rank.setdefault(self._placed.pop(request_id), []).append(request_id)
        self._cancelled = []
        await asyncio.gather(*(self._ranks.abort(rank, ids) for rank, ids in by_rank.items()))

    async def _place(self) -> None:
        """Send queued requests to the least loaded engine, in plan order; siblings stay together for their prefix."""
        if not self._queued:
            return
        load = [0] * self._ranks.world_size
        for rank in self._placed.values():
            load[rank] += 1
        batches: list[list[Request]] = [[] for _ in load]
        home: dict[tuple[int, ...], int] = {}
        for request in sorted(self._queued, key=lambda r: (r.order, r.id)):
            rank = home.setdefault(request.prompt_ids, load.index(min(load)))
            load[rank] += 1
            self._placed[request.id] = rank
            batches[rank].append(request)
        self._queued = []
        await asyncio.gather(*(self._ranks.submit(r, batch) for r, batch in enumerate(batches) if batch))

    async def abort(self, episodes: Collection[str]) -> int:
        chosen = {request_id for request_id, (_, episode) in self._futures.items() if episode in episodes}
        by_rank: dict[int, list[str]] = {}
        for request_id, rank in self._placed.items():
            if request_id in chosen:
                by_rank.setdefault(rank, []).append(request_id)
        results = await asyncio.gather(*(self._ranks.abort(rank, ids) for rank, ids in by_rank.items()))
        never_started = [aborted_completion(r.id) for r in self._queued if r.id in chosen]
        self._queued = [r for r in self._queued if r.id not in chosen]
        stopped = [completion for result in results for completion in result] + never_started
        self._resolve(stopped)
        return len(stopped)

    def _resolve(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            rank = self._placed.pop(completion.id, None)
            entry = self._futures.pop(completion.id, None)
            if entry is None:  # its call was cancelled while the engine worked
                self._cancelled = [request_id for request_id in self._cancelled if request_id != completion.id]
                continue
            future, episode = entry
            self._end_call(episode, "between turns")
            if not future.done():
                refusal = completion.refusal
                future.set_exception(refusal) if refusal else future.set_result((completion, rank))
