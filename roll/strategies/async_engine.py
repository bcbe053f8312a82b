"""What engines that compute on their own (vLLM, SGLang) have in common.

Dataflow. Callers' threads: `submit` -> records; `poll` <- finished responses. One daemon thread runs an event loop that
owns the engine: every record has a task there which draws tokens from the backend's stream until the response is over.

The gate. Streams begin only while it is open. `update_weights` closes it, interrupts the streams (what they sampled is
kept), waits until the last one has ended, loads, and opens it again; then each task goes on with prompt + tokens so far
as its prompt. No stream runs across a change of weights, so the version of a token is that of its stream, and no key or
value computed under old weights is read under new ones.

Death. Whatever goes wrong inside the engine ends it for good: `poll` and everything else raise `EngineDied`.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import Tensor

from roll.strategies.base import (
    ENGINE_PARTS,
    Completion,
    EngineCounters,
    EngineDied,
    EnginePart,
    InferEngine,
    Request,
)
from roll.strategies.engine_backend import EngineBackend
from roll.strategies.loop_thread import LoopThread, WeightFeed
from roll.strategies.responses import InFlightResponse
from roll.strategies.stopping import ResponseRules
from roll.types.episode import FinishReason
from roll.utils.seeding import stable_hash

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ABORT_AGAIN = 0.25
"""Seconds after which an abort is repeated: one that overtakes the start of its request is lost inside engines."""
_HEALTH_EVERY = 1.0
"""Seconds between two looks at the engine's processes."""
_HEALTH_TIMEOUT = 60.0
"""Seconds such a look may take."""
_CLOSE_TIMEOUT = 30.0
"""Seconds an engine gets to end by itself before its processes are killed."""


class AsyncEngine(InferEngine):
    """See the module docstring. Its methods may be called from any thread.

    Args:
        backend: the engine library; started here.
        rules: what ends a response, and the checks on requests.
        partial_rollout: what a weight update does to responses on their way. `resume`: they go on from their tokens;
            `restart`: they start over and their tokens are thrown away.
        name: of the engine, for messages.
        start_timeout: seconds the start may take (it loads the model).
        timeout: seconds any other operation may take, a weight update included.

    Raises:
        ValueError: the engine refuses an option.
        EngineDied: the engine didn't come up; the cause says why.
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
        self._responses: dict[str, InFlightResponse | None] = {}  # None: submitted, not yet begun by the loop
        self._finished: list[Completion] = []
        self._cause: BaseException | None = None
        self._closed = False
        self._version = 0
        self._stream_numbers = itertools.count(1)
        self._asleep: set[EnginePart] = set()
        self._stale = False
        self._gate = asyncio.Event()
        self._dead = asyncio.Event()
        self._changing = asyncio.Lock()
        self._watch_task: asyncio.Task[None] | None = None
        self.counters = EngineCounters()
        self._thread = LoopThread(f"{name} loop")
        atexit.register(self.close)
        try:
            self._call(self._start(), f"to start {name}", start_timeout)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Version of the weights in use; 0: those the engine started with."""
        return self._version

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; a malformed one raises `ValueError` before any is queued.

        Raises:
            EngineDied: the engine is gone.
            RuntimeError: it sleeps, or its weights did and weren't updated since.
        """
        with self._changed:
            self._require_alive()
            if self._asleep or self._stale:
                slept = "its weights slept, or its adapters are missing"
                what = f"{', '.join(sorted(self._asleep))} sleep" if self._asleep else slept
                raise RuntimeError(f"{self._name} can't take requests: {what}; wake it and update its weights first")
            known = set(self._responses)
            for request in requests:
                self._rules.check(request, known)
                self._backend.check(request)
                known.add(request.id)
            for request in requests:
                self._responses[request.id] = None
            self._thread.post(self._start_responses, list(requests))

    def poll(self, budget: float) -> list[Completion]:
        """What has finished since the last call; waits for something at most `budget` seconds.

        Raises:
            EngineDied: the engine is gone, and what finished before has been handed out.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._cause or self._closed, timeout=max(0.0, budget))
            finished, self._finished = self._finished, []
            if not finished:
                self._require_alive()
            return finished

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Stop these; returns them with finish reason `abort`. Works on a dead engine too, as long as it isn't closed.

        One that ends by itself at this very moment isn't returned here but by `poll`.
        """
        ids = list(request_ids)
        if self._closed:
            return []
        return self._call(self._abort(ids), f"for {self._name} to abort {len(ids)} requests")

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights (Hugging Face names) and name them `version`; `weights` is read in the caller's thread.

        Raises:
            ValueError: a name or shape is wrong, or a name is missing. The engine is dead then: it would be half new.
            EngineDied: the engine is gone.
        """
        self._load(version, weights, adapters=False)

    def update_adapters(self, version: int, adapters: Iterable[tuple[str, Tensor]]) -> None:
        """Load new adapters over the base weights; see the base class, and `update_weights` for errors."""
        if not self._backend.takes_adapters:
            raise NotImplementedError(f"{self._name} was started for merged weights")
        self._load(version, adapters, adapters=True)

    def _load(self, version: int, weights: Iterable[tuple[str, Tensor]], *, adapters: bool) -> None:
        with self._changed:
            self._require_alive()
        feed = WeightFeed(weights, self._thread.loop)
        future = self._thread.submit(self._update(version, feed, adapters=adapters))
        feed.serve(future)
        self._result(future, f"for {self._name} to load weights of version {version}", self._timeout)

    def take_counters(self) -> EngineCounters:
        """What weight updates did to responses on their way, since the last call."""
        counters, self.counters = self.counters, EngineCounters()
        return counters

    def sleep(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> int:
        """Free these parts of the device's memory until `wake`; bytes freed.

        Raises:
            RuntimeError: requests are on their way.
        """
        return self._call(self._sleep(tuple(parts)), f"for {self._name} to free {', '.join(parts)}")

    def wake(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> None:
        """Bring these parts back; after weights, an update must follow."""
        self._call(self._wake(tuple(parts)), f"for {self._name} to bring back {', '.join(parts)}")

    def close(self) -> None:
        """End the engine and its processes; takes at most about a minute. A second call does nothing."""
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

    # The callers' side.

    def _require_alive(self) -> None:
        if self._cause is not None:
            why = f"{type(self._cause).__name__}: {self._cause}"
            raise EngineDied(f"{self._name} died: {why}") from self._cause
        if self._closed:
            raise EngineDied(f"{self._name} is closed")

    def _call(self, coroutine: Coroutine[Any, Any, T], what: str, timeout: float | None = None) -> T:
        if self._closed:
            coroutine.close()
            raise EngineDied(f"{self._name} is closed")
        future = self._thread.submit(coroutine)
        return self._result(future, what, self._timeout if timeout is None else timeout)

    def _result(self, future: Future[T], what: str, timeout: float) -> T:
        # Operations have the same limit on the loop; this one is for a loop that is stuck itself.
        try:
            return future.result(timeout + 10.0)
        except FutureTimeout:
            if future.done():
                raise  # the operation's own
            future.cancel()
            error = TimeoutError(f"waited {timeout:g} s {what}")
            self._die(error)
            raise EngineDied(str(error)) from error

    # The loop's side.

    async def _start(self) -> None:
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

    def _die(self, cause: BaseException) -> None:
        """From any thread: the engine is of no more use."""
        with self._changed:
            if self._cause is not None:
                return
            self._cause = cause
            self._changed.notify_all()
        if not self._closed:
            logger.error("%s died: %s: %s", self._name, type(cause).__name__, cause)
        self._thread.post(self._cancel_responses)

    def _cancel_responses(self) -> None:
        self._gate.clear()
        self._dead.set()
        for response in self._started_responses():
            if response.task is not None:
                response.task.cancel()

    def _started_responses(self) -> list[InFlightResponse]:
        with self._changed:
            return [response for response in self._responses.values() if response is not None]

    def _start_responses(self, requests: Sequence[Request]) -> None:
        for request in requests:
            # One that was aborted before it began is gone.
            if request.id in self._responses and not self._dead.is_set():
                response = InFlightResponse(request)
                self._responses[request.id] = response
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
            self._die(error)

    async def _run_stream(self, response: InFlightResponse) -> FinishReason | None:
        """One stream, from the tokens so far; why the response is over, or None when the stream was interrupted."""
        request, version = response.request, self._version
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
        raise RuntimeError(f"{self._name} ended request {request.id!r} after {len(response.tokens)} tokens ({ended})")

    def _finish(self, response: InFlightResponse, reason: FinishReason) -> None:
        with self._changed:
            if self._responses.get(response.request.id) is not response or reason == "abort":
                return  # `_abort` hands it out
            del self._responses[response.request.id]
            self._finished.append(response.completion(reason))
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
        with self._changed:
            chosen = {i: self._responses[i] for i in ids if i in self._responses}
        responses = [response for response in chosen.values() if response is not None]
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
                    assert response.task is not None
                    response.task.cancel()
                    stopped.append(response.completion("abort"))
            for request_id, begun in chosen.items():
                if begun is None and request_id in self._responses:  # the engine died before it could begin
                    del self._responses[request_id]
                    stopped.append(
                        Completion(id=request_id, token_ids=(), logprobs=(), versions=(), finish_reason="abort")
                    )
        return stopped

    async def _update(self, version: int, weights: AsyncIterator[tuple[str, Tensor]], *, adapters: bool) -> None:
        load = self._backend.load_adapters if adapters else self._backend.load
        async with self._changing:
            self._require_alive()
            if "weights" in self._asleep:
                raise RuntimeError(f"{self._name} can't load weights while they sleep; wake them first")
            self._gate.clear()
            responses = self._started_responses()
            try:
                await self._exclusive(self._interrupt(responses), "its requests to stop for new weights")
                await self._exclusive(load(version, weights), f"weights of version {version}")
            except Exception as error:
                self._die(error)
                raise
            self._version = version
            self._stale = self._backend.takes_adapters and not adapters
            if self._stale:
                return  # requests wait for the adapters
            for response in responses:
                if response.tokens and self._responses.get(response.request.id) is response:
                    self._count(response)
            self._open()

    def _count(self, response: InFlightResponse) -> None:
        if self._partial_rollout == "restart":
            self.counters.restarted += 1
            self.counters.discarded_tokens += response.restart()
        else:
            self.counters.resumed += 1

    async def _sleep(self, parts: Sequence[EnginePart]) -> int:
        async with self._changing:
            with self._changed:
                if self._responses:
                    raise RuntimeError(f"{self._name} can't sleep: {len(self._responses)} requests are on their way")
                self._asleep.update(parts)
            self._gate.clear()
            self._stale = self._stale or "weights" in parts
            try:
                return await self._exclusive(self._backend.sleep(parts), f"freeing {', '.join(parts)}")
            except Exception as error:
                self._die(error)
                raise

    async def _wake(self, parts: Sequence[EnginePart]) -> None:
        async with self._changing:
            parts = [part for part in parts if part in self._asleep]
            if not parts:
                return
            try:
                await self._exclusive(self._backend.wake(parts), f"bringing back {', '.join(parts)}")
            except Exception as error:
                self._die(error)
                raise
            self._asleep.difference_update(parts)
            self._open()

    def _open(self) -> None:
        if not self._asleep and not self._stale and not self._dead.is_set():
            self._gate.set()

    async def _exclusive(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """`coroutine`'s result, unless the engine dies or the time is over first."""
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
