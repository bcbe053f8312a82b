"""What engines that compute on their own (vLLM, SGLang) have in common.

Dataflow. Callers' threads: `submit` -> records; `poll` <- finished responses. One daemon thread runs the event loop
that owns the engine (`engine_loop.py`): every record has a task there, which draws tokens from the backend's stream
until the response is over.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Literal

from torch import Tensor

from roll.strategies.base import ENGINE_PARTS, Completion, EngineCounters, EnginePart, InferEngine, Request
from roll.strategies.engine_backend import EngineBackend
from roll.strategies.engine_loop import EngineLoop
from roll.strategies.loop_thread import WeightFeed
from roll.strategies.stopping import ResponseRules

logger = logging.getLogger(__name__)

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
        """Version of the weights in use; 0: those the engine started with."""
        return self._loop.version

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; a malformed one raises `ValueError` before any is queued.

        Raises:
            EngineDied: the engine is gone.
            RuntimeError: it sleeps, or its weights did and weren't updated since.
        """
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
        """Return what has finished since the last call; waits for something at most `budget` seconds.

        Raises:
            EngineDied: the engine is gone, and what finished before has been handed out.
        """
        loop = self._loop
        with loop.changed:
            loop.changed.wait_for(lambda: loop.finished or loop.cause or loop.closed, timeout=max(0.0, budget))
            finished, loop.finished = loop.finished, []
            if not finished:
                loop.require_alive()
            return finished

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Stop these; returns them with finish reason `abort`. Works on a dead engine too, as long as it isn't closed.

        One that ends by itself at this very moment isn't returned here but by `poll`.
        """
        ids = list(request_ids)
        if self._loop.closed:
            return []
        return self._loop.run(self._loop.abort(ids), f"for {self._name} to abort {len(ids)} requests")

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
        self._loop.require_alive()
        feed = WeightFeed(weights, self._loop.thread.loop)
        future = self._loop.thread.submit(self._loop.update(version, feed, adapters=adapters))
        feed.serve(future)
        self._loop.result(future, f"for {self._name} to load weights of version {version}")

    def take_counters(self) -> EngineCounters:
        """Return what weight updates did to responses on their way, since the last call."""
        counters, self._loop.counters = self._loop.counters, EngineCounters()
        return counters

    def sleep(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> int:
        """Free these parts of the device's memory until `wake`; bytes freed.

        Raises:
            RuntimeError: requests are on their way.
        """
        return self._loop.run(self._loop.sleep(tuple(parts)), f"for {self._name} to free {', '.join(parts)}")

    def wake(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> None:
        """Bring these parts back; after weights, an update must follow."""
        self._loop.run(self._loop.wake(tuple(parts)), f"for {self._name} to bring back {', '.join(parts)}")

    def close(self) -> None:
        """End the engine and its processes; takes at most about a minute. A second call does nothing."""
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
