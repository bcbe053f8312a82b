"""What engines that compute on their own (vLLM, SGLang) have in common.

Callers' threads `submit` requests and `poll` finished responses. One daemon thread runs the event loop that owns the
engine (`engine_loop.py`): every response has a task there, which draws tokens from the backend's stream.
"""

from __future__ import annotations

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
    EnginePart,
    EngineSettings,
    InferEngine,
    Request,
)
from roll.strategies.engine_backend import EngineBackend
from roll.strategies.engine_loop import EngineLoop
from roll.strategies.loop_thread import WeightFeed
from roll.strategies.stopping import ResponseRules

logger = logging.getLogger(__name__)

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
        self._name = name
        self._loop = EngineLoop(backend, rules, partial_rollout=partial_rollout, name=name, timeout=timeout)
        atexit.register(self.close)
        try:
            self._loop.run(self._loop.start(), f"to start {name}", start_timeout)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        return self._loop.version

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises `EngineDied`; `RuntimeError` while it sleeps, or if its weights did and were not updated since."""
        loop = self._loop
        with loop.changed:
            loop.require_alive()
            if loop.asleep or loop.stale:
                slept = "its weights slept, or its adapters are missing"
                what = f"{', '.join(sorted(loop.asleep))} sleep" if loop.asleep else slept
                raise RuntimeError(f"{self._name} can't take requests: {what}; wake it and update its weights first")
            known = set(loop.responses)
            for request in requests:
                self._rules.check(request, known)
                self._backend.check(request)
                known.add(request.id)
            for request in requests:
                loop.responses[request.id] = None
            loop.thread.post(loop.start_responses, list(requests))

    def poll(self, budget: float) -> list[Completion]:
        loop = self._loop
        with loop.changed:
            loop.changed.wait_for(lambda: loop.finished or loop.cause or loop.closed, timeout=max(0.0, budget))
            finished, loop.finished = loop.finished, []
            if not finished:
                loop.require_alive()
            return finished

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Works on a dead engine too, as long as it isn't closed.

        One that ends by itself at this very moment isn't returned here but by `poll`.
        """
        ids = list(request_ids)
        if self._loop.closed:
            return []
        return self._loop.run(self._loop.abort(ids), f"for {self._name} to abort {len(ids)} requests")

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """`weights` is read in the caller's thread. A `ValueError` leaves a dead engine: it would be half new."""
        self._load(version, weights, adapters=False)

    def update_adapters(self, version: int, adapters: Iterable[tuple[str, Tensor]]) -> None:
        if not self._backend.takes_adapters:
            raise NotImplementedError(f"{self._name} was started for merged weights")
        self._load(version, adapters, adapters=True)

    def _load(self, version: int, weights: Iterable[tuple[str, Tensor]], *, adapters: bool) -> None:
        self._loop.require_alive()
        feed = WeightFeed(weights, self._loop.thread.loop)
        future = self._loop.thread.submit(self._loop.update(version, feed, adapters=adapters))
        feed.serve(future)
        self._loop.result(future, f"for {self._name} to load weights of version {version}")

    def take_counters(self) -> EngineCounters:
        counters, self._loop.counters = self._loop.counters, EngineCounters()
        return counters

    def sleep(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> int:
        return self._loop.run(self._loop.sleep(tuple(parts)), f"for {self._name} to free {', '.join(parts)}")

    def wake(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> None:
        self._loop.run(self._loop.wake(tuple(parts)), f"for {self._name} to bring back {', '.join(parts)}")

    def close(self) -> None:
        """Takes at most about a minute."""
        with self._loop.changed:
            if self._loop.closed:
                return
            self._loop.closed = True
            self._loop.changed.notify_all()
        atexit.unregister(self.close)
        ending = self._loop.thread.submit(self._loop.end())
        try:
            ending.result(_CLOSE_TIMEOUT)
        except (Exception, FutureTimeout) as error:  # noqa: BLE001 - what doesn't end by itself is killed
            logger.warning("%s didn't end by itself (%s: %s); killing it", self._name, type(error).__name__, error)
        self._backend.kill()
        self._loop.thread.stop(timeout=5.0)


def started(backend: EngineBackend, rules: ResponseRules, settings: EngineSettings, name: str) -> AsyncEngine:
    """Return an engine of the run, started; messages call it by `name` and its device slots."""
    where = f" on slot {', '.join(map(str, settings.slots))}" if settings.slots else ""
    return AsyncEngine(backend, rules, partial_rollout=settings.partial_rollout, name=name + where)
