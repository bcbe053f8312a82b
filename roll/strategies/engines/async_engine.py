"""What engines that compute on their own (vLLM, SGLang) have in common: one event loop in a thread of its own.

Callers' threads `submit` requests and `poll` finished responses. On the loop (engine_loop.py), which owns the engine,
every response has a task that draws tokens from the backend's streams (response_streams.py). Streams begin only while
the gate is open. A weight update closes it, interrupts the streams (what they sampled is kept), waits until the last
one has ended, loads, and opens it again. So no key or value of old weights is read under new ones.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Literal

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
)
from roll.strategies.engines.engine_backend import EngineBackend, Loader, WeightStream
from roll.strategies.engines.engine_loop import EngineLoop
from roll.strategies.engines.response_streams import ResponseStreams
from roll.strategies.engines.responses import ResponseRules
from roll.strategies.engines.weight_feed import WeightFeed

logger = logging.getLogger(__name__)

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
        self._partial_rollout = partial_rollout
        self._name = name
        self._loop = EngineLoop(name, timeout)
        self._streams = ResponseStreams(backend, rules, self._loop)
        self._asleep: set[EnginePart] = set()
        self._stale = False  # whether the weights slept, or the adapters for them are missing
        self._counters = EngineCounters()
        self._changing = asyncio.Lock()
        self._watch_task: asyncio.Task[None] | None = None
        atexit.register(self.close)
        try:
            self._loop.call(self._start(), f"to start {name}", start_timeout)
        except BaseException:
            self.close()
            raise

    # From any thread.

    @property
    def version(self) -> int:
        return self._streams.version

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests; raises `EngineDied`, or `RuntimeError` while it or its weights sleep."""
        with self._loop.changed:
            self._loop.require_alive()
            if self._asleep or self._stale:
                asleep = f"{', '.join(sorted(self._asleep))} sleep"
                what = asleep if self._asleep else "its weights slept, or its adapters are missing"
                raise RuntimeError(f"{self._name} can't take requests: {what}; wake it and update its weights first")
            self._streams.add(requests)

    def poll(self, budget: float) -> list[Completion]:
        return self._streams.poll(budget)

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Abort requests; works on a dead engine too, as long as it isn't closed.

        One that ends by itself at this very moment isn't returned here but by `poll`.
        """
        ids = list(request_ids)
        if self._loop.closed:
            return []
        return self._loop.call(self._streams.abort(ids), f"for {self._name} to abort {len(ids)} requests")

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Read `weights` in the caller's thread. A `ValueError` leaves a dead engine: it would be half updated."""
        self._load(version, weights, self._backend.load)

    def _load(
        self, version: int, weights: Iterable[tuple[str, Tensor]], load: Loader, *, lacks_adapters: bool = False
    ) -> None:
        self._loop.require_alive()
        feed = WeightFeed(weights, self._loop.thread.loop)
        future = self._loop.thread.submit(self._update(version, feed, load, lacks_adapters=lacks_adapters))
        feed.serve(future)
        self._loop.result(future, f"for {self._name} to load weights of version {version}")

    def take_counters(self) -> EngineCounters:
        counters, self._counters = self._counters, EngineCounters()
        return counters

    def sleep(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> int:
        return self._loop.call(self._sleep(tuple(parts)), f"for {self._name} to free {', '.join(parts)}")

    def wake(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> None:
        self._loop.call(self._wake(tuple(parts)), f"for {self._name} to bring back {', '.join(parts)}")

    def close(self) -> None:
        """Close within about a minute."""
        with self._loop.changed:
            if self._loop.closed:
                return
            self._loop.closed = True
            self._loop.changed.notify_all()
        atexit.unregister(self.close)
        ending = self._loop.thread.submit(self._end())
        try:
            ending.result(_CLOSE_TIMEOUT)
        except (Exception, FutureTimeout) as error:  # noqa: BLE001 - what doesn't end by itself is killed
            logger.warning("%s didn't end by itself (%s: %s); killing it", self._name, type(error).__name__, error)
        self._backend.kill()
        self._loop.thread.stop(timeout=5.0)

    # On the loop.

    async def _start(self) -> None:
        """Start the backend and watch over its health."""
        try:
            await self._backend.start()
        except Exception as error:
            self._loop.die(error)
            if isinstance(error, ValueError):
                raise  # an option that the engine refuses: starting again wouldn't help
            raise EngineDied(f"{self._name} didn't start: {type(error).__name__}: {error}") from error
        self._streams.gate.set()
        self._watch_task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self._loop.dead.is_set():
            try:
                await asyncio.wait_for(self._backend.health(), _HEALTH_TIMEOUT)
            except Exception as error:  # noqa: BLE001 - reported by whatever is called next
                self._loop.die(error)
            await asyncio.sleep(_HEALTH_EVERY)

    async def _update(self, version: int, weights: WeightStream, load: Loader, *, lacks_adapters: bool) -> None:
        """Interrupt all responses, load, and let them go on with the new weights."""
        async with self._changing:
            self._loop.require_alive()
            if "weights" in self._asleep:
                raise RuntimeError(f"{self._name} can't load weights while they sleep; wake them first")
            self._streams.gate.clear()
            responses = self._streams.all()
            with self._loop.deadly():
                await self._loop.exclusive(self._streams.interrupt(responses), "its requests to stop for new weights")
                await self._loop.exclusive(load(version, weights), f"weights of version {version}")
            self._streams.version = version
            self._stale = lacks_adapters
            if lacks_adapters:
                return  # requests wait for them
            for response in responses:
                if response.tokens and self._streams.responses.get(response.request.id) is response:
                    self._counters.count(response.restart() if self._partial_rollout == "restart" else None)
            self._open()

    async def _sleep(self, parts: Sequence[EnginePart]) -> int:
        """Close the gate and free those of these parts that are awake; bytes freed."""
        async with self._changing:
            with self._loop.changed:
                if self._streams.responses:
                    under_way = len(self._streams.responses)
                    raise RuntimeError(f"{self._name} can't sleep: {under_way} requests are on their way")
                parts = [part for part in parts if part not in self._asleep]  # engines can't free memory twice
                self._asleep.update(parts)
            self._streams.gate.clear()
            self._stale = self._stale or "weights" in parts
            if not parts:
                return 0
            with self._loop.deadly():
                return await self._loop.exclusive(self._backend.sleep(parts), f"freeing {', '.join(parts)}")

    async def _wake(self, parts: Sequence[EnginePart]) -> None:
        """Bring back those of these parts that sleep."""
        async with self._changing:
            parts = [part for part in parts if part in self._asleep]
            if not parts:
                return
            with self._loop.deadly():
                await self._loop.exclusive(self._backend.wake(parts), f"bringing back {', '.join(parts)}")
            self._asleep.difference_update(parts)
            self._open()

    def _open(self) -> None:
        if not self._asleep and not self._stale and not self._loop.dead.is_set():
            self._streams.gate.set()

    async def _end(self) -> None:
        self._streams.cancel_all()
        if self._watch_task is not None:
            self._watch_task.cancel()
        await self._backend.shutdown()


def started(
    kind: type[AsyncEngine], backend: EngineBackend, rules: ResponseRules, settings: EngineSettings, name: str
) -> AsyncEngine:
    """Return an engine of the run, started; messages call it by `name` and its device slots."""
    where = f" on slot {', '.join(map(str, settings.slots))}" if settings.slots else ""
    return kind(backend, rules, partial_rollout=settings.partial_rollout, name=name + where)
