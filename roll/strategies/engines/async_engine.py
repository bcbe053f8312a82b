"""What engines that compute on their own (vLLM, SGLang) have in common: one event loop in a thread of its own.

Callers' threads `submit` requests and `poll` finished responses. On the loop, which owns the engine, every response has
a task that draws tokens from the backend's streams. Streams begin only while the gate is open. A weight update closes
it, interrupts the streams (what they sampled is kept), waits until the last one has ended, loads, and opens it again;
each task goes on with prompt + tokens so far as its prompt. So a token's version is that of its stream, and no key or
value of old weights is read under new ones. Whatever goes wrong inside the engine ends it for good: everything that is
called later raises `EngineDied`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Literal, TypeVar

from torch import Tensor

from roll.strategies.base import (
    ENGINE_PARTS,
    Completion,
    EngineCounters,
    EngineDied,
    EnginePart,
    EngineSettings,
    InferEngine,
    Request,
    RequestRefused,
)
from roll.strategies.engines.engine_backend import EngineBackend, Loader, WeightStream
from roll.strategies.engines.responses import InFlightResponse, ResponseRules, refused_completion
from roll.strategies.engines.weight_feed import WeightFeed
from roll.types.trajectory import FinishReason
from roll.utils.loop_thread import LoopThread
from roll.utils.seeding import stable_hash

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ABORT_AGAIN = 0.25
"""Seconds after which an abort is repeated: one that overtakes the start of its request is lost inside engines."""
_BATCH_WAIT_S = 0.03  # seconds that `poll` waits for more responses where only a batch waits: each call is costly
_BATCH = 64  # responses that `poll` hands out without waiting for more
_HEALTH_EVERY = 1.0  # seconds between two looks at the engine's processes
_HEALTH_TIMEOUT = 60.0  # seconds such a look may take
_CLOSE_TIMEOUT = 30.0  # seconds an engine gets to end by itself before its processes are killed


class AsyncEngine(InferEngine):
    """See the module docstring. Its methods may be called from any thread.

    `partial_rollout`: a weight update lets responses go on from their tokens (`resume`), or start over without them.
    Limits are in seconds: `start_timeout` for the start (it loads the model), `timeout` for any other operation.

    Raises `ValueError` if the engine refuses an option, `EngineDied` if it didn't come up; the cause says why.
    """

    def __init__(
        self,
        backend: EngineBackend,
        rules: ResponseRules,
        *,
        partial_rollout: Literal["resume", "restart"] = "resume",
        name: str = "inference engine",
        start_timeout: float = 1800.0,
        timeout: float = 900.0,
    ) -> None:
        self._backend = backend
        self._rules = rules
        self._partial_rollout = partial_rollout
        self._name = name
        self._timeout = timeout
        self._changed = threading.Condition()
        """Guards what callers' threads touch too: `_responses`, `_finished`, `_cause`, `_closed`."""
        self._responses: dict[str, InFlightResponse] = {}  # by request id
        self._finished: list[Completion] = []
        self._urgent = False  # somebody waits for one of them
        self._cause: BaseException | None = None  # what the engine died of
        self._closed = False
        self._version = 0
        self._asleep: set[EnginePart] = set()
        self._stale = False  # whether the weights slept, or the adapters for them are missing
        self._counters = EngineCounters()
        self._stream_numbers = itertools.count(1)
        self._gate = asyncio.Event()
        self._dead = asyncio.Event()
        self._changing = asyncio.Lock()
        self._watch_task: asyncio.Task[None] | None = None
        self._thread = LoopThread(f"{name} loop")
        atexit.register(self.close)
        try:
            self._call(self._start(), f"to start {name}", start_timeout)
        except BaseException:
            self.close()
            raise

    # From any thread.

    @property
    def version(self) -> int:
        return self._version

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests; raises `EngineDied`, or `RuntimeError` while it or its weights sleep."""
        with self._changed:
            self._require_alive()
            if self._asleep or self._stale:
                asleep = f"{', '.join(sorted(self._asleep))} sleep"
                what = asleep if self._asleep else "its weights slept, or its adapters are missing"
                raise RuntimeError(f"{self._name} can't take requests: {what}; wake it and update its weights first")
            known = set(self._responses)
            for request in requests:
                self._rules.check(request, known)
                self._backend.check(request)
                known.add(request.id)
            responses = [InFlightResponse(request) for request in requests]
            self._responses.update((response.request.id, response) for response in responses)
            self._thread.loop.call_soon_threadsafe(self._start_responses, responses)

    def poll(self, budget: float) -> list[Completion]:
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._cause or self._closed, timeout=max(0.0, budget))
            if self._finished:
                self._changed.wait_for(self._has_enough, timeout=min(_BATCH_WAIT_S, max(0.0, budget)))
            finished, self._finished, self._urgent = self._finished, [], False
            if not finished:
                self._require_alive()
            return finished

    def _has_enough(self) -> bool:
        return bool(self._urgent or len(self._finished) >= _BATCH or not self._responses or self._cause or self._closed)

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Abort requests; works on a dead engine too, as long as it isn't closed.

        One that ends by itself at this very moment isn't returned here but by `poll`.
        """
        ids = list(request_ids)
        if self._closed:
            return []
        return self._call(self._abort(ids), f"for {self._name} to abort {len(ids)} requests")

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Read `weights` in the caller's thread. A `ValueError` leaves a dead engine: it would be half updated."""
        self._load(version, weights, self._backend.load)

    def _load(
        self, version: int, weights: Iterable[tuple[str, Tensor]], load: Loader, *, lacks_adapters: bool = False
    ) -> None:
        self._require_alive()
        feed = WeightFeed(weights, self._thread.loop)
        future = self._thread.submit(self._update(version, feed, load, lacks_adapters=lacks_adapters))
        feed.serve(future)
        self._result(future, f"for {self._name} to load weights of version {version}")

    def take_counters(self) -> EngineCounters:
        counters, self._counters = self._counters, EngineCounters()
        return counters

    def sleep(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> int:
        return self._call(self._sleep(tuple(parts)), f"for {self._name} to free {', '.join(parts)}")

    def wake(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> None:
        self._call(self._wake(tuple(parts)), f"for {self._name} to bring back {', '.join(parts)}")

    def close(self) -> None:
        """Close within about a minute."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        ending = self._thread.submit(self._end())
        try:
            ending.result(_CLOSE_TIMEOUT)
        except (Exception, FutureTimeout) as error:  # noqa: BLE001 - what doesn't end by itself is killed
            logger.warning("%s didn't end by itself (%s: %s); killing it", self._name, type(error).__name__, error)
        self._backend.kill()
        self._thread.stop(timeout=5.0)

    def _require_alive(self) -> None:
        """Raise `EngineDied` when the engine is dead or closed."""
        if self._cause is not None:
            raise EngineDied(f"{self._name} died: {type(self._cause).__name__}: {self._cause}") from self._cause
        if self._closed:
            raise EngineDied(f"{self._name} is closed")

    def _call(self, coroutine: Coroutine[Any, Any, T], what: str, timeout: float | None = None) -> T:
        """Return the result of a coroutine that runs on the loop; `what` says in messages what was waited for."""
        if self._closed:
            coroutine.close()
            raise EngineDied(f"{self._name} is closed")
        return self._result(self._thread.submit(coroutine), what, timeout)

    def _result(self, future: Future[T], what: str, timeout: float | None = None) -> T:
        """Return the result of an operation, or end an engine whose loop doesn't answer within `timeout` seconds."""
        timeout = self._timeout if timeout is None else timeout
        try:  # operations have the same limit on the loop; this one is for a loop that is stuck itself
            return future.result(timeout + 10.0)
        except FutureTimeout:
            if future.done():
                raise  # the operation's own
            future.cancel()
            error = TimeoutError(f"waited {timeout:g} s {what}")
            self._die(error)
            raise EngineDied(str(error)) from error

    def _die(self, cause: BaseException) -> None:
        """Mark the engine as dead and end its responses."""
        with self._changed:
            if self._cause is not None:
                return
            self._cause = cause
            self._changed.notify_all()
        if not self._closed:
            logger.error("%s died: %s: %s", self._name, type(cause).__name__, cause)
        self._thread.loop.call_soon_threadsafe(self._cancel_responses)

    @contextlib.contextmanager
    def _deadly(self) -> Iterator[None]:
        """Declare the engine dead if anything is raised inside."""
        try:
            yield
        except Exception as error:
            self._die(error)
            raise

    # On the loop.

    async def _start(self) -> None:
        """Start the backend and watch over its health."""
        try:
            await self._backend.start()
        except Exception as error:
            self._die(error)
            if isinstance(error, ValueError):
                raise  # an option that the engine refuses: starting again wouldn't help
            raise EngineDied(f"{self._name} didn't start: {type(error).__name__}: {error}") from error
        self._gate.set()
        self._watch_task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self._dead.is_set():
            try:
                await asyncio.wait_for(self._backend.health(), _HEALTH_TIMEOUT)
            except Exception as error:  # noqa: BLE001 - reported by whatever is called next
                self._die(error)
            await asyncio.sleep(_HEALTH_EVERY)

    def _cancel_responses(self) -> None:
        self._gate.clear()
        self._dead.set()
        for response in self._all_responses():
            if response.task is not None:
                response.task.cancel()

    def _all_responses(self) -> list[InFlightResponse]:
        with self._changed:
            return list(self._responses.values())

    def _start_responses(self, responses: Sequence[InFlightResponse]) -> None:
        """Give each response that wasn't aborted meanwhile a task of its own."""
        for response in responses:
            if response.request.id in self._responses and not self._dead.is_set():
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
            self._finish(response, response.completion(reason))
        except RequestRefused as error:
            self._finish(response, refused_completion(response.request.id, str(error)))
        except Exception as error:  # noqa: BLE001 - reported by `poll`
            self._die(error)

    async def _run_stream(self, response: InFlightResponse) -> FinishReason | None:
        """Sample from the tokens so far; why the response is over, or None when the stream was interrupted."""
        request, version = response.request, self._version
        response.stream_id = f"{request.id}/{next(self._stream_numbers)}"  # never twice: engines remember aborted ids
        response.idle.clear()
        params = self._rules.stream_params(request, len(response.tokens))
        seed = stable_hash(request.seed, len(response.tokens)) >> 1
        prompt = (*request.prompt_ids, *response.tokens)
        # Stop strings are looked for here, token by token; everything else ends a response inside the engine.
        final_only = not request.params.stop_strings
        stream = self._backend.stream(response.stream_id, prompt, params, seed, final_only=final_only)
        reason: FinishReason | None = None
        ended: FinishReason | None = None
        try:
            async for tokens, logprobs, ended, experts in stream:
                reason = response.record(tokens, logprobs, version, self._rules)
                if experts is not None:
                    response.route(experts)
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
        raise RuntimeError(f"{self._name} ended request {request.id!r} after {len(response.tokens)} tokens ({ended})")

    def _finish(self, response: InFlightResponse, completion: Completion) -> None:
        aborted = completion.finish_reason == "abort" and not completion.refused
        with self._changed:
            if self._responses.get(response.request.id) is not response or aborted:
                return  # `_abort` hands it out
            del self._responses[response.request.id]
            self._finished.append(completion)
            self._urgent = self._urgent or not response.request.patient
            self._changed.notify_all()

    async def _interrupt(self, responses: Sequence[InFlightResponse]) -> None:
        """End the streams of these; returns when the last one has ended."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout
        waiting = [response for response in responses if response.stream_id is not None]
        while waiting and not self._dead.is_set():
            if clock() > deadline:
                raise TimeoutError(f"{len(waiting)} requests didn't end {self._timeout:g} s after they were aborted")
            await self._backend.abort_running([r.stream_id for r in waiting if r.stream_id is not None])
            ends = [asyncio.ensure_future(response.idle.wait()) for response in waiting]
            await asyncio.wait(ends, timeout=_ABORT_AGAIN)
            for end in ends:
                end.cancel()
            waiting = [response for response in waiting if not response.idle.is_set()]

    async def _abort(self, ids: Sequence[str]) -> list[Completion]:
        """Interrupt these responses and return what they have; also on a dead engine."""
        with self._changed:
            responses = [self._responses[i] for i in ids if i in self._responses]
        for response in responses:
            response.aborted = True
        try:
            await self._exclusive(self._interrupt(responses), "its requests to be aborted")
        except EngineDied:
            logger.debug("%s is dead; handing out what it sampled before", self._name)
        except Exception as error:  # noqa: BLE001 - reported by `poll`
            self._die(error)
        stopped: list[Completion] = []
        with self._changed:
            for response in responses:
                if self._responses.get(response.request.id) is response:
                    del self._responses[response.request.id]
                    if response.task is not None:  # else the engine died before it could begin
                        response.task.cancel()
                    stopped.append(response.completion("abort"))
        return stopped

    async def _update(self, version: int, weights: WeightStream, load: Loader, *, lacks_adapters: bool) -> None:
        """Interrupt all responses, load, and let them go on with the new weights."""
        async with self._changing:
            self._require_alive()
            if "weights" in self._asleep:
                raise RuntimeError(f"{self._name} can't load weights while they sleep; wake them first")
            self._gate.clear()
            responses = self._all_responses()
            with self._deadly():
                await self._exclusive(self._interrupt(responses), "its requests to stop for new weights")
                await self._exclusive(load(version, weights), f"weights of version {version}")
            self._version = version
            self._stale = lacks_adapters
            if lacks_adapters:
                return  # requests wait for them
            for response in responses:
                if response.tokens and self._responses.get(response.request.id) is response:
                    self._counters.count(response.restart() if self._partial_rollout == "restart" else None)
            self._open()

    async def _sleep(self, parts: Sequence[EnginePart]) -> int:
        """Close the gate and free those of these parts that are awake; bytes freed."""
        async with self._changing:
            with self._changed:
                if self._responses:
                    raise RuntimeError(f"{self._name} can't sleep: {len(self._responses)} requests are on their way")
                parts = [part for part in parts if part not in self._asleep]  # engines can't free memory twice
                self._asleep.update(parts)
            self._gate.clear()
            self._stale = self._stale or "weights" in parts
            with self._deadly():
                return await self._exclusive(self._backend.sleep(parts), f"freeing {', '.join(parts)}") if parts else 0

    async def _wake(self, parts: Sequence[EnginePart]) -> None:
        """Bring back those of these parts that sleep."""
        async with self._changing:
            parts = [part for part in parts if part in self._asleep]
            if not parts:
                return
            with self._deadly():
                await self._exclusive(self._backend.wake(parts), f"bringing back {', '.join(parts)}")
            self._asleep.difference_update(parts)
            self._open()

    def _open(self) -> None:
        if not self._asleep and not self._stale and not self._dead.is_set():
            self._gate.set()

    async def _exclusive(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Return the result of `coroutine`, unless the engine dies or the time is over first."""
        task = asyncio.ensure_future(coroutine)
        death = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({task, death}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        if task.done():
            return task.result()
        task.cancel()
        self._require_alive()
        raise TimeoutError(f"waited {self._timeout:g} s for {self._name}: {what}")

    async def _end(self) -> None:
        self._cancel_responses()
        if self._watch_task is not None:
            self._watch_task.cancel()
        await self._backend.shutdown()


def started(
    kind: type[AsyncEngine], backend: EngineBackend, rules: ResponseRules, settings: EngineSettings, name: str
) -> AsyncEngine:
    """Return an engine of the run, started; messages call it by `name` and its device slots."""
    where = f" on slot {', '.join(map(str, settings.slots))}" if settings.slots else ""
    return kind(backend, rules, partial_rollout=settings.partial_rollout, name=name + where)
