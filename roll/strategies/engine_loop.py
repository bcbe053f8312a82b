"""The event loop behind `AsyncEngine`: the responses on their way, the gate, and the death of an engine.

Streams begin only while the gate is open. A weight update closes it, interrupts the streams (what they sampled is
kept), waits until the last one has ended, loads, and opens it again; each task goes on with prompt + tokens so far as
its prompt. So a token's version is that of its stream, and no key or value of old weights is read under new ones.
Whatever goes wrong inside the engine ends it for good: everything that is called later raises `EngineDied`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import Tensor

from roll.strategies.base import Completion, EngineCounters, EngineDied, EnginePart, Request
from roll.strategies.engine_backend import EngineBackend
from roll.strategies.loop_thread import LoopThread
from roll.strategies.responses import InFlightResponse
from roll.strategies.stopping import ResponseRules
from roll.types.episode import FinishReason
from roll.utils.seeding import stable_hash

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ABORT_AGAIN = 0.25
"""Seconds after which an abort is repeated: one that overtakes the start of its request is lost inside engines."""
_HEALTH_EVERY = 1.0  # seconds between two looks at the engine's processes
_HEALTH_TIMEOUT = 60.0  # seconds such a look may take


class EngineLoop:
    """One backend and its responses on an event loop in a thread of its own; arguments as for `AsyncEngine`."""

    def __init__(
        self,
        backend: EngineBackend,
        rules: ResponseRules,
        *,
        partial_rollout: Literal["resume", "restart"],
        name: str,
        timeout: float,
    ) -> None:
        self._backend = backend
        self._rules = rules
        self._partial_rollout = partial_rollout
        self.name = name
        self.timeout = timeout
        self.changed = threading.Condition()
        """Guards what other threads touch too: `responses`, `finished`, `cause`, `closed`."""
        self.responses: dict[str, InFlightResponse | None] = {}
        """By request id; None: submitted, but not started by the loop yet."""
        self.finished: list[Completion] = []
        self.cause: BaseException | None = None  # what the engine died of
        self.closed = False
        self.version = 0
        self.asleep: set[EnginePart] = set()
        self.stale = False  # whether the weights slept, or the adapters for them are missing
        self.counters = EngineCounters()
        self._stream_numbers = itertools.count(1)
        self._gate = asyncio.Event()
        self._dead = asyncio.Event()
        self._changing = asyncio.Lock()
        self._watch_task: asyncio.Task[None] | None = None
        self.thread = LoopThread(f"{name} loop")

    # From any thread.

    def require_alive(self) -> None:
        """Raise `EngineDied` when the engine is dead or closed."""
        if self.cause is not None:
            why = f"{type(self.cause).__name__}: {self.cause}"
            raise EngineDied(f"{self.name} died: {why}") from self.cause
        if self.closed:
            raise EngineDied(f"{self.name} is closed")

    def run(self, coroutine: Coroutine[Any, Any, T], what: str, timeout: float | None = None) -> T:
        """Return the result of a coroutine that runs on the loop; `what` says in messages what was waited for."""
        if self.closed:
            coroutine.close()
            raise EngineDied(f"{self.name} is closed")
        future = self.thread.submit(coroutine)
        return self.result(future, what, timeout)

    def result(self, future: Future[T], what: str, timeout: float | None = None) -> T:
        """Return the result of an operation, or end an engine whose loop doesn't answer within `timeout` seconds."""
        timeout = self.timeout if timeout is None else timeout
        # Operations have the same limit on the loop; this one is for a loop that is stuck itself.
        try:
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
        self.thread.post(self._cancel_responses)

    @contextlib.contextmanager
    def _deadly(self) -> Iterator[None]:
        """Whatever is raised inside ends the engine."""
        try:
            yield
        except Exception as error:
            self.die(error)
            raise

    # On the loop.

    async def start(self) -> None:
        """Start the backend and watch over its health."""
        try:
            await self._backend.start()
        except Exception as error:
            self.die(error)
            if isinstance(error, ValueError):
                raise  # an option that the engine refuses: starting again wouldn't help
            raise EngineDied(f"{self.name} didn't start: {type(error).__name__}: {error}") from error
        self._gate.set()
        self._watch_task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self._dead.is_set():
            try:
                await asyncio.wait_for(self._backend.health(), _HEALTH_TIMEOUT)
            except Exception as error:  # noqa: BLE001 - reported by whatever is called next
                self.die(error)
            await asyncio.sleep(_HEALTH_EVERY)

    def _cancel_responses(self) -> None:
        self._gate.clear()
        self._dead.set()
        for response in self._started_responses():
            if response.task is not None:
                response.task.cancel()

    def _started_responses(self) -> list[InFlightResponse]:
        with self.changed:
            return [response for response in self.responses.values() if response is not None]

    def start_responses(self, requests: Sequence[Request]) -> None:
        """Give each request that wasn't aborted meanwhile a task of its own."""
        for request in requests:
            # One that was aborted before it began is gone.
            if request.id in self.responses and not self._dead.is_set():
                response = InFlightResponse(request)
                self.responses[request.id] = response
                response.task = asyncio.create_task(self._run(response))

    async def _run(self, response: InFlightResponse) -> None:
        """Draw tokens, stream by stream, until the response is over."""
        try:
            reason: FinishReason | None = None
            while reason is None:
                while not self._gate.is_set():
                    await self._gate.wait()
                if response.aborted:
                    return
                reason = await self._run_stream(response)
            self._finish(response, reason)
        except Exception as error:  # noqa: BLE001 - reported by `poll`
            self.die(error)

    async def _run_stream(self, response: InFlightResponse) -> FinishReason | None:
        """Sample from the tokens so far; why the response is over, or None when the stream was interrupted."""
        request, version = response.request, self.version
        response.stream_id = f"{request.id}/{next(self._stream_numbers)}"  # never twice: engines remember aborted ids
        response.idle.clear()
        params = replace(
            request.params,
            max_new_tokens=self._rules.tokens_left(request, len(response.tokens)),
            stop_token_ids=self._rules.stop_token_ids(request),
            stop_strings=(),
            ignore_eos=True,
        )
        seed = stable_hash(request.seed, len(response.tokens)) >> 1
        stream = self._backend.stream(response.stream_id, (*request.prompt_ids, *response.tokens), params, seed)
        reason: FinishReason | None = None
        ended: FinishReason | None = None
        try:
            async for tokens, logprobs, ended in stream:
                reason = response.record(tokens, logprobs, version, self._rules)
                if reason is not None and ended is None:
                    await self._backend.abort_running([response.stream_id])
                if reason is not None or ended is not None:
                    break
        finally:
            await stream.aclose()
            response.stream_id = None
            response.idle.set()
        if reason is not None:
            return reason
        if response.aborted or not self._gate.is_set():
            return "abort" if response.aborted else None
        if ended == "length":
            return "length"
        raise RuntimeError(f"{self.name} ended request {request.id!r} after {len(response.tokens)} tokens ({ended})")

    def _finish(self, response: InFlightResponse, reason: FinishReason) -> None:
        with self.changed:
            if self.responses.get(response.request.id) is not response or reason == "abort":
                return  # `_abort` hands it out
            del self.responses[response.request.id]
            self.finished.append(response.completion(reason))
            self.changed.notify_all()

    async def _interrupt(self, responses: Sequence[InFlightResponse]) -> None:
        """End the streams of these; returns when the last one has ended."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.timeout
        waiting = [response for response in responses if response.stream_id is not None]
        while waiting and not self._dead.is_set():
            if clock() > deadline:
                raise TimeoutError(f"{len(waiting)} requests didn't end {self.timeout:g} s after they were aborted")
            await self._backend.abort_running([r.stream_id for r in waiting if r.stream_id is not None])
            ends = [asyncio.ensure_future(response.idle.wait()) for response in waiting]
            await asyncio.wait(ends, timeout=_ABORT_AGAIN)
            for end in ends:
                end.cancel()
            waiting = [response for response in waiting if not response.idle.is_set()]

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Interrupt these responses and return what they have; also on a dead engine."""
        with self.changed:
            chosen = {i: self.responses[i] for i in ids if i in self.responses}
        responses = [response for response in chosen.values() if response is not None]
        for response in responses:
            response.aborted = True
        try:
            await self._exclusive(self._interrupt(responses), "its requests to be aborted")
        except EngineDied:
            logger.debug("%s is dead; handing out what it sampled before", self.name)
        except Exception as error:  # noqa: BLE001 - reported by `poll`
            self.die(error)
        stopped: list[Completion] = []
        with self.changed:
            for response in responses:
                if self.responses.get(response.request.id) is response:
                    del self.responses[response.request.id]
                    assert response.task is not None
                    response.task.cancel()
                    stopped.append(response.completion("abort"))
            for request_id, begun in chosen.items():
                if begun is None and request_id in self.responses:  # the engine died before it could begin
                    del self.responses[request_id]
                    stopped.append(
                        Completion(id=request_id, token_ids=(), logprobs=(), versions=(), finish_reason="abort")
                    )
        return stopped

    async def update(self, version: int, weights: AsyncIterator[tuple[str, Tensor]], *, adapters: bool) -> None:
        """Interrupt all responses, load, and let them go on with the new weights."""
        load = self._backend.load_adapters if adapters else self._backend.load
        async with self._changing:
            self.require_alive()
            if "weights" in self.asleep:
                raise RuntimeError(f"{self.name} can't load weights while they sleep; wake them first")
            self._gate.clear()
            responses = self._started_responses()
            with self._deadly():
                await self._exclusive(self._interrupt(responses), "its requests to stop for new weights")
                await self._exclusive(load(version, weights), f"weights of version {version}")
            self.version = version
            self.stale = self._backend.takes_adapters and not adapters
            if self.stale:
                return  # requests wait for the adapters
            for response in responses:
                if response.tokens and self.responses.get(response.request.id) is response:
                    self._count(response)
            self._open()

    def _count(self, response: InFlightResponse) -> None:
        if self._partial_rollout == "restart":
            self.counters.restarted += 1
            self.counters.discarded_tokens += response.restart()
        else:
            self.counters.resumed += 1

    async def sleep(self, parts: Sequence[EnginePart]) -> int:
        """Close the gate and free these parts; bytes freed."""
        async with self._changing:
            with self.changed:
                if self.responses:
                    raise RuntimeError(f"{self.name} can't sleep: {len(self.responses)} requests are on their way")
                self.asleep.update(parts)
            self._gate.clear()
            self.stale = self.stale or "weights" in parts
            with self._deadly():
                return await self._exclusive(self._backend.sleep(parts), f"freeing {', '.join(parts)}")

    async def wake(self, parts: Sequence[EnginePart]) -> None:
        """Bring back those of these parts that sleep."""
        async with self._changing:
            parts = [part for part in parts if part in self.asleep]
            if not parts:
                return
            with self._deadly():
                await self._exclusive(self._backend.wake(parts), f"bringing back {', '.join(parts)}")
            self.asleep.difference_update(parts)
            self._open()

    def _open(self) -> None:
        if not self.asleep and not self.stale and not self._dead.is_set():
            self._gate.set()

    async def _exclusive(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Return the result of `coroutine`, unless the engine dies or the time is over first."""
        task = asyncio.ensure_future(coroutine)
        death = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({task, death}, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        if task.done():
            return task.result()
        task.cancel()
        self.require_alive()
        raise TimeoutError(f"waited {self.timeout:g} s for {self.name}: {what}")

    async def end(self) -> None:
        """Cancel what runs and end the backend."""
        self._cancel_responses()
        if self._watch_task is not None:
            self._watch_task.cancel()
        await self._backend.shutdown()
