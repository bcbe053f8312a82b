"""Environments in killable processes, thousands at once: what one does costs its episode, not the run.

Dataflow: `reset`, `step` and `close` may be called from any event loop. They hand their request to the one thread of
the pool, which has an event loop of its own with the pipes of all processes (see `env_pool_state.py`). What
was asked in one tick goes to a process in one write, is answered in order, and comes back in one call per waiting event
loop. A call's time limit counts from when the process begins with it.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import Any

from roll.envs.base import Observation, StepResult
from roll.envs.env_pool_state import EnvFailed, EnvPoolState, PendingCall, PooledEpisode
from roll.envs.env_registry import EnvSpec
from roll.envs.messages import unpack_observation, unpack_step

__all__ = ["EnvFailed", "EnvPool"]

logger = logging.getLogger(__name__)

COUNTERS = ("episodes", "steps", "restarts", "timeouts", "replayed", "recycled")


class EnvPool:
    """Plays episodes in processes. Thread-safe; shut it down, or use it in a `with` block.

    The pool adds no randomness: an episode depends on its seed, options and responses alone, not on how many processes
    there are or what else they play. An environment must be deterministic in the same sense, since the episodes of a
    process that ends are played again in another.
    """

    def __init__(
        self,
        specs: Mapping[str, EnvSpec],
        *,
        num_processes: int = 1,
        timeout_s: float = 60.0,
        start_timeout_s: float = 60.0,
        max_envs_per_process: int | None = None,
        memory_limit_mb: float = 4096,
    ) -> None:
        """Start the processes without waiting for them (see `wait_ready`).

        Args:
            specs: environments by tag.
            num_processes: how many calls run at once.
            timeout_s: seconds of one `reset` or `step`; beyond, the process is killed.
            start_timeout_s: seconds a process may take to import the environments.
            max_envs_per_process: episodes that live in a process at once, others wait; null: no limit.
            memory_limit_mb: a process that is found above this when an episode ends gets no further ones: a successor
                does, and it is ended after its last one. There are two processes meanwhile, never more.
        """
        if not specs:
            raise ValueError("an environment pool needs at least one environment")
        if num_processes < 1:
            raise ValueError(f"environment pool: num_processes must be >= 1, got {num_processes}")
        if max_envs_per_process is not None and max_envs_per_process < 1:
            raise ValueError(f"environment pool: max_envs_per_process must be >= 1, got {max_envs_per_process}")
        positive = {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s, "memory_limit_mb": memory_limit_mb}
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"environment pool: {name} must be > 0, got {value}")
        self._specs = dict(specs)
        self._patience_s = 3 * start_timeout_s + 30.0  # a process is started up to three times
        self._state = EnvPoolState(
            self._specs,
            num_processes=num_processes,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            max_envs_per_process=max_envs_per_process,
            memory_limit_mb=memory_limit_mb,
        )
        self._episodes: dict[str, PooledEpisode] = {}
        self._requests: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._woken = False
        self._ended = ""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._broken)
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()
        self._post(self._state.start)

    def wait_ready(self) -> None:
        """Wait until every process has loaded the environments; raises `EnvLoadError` naming what is wrong."""
        for loaded in list(self._state.loaded):
            try:
                loaded.result(timeout=self._patience_s)
            except FutureTimeout:
                raise TimeoutError(f"the environment processes weren't ready after {self._patience_s:g} s") from None

    async def reset(self, episode: str, tag: str, seed: int, options: Mapping[str, Any]) -> Observation:
        """Begin an episode; waits until a process has room for it.

        Args:
            episode: a name of the caller's, that no open episode has.
            tag: which environment.
            seed: what is played; see `Env.reset`.
            options: further arguments of `Env.reset`, which can be pickled.
        """
        if tag not in self._specs:
            raise ValueError(f"no environment with tag {tag!r} (episode {episode!r}); known: {sorted(self._specs)}")
        packed = pickle.dumps(dict(options))
        loop = asyncio.get_running_loop()
        pending = PendingCall(loop.create_future(), loop, None)
        opened = PooledEpisode(episode, self._specs[tag], seed, packed, pending=pending)
        if self._episodes.setdefault(episode, opened) is not opened:
            raise ValueError(f"episode {episode!r} is open; close it before it starts over")
        try:
            self._post(lambda: self._state.reset(opened))
        except RuntimeError:
            del self._episodes[episode]
            raise
        return unpack_observation(await pending.future)

    async def step(self, episode: str, response: str) -> StepResult:
        """Give a response to an episode's environment."""
        opened = self._episodes.get(episode)
        if opened is None:
            raise ValueError(f"episode {episode!r} isn't open: step comes after reset and before close")
        loop = asyncio.get_running_loop()
        pending = PendingCall(loop.create_future(), loop, response)
        self._post(lambda: self._state.step(opened, pending))
        return unpack_step(await pending.future)

    async def close(self, episode: str) -> None:
        """End an episode; a call of it that is under way fails. The environment is closed as soon as its process comes
        to it, which isn't waited for. Harmless when it isn't open.
        """
        opened = self._episodes.pop(episode, None)
        if opened is not None and not self._ended:
            self._post(lambda: self._state.close(opened))

    def counters(self) -> dict[str, int]:
        """Totals so far: `episodes` begun, `steps` answered; processes that ended or were killed and were started again
        (`restarts`), calls or starts that took too long (`timeouts`), episodes rebuilt (`replayed`), processes
        replaced for their memory (`recycled`).
        """
        return {name: self._state.counters[name] for name in COUNTERS}

    def shutdown(self) -> None:
        """Kill the processes; calls under way fail. Harmless when repeated."""
        self._end("the environment pool was shut down")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30.0)

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _post(self, request: Callable[[], None]) -> None:
        """Have something done in the pool's thread; wakes it once for all that is posted meanwhile."""
        with self._lock:
            if self._ended:
                raise RuntimeError(self._ended)
            self._requests.append(request)
            if not self._woken:
                self._woken = True
                self._loop.call_soon_threadsafe(self._serve)

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = reason
            self._loop.call_soon_threadsafe(self._stop)

    # --- in the pool's thread ---------------------------------------------------------

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _serve(self) -> None:
        self._woken = False  # before looking: what is posted from now on wakes it again
        while self._requests:
            self._requests.popleft()()

    def _stop(self) -> None:
        try:
            self._serve()  # what was asked before the end is told about it
        finally:
            self._state.stop(self._ended, self._episodes.values())
            self._loop.stop()

    def _broken(self, _: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """A bug of ours, or no further process can be started: better an end than calls that are never answered."""
        error = context.get("exception")
        logger.error("the environment pool failed: %s", context["message"], exc_info=error)
        self._end(f"the environment pool failed: {type(error).__name__}: {error}")
