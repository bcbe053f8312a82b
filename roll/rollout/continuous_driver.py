"""Many episodes on engines that compute on their own (vLLM, SGLang), each response handed out when it is there.

    episode --generate--> queue --Router--> outbox of engine e --submit--> engine e
            <--Completion------------------ poll of engine e <------------

The event loop has a thread of its own, so that generation goes on while the controller trains. A dead engine is
replaced within a budget and its requests are given out again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from roll.rollout.engine_driver import EngineDriver, EngineLoad, EngineRanks, RolloutStalled, aborted_completion
from roll.rollout.in_flight import EngineState, InFlightRequest
from roll.rollout.routing import Router
from roll.strategies.base import Completion, EngineCounters, Request
from roll.tracking import spans
from roll.types.metrics import Metrics
from roll.utils.loop_thread import settle

T = TypeVar("T")
logger = logging.getLogger(__name__)


class EngineLost(RuntimeError):
    """An engine died and may not be replaced (any more)."""


class ContinuousDriver(EngineDriver):
    """Runs in a thread of its own; see the module docstring.

    Args:
        max_running_requests: requests per engine at once; the others wait here, in the order of the plan.
        poll_budget: what one `poll` is given: seconds, or decode steps of a lockstep engine.
        timeout: seconds without any progress before a waiting scheduler gets `RolloutStalled`.
        is_death: whether an error of `submit` or `poll` means that the engine is gone.
        restart: replaces a dead engine, ready to sample with the weights of its peers.
        take_counters: the engines' own counters since the last call.
        loop: run on this loop, in the caller's thread, instead of a thread of its own (simulations).
    """

    def __init__(
        self,
        ranks: EngineRanks,
        *,
        max_running_requests: int,
        poll_budget: float = 1.0,
        timeout: float = 3600.0,
        is_death: Callable[[BaseException], bool] = lambda _error: False,
        restart: Callable[[int], Awaitable[None]] | None = None,
        max_restarts: int = 0,
        take_counters: Callable[[], Sequence[EngineCounters]] = tuple,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._ranks = ranks
        self._router = Router(ranks.world_size, max_running_requests)
        self._poll_budget = poll_budget
        self._timeout = timeout
        self._is_death = is_death
        self._restart = restart
        self._max_restarts = max_restarts if restart is not None else 0
        self._take_counters = take_counters
        self._engines = [EngineState(rank) for rank in range(ranks.world_size)]
        self._busy: dict[str, str] = {}
        self._in_flight: dict[str, InFlightRequest] = {}
        self._calls: Counter[str] = Counter()  # Under way, by episode
        self._error: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._background: set[asyncio.Task[None]] = set()
        self._repairs: set[asyncio.Task[None]] = set()
        self._own_thread = loop is None
        self._loop = loop or asyncio.new_event_loop()
        self._progressed = False  # Since the scheduler last looked
        self._scheduler: asyncio.Future[None] | None = None  # Waits for progress
        self._waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None  # One for all waits
        if self._own_thread:
            self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
            self._thread.start()

    # --- from the controller's thread -----------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, from another thread; everything else on the loop goes on meanwhile."""
        if not self._own_thread:
            return self._loop.run_until_complete(main)
        future = asyncio.run_coroutine_threadsafe(main, self._loop)
        try:
            return self._result_of(future)
        except KeyboardInterrupt:
            future.cancel()
            with contextlib.suppress(concurrent.futures.CancelledError, concurrent.futures.TimeoutError):
                future.result(timeout=30)
            raise

    def _result_of(self, future: concurrent.futures.Future[T]) -> T:
        """Return the result of a coroutine on the loop.

        Raises `RolloutStalled` with the line that the thread is at when the loop itself stands still for `timeout`
        seconds; no limit that is kept on the loop can act then.
        """
        while not concurrent.futures.wait([future], self._timeout).done:
            beat = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
            if not concurrent.futures.wait([beat], self._timeout).done:
                frame = sys._current_frames().get(self._thread.ident or 0)
                where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else "an unknown place\n"
                raise RolloutStalled(
                    f"the event loop of rollouts has stood still for {self._timeout:.0f} s. Something on it waits "
                    f"without `await`, perhaps a rollout of your own; call it by asyncio.to_thread. It is at\n{where}"
                )
        return future.result()

    def close(self) -> None:
        if not self._own_thread:
            self._loop.run_until_complete(self._stop())
            return
        if self._loop.is_closed():
            return
        stopping = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            stopping.result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        """Cancel every task of the loop but this one."""
        self._error = self._error or RuntimeError("the engines' driver is closed")  # engines need no aborts any more
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what episodes and schedulers use -------------------------------------------------------------------------

    def mark_busy(self, episode: str, doing: str) -> None:
        self._busy[episode] = doing

    def mark_waiting(self, episode: str) -> None:
        if self._calls[episode]:
            self._busy.pop(episode, None)

    def mark_blocked(self, episode: str) -> None:
        self._busy[episode] = "waiting for another episode to end"

    def mark_ended(self, episode: str) -> None:
        self._busy.pop(episode, None)
        self._note_progress()

    async def generate(self, episode: str, request: Request) -> Completion:
        if request.id in self._in_flight:
            raise ValueError(f"request id {request.id!r} is already running; ids must be unique")
        if self._error is not None:
            raise self._error
        entry, began = InFlightRequest(request, episode, self._loop.create_future()), self._loop.time()
        self._in_flight[request.id] = entry
        self._calls[episode] += 1
        self._busy.pop(episode, None)
        self._enqueue(entry)
        self._dispatch()
        try:
            completion = await entry.future
            if entry.rank is not None:
                spans.annotate(engine=entry.rank, queue_seconds=entry.placed - began)
            return completion
        finally:
            if self._in_flight.pop(request.id, None) is not None:  # cancelled: nobody waits any more
                self._abandon(entry)
                self._end_call(episode)

    async def wait_idle(self) -> None:
        """Wait until engines have stopped what was given up; the scheduler may decide at any time."""
        if self._background:
            await asyncio.wait(self._background)

    async def advance(self) -> None:
        """Wait until an episode has ended; raises what made it impossible to go on."""
        if not self._progressed:
            self._waits_since = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout, self._check_progress)
            self._scheduler = self._loop.create_future()
            await self._scheduler
        self._progressed = False
        if self._error is not None:
            raise self._error

    async def abort(self, episodes: Collection[str]) -> int:
        chosen = [entry for entry in self._in_flight.values() if entry.episode in episodes]
        born = [engine.restarts for engine in self._engines]
        submitting = [e.submitting for e in self._engines if e.submitting is not None]
        by_rank: dict[int, list[str]] = {}
        for entry in chosen:
            if entry.rank is not None:
                by_rank.setdefault(entry.rank, []).append(entry.request.id)
        self._resolve([aborted_completion(entry.request.id) for entry in chosen if entry.rank is None])
        if submitting:  # an abort must not overtake the request that it is about
            await asyncio.gather(*submitting, return_exceptions=True)
        aborts = [self._ranks.abort(rank, ids) for rank, ids in by_rank.items()]
        for rank, result in zip(by_rank, await asyncio.gather(*aborts, return_exceptions=True), strict=True):
            if isinstance(result, BaseException):
                if not self._is_death(result):
                    raise result
                if self._engines[rank].restarts > born[rank]:
                    continue  # known already; what was given out again ends with its episode
                # Not to be issued again: they were to be stopped.
                ids = [request_id for request_id in by_rank[rank] if request_id in self._in_flight]
                self._resolve([aborted_completion(request_id) for request_id in ids])
                self._failed(self._engines[rank], result)
            else:
                self._resolve(result)
        return len(chosen)

    def give_up(self, episode: str) -> None:
        for entry in [entry for entry in self._in_flight.values() if entry.episode == episode]:
            del self._in_flight[entry.request.id]
            self._abandon(entry)
            self._end_call(episode)
            if not entry.future.done():
                entry.future.set_result(aborted_completion(entry.request.id))

    async def wait_all_up(self) -> None:

        async def repaired() -> None:
            while self._repairs and self._error is None:
                await asyncio.wait(self._repairs)

        try:
            await asyncio.wait_for(repaired(), self._timeout)
        except TimeoutError:
            raise RolloutStalled(self._stall_message()) from None
        if self._error is not None:
            raise self._error

    async def mark_dead(self, rank: int, error: BaseException) -> None:
        self._failed(self._engines[rank], error)

    def load(self) -> EngineLoad:
        running = tuple(len(engine.running) for engine in self._engines)
        up = set(self._router.up_ranks)
        down = tuple(engine.rank for engine in self._engines if engine.rank not in up)
        waiting = max(len(self._in_flight) - sum(running), 0)
        return EngineLoad(running, waiting, down, dict(Counter(list(self._busy.values()))))

    def take_metrics(self) -> Metrics:
        metrics, counts, self._counts = Metrics(), self._counts, Counter()
        metrics.add_sum("rollout/engine_restarts", counts["restarts"])
        metrics.add_sum("rollout/reissued_requests", counts["reissued"])
        for counters in self._take_counters():
            metrics.add_sum("rollout/resumed_responses", counters.resumed)
            metrics.add_sum("rollout/restarted_responses", counters.restarted)
            metrics.add_sum("rollout/discarded_tokens", counters.discarded_tokens)
        return metrics

    # --- requests on their way ------------------------------------------------------------------------------------

    def _enqueue(self, entry: InFlightRequest) -> None:
        entry.rank = None
        self._router.add(entry.request.id, entry.request.order, entry.request.affinity)

    def _dispatch(self, freed: int | None = None) -> None:
        """Give waiting requests to engines as long as there is room; `freed` is an engine that has just got some."""
        while (placed := self._router.place(freed)) is not None:
            entry, engine = self._in_flight[placed[0]], self._engines[placed[1]]
            entry.rank, entry.placed = engine.rank, self._loop.time()
            engine.running.add(entry.request.id)
            engine.outbox.append(entry.request)
            if engine.submitting is None:
                engine.submitting = self._loop.create_task(self._submit(engine))
            if engine.polling is None:
                engine.polling = self._loop.create_task(self._poll(engine))
            engine.work.set()

    async def _submit(self, engine: EngineState) -> None:
        """Empty the outbox; what is placed meanwhile goes with the next call."""
        try:
            await asyncio.sleep(0)  # siblings that start in the same turn of the loop share a call
            while engine.outbox:
                batch, engine.outbox = engine.outbox, []
                await self._ranks.submit(engine.rank, batch)
        except Exception as error:  # noqa: BLE001 - decided by `is_death`
            engine.submitting = None
            self._failed(engine, error)
        finally:
            engine.submitting = None

    async def _poll(self, engine: EngineState) -> None:
        """Take finished responses as long as the engine lives."""
        try:
            while True:
                if not engine.running:
                    engine.work.clear()
                    await engine.work.wait()
                completions = await self._ranks.poll(engine.rank, self._poll_budget)
                self._resolve(completions)
                if not completions:
                    await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - decided by `is_death`
            engine.polling = None
            self._failed(engine, error)

    def _resolve(self, completions: Sequence[Completion]) -> None:
        freed: dict[int, None] = {}
        for completion in completions:
            entry = self._in_flight.pop(completion.id, None)
            if entry is None:  # its episode was cancelled
                continue
            if entry.rank is not None:
                freed[entry.rank] = None
            self._forget(entry)
            self._end_call(entry.episode)
            settle(entry.future, completion, completion.refusal)
        for rank in freed:
            self._dispatch(rank)

    def _end_call(self, episode: str) -> None:
        self._calls[episode] -= 1
        if not self._calls[episode]:
            del self._calls[episode]
            self._busy[episode] = "between turns"

    def _forget(self, entry: InFlightRequest) -> None:
        if entry.rank is None:
            self._router.discard(entry.request.id)
            return
        engine = self._engines[entry.rank]
        if entry.request.id in engine.running:
            engine.running.discard(entry.request.id)
            self._router.release(entry.rank)

    def _abandon(self, entry: InFlightRequest) -> None:
        """Tell the engine that nobody waits for this request any more."""
        rank = entry.rank
        self._forget(entry)
        if rank is not None and self._error is None:
            self._dispatch(rank)
            stop = self._loop.create_task(self._stop_request(rank, entry.request.id))
            self._background.add(stop)
            stop.add_done_callback(self._background.discard)

    async def _stop_request(self, rank: int, request_id: str) -> None:
        submitting = self._engines[rank].submitting
        if submitting is not None:
            await asyncio.wait([submitting])
        with contextlib.suppress(Exception):  # a dead engine shows up in its poll
            await self._ranks.abort(rank, [request_id])

    # --- engines that die -----------------------------------------------------------------------------------------

    def _failed(self, engine: EngineState, error: BaseException) -> None:
        """Replace an engine that can't go on, or end the run."""
        if self._error is not None or engine.rank not in self._router.up_ranks:
            return  # known already, from its other call
        if not self._is_death(error) or engine.restarts >= self._max_restarts:
            if self._is_death(error):
                lost = EngineLost(
                    f"engine {engine.rank} died and was replaced {engine.restarts} times already, as often as "
                    f"engine_restarts ({self._max_restarts}) allows: {error}"
                )
                lost.__cause__ = error
                error = lost
            self._fail_all(error)
            return
        engine.restarts += 1
        self._counts["restarts"] += 1
        self._router.down(engine.rank)
        logger.warning(
            "engine %d died with %d requests; restart %d of %d: %s",
            engine.rank, len(engine.running), engine.restarts, self._max_restarts, error,
        )  # fmt: skip
        engine.outbox = []
        for request_id in sorted(engine.running):
            self._router.release(engine.rank)
            entry = self._in_flight.get(request_id)
            if entry is not None:
                self._counts["reissued"] += 1
                self._enqueue(entry)
        engine.running = set()
        for task in (engine.submitting, engine.polling):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        engine.submitting = engine.polling = None
        repair = self._loop.create_task(self._repair(engine))
        self._repairs.add(repair)
        repair.add_done_callback(self._repairs.discard)
        self._dispatch()

    async def _repair(self, engine: EngineState) -> None:
        assert self._restart is not None
        try:
            await self._restart(engine.rank)
        except Exception as error:  # noqa: BLE001 - ends the run with its cause
            lost = EngineLost(f"engine {engine.rank} died and could not be started again: {error}")
            lost.__cause__ = error
            self._fail_all(lost)
            return
        self._router.up(engine.rank)
        self._dispatch(engine.rank)

    def _fail_all(self, error: BaseException) -> None:
        """Give the error to everybody who waits: nothing more will come."""
        self._error = error
        for entry in list(self._in_flight.values()):
            if not entry.future.done():
                entry.future.set_exception(error)
        self._note_progress()

    def _note_progress(self) -> None:
        """Wake the scheduler, or else let it go on when it next waits."""
        self._progressed = True
        if self._scheduler is not None and not self._scheduler.done():
            self._scheduler.set_result(None)

    def _check_progress(self) -> None:
        """Raise for a scheduler that has waited too long; the wait that set the timer may be long over."""
        self._timer = None
        if self._scheduler is not None and not self._scheduler.done():
            left = self._waits_since + self._timeout - self._loop.time()
            if left > 0:
                self._timer = self._loop.call_later(left, self._check_progress)
            else:
                self._scheduler.set_exception(RolloutStalled(self._stall_message()))

    def _stall_message(self) -> str:
        parts = [f"no progress for {self._timeout:.0f} s"]
        if self._busy:
            waiting = ", ".join(f"{name} ({what})" for name, what in sorted(self._busy.items())[:5])
            parts.append(f"waiting for {len(self._busy)} episodes: {waiting}")
        if self._in_flight:
            where = Counter("no engine yet" if x.rank is None else f"engine {x.rank}" for x in self._in_flight.values())
            parts.append("requests wait for " + ", ".join(f"{name} ({n})" for name, n in where.most_common(5)))
        down = [str(e.rank) for e in self._engines if e.rank not in self._router.up_ranks]
        if down:
            parts.append(f"engines being replaced: {', '.join(down)}")
        return "; ".join(parts) + ". Raise rpc_timeout if they are merely slow."
