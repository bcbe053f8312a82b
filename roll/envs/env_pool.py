"""Environments in killable processes, thousands at once: what one does costs its episode, not the run.

`reset`, `step` and `close` may be called from any event loop. They hand their request to the thread of the pool
(`env_pool_state.py`). What was asked in one tick goes to a process in one write, is answered in order, and comes back
in one call per waiting event loop.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from roll.envs.base import Observation, StepResult
from roll.envs.env_pool_state import EnvFailed, EnvPoolState, PendingCall, PooledEpisode
from roll.envs.env_registry import EnvSpec
from roll.envs.messages import unpack_observation, unpack_step
from roll.processes.process_pool import require_at_least

__all__ = ["EnvFailed", "EnvPool"]

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
        if max_envs_per_process is not None:
            require_at_least("environment", 1, max_envs_per_process=max_envs_per_process)
        self._specs = dict(specs)
        self._state = EnvPoolState(
            self._specs,
            num_processes=num_processes,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            max_envs_per_process=max_envs_per_process,
            memory_limit_mb=memory_limit_mb,
        )
        self._episodes: dict[str, PooledEpisode] = {}
        self._state.start()

    def wait_ready(self) -> None:
        """Wait until every process has loaded the environments; raises `EnvLoadError` naming what is wrong."""
        self._state.wait_ready()

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
            self._state.post(lambda: self._state.open(opened))
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
        self._state.post(lambda: self._state.step(opened, pending))
        return unpack_step(await pending.future)

    async def close(self, episode: str) -> None:
        """End an episode; a call of it that is under way fails. The environment is closed as soon as its process comes
        to it, which isn't waited for. Harmless when it isn't open.
        """
        opened = self._episodes.pop(episode, None)
        if opened is not None and not self._state.ended_because:
            self._state.post(lambda: self._state.close(opened))

    def counters(self) -> dict[str, int]:
        """Totals so far: `episodes` begun, `steps` answered; processes that ended or were killed and were started again
        (`restarts`), calls or starts that took too long (`timeouts`), episodes rebuilt (`replayed`), processes
        replaced for their memory (`recycled`).
        """
        return {name: self._state.counters[name] for name in COUNTERS}

    def shutdown(self) -> None:
        """Kill the processes; calls under way fail. Harmless when repeated."""
        self._state.shutdown("the environment pool was shut down")

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
