"""Environments in killable processes, thousands at once: what one does costs its episode, not the run.

`reset`, `step` and `close` may be called from any event loop. They hand their request to the thread of the pool, where
everything below the line runs, so nothing needs a lock. An episode waits until a process has room; answers go into its
history and on to whoever waits. What was asked in one tick goes to a process in one write, is answered in order, and
comes back in one call per waiting event loop. When a process ends, the episode whose call was under way fails, and the
others are rebuilt in its successor: same seed, options and responses, and the last result must be as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.envs.base import Observation, StepResult
from roll.envs.env_messages import Packed, difference, is_over, is_packed, unpack_observation, unpack_step
from roll.envs.env_registry import EnvLoadError
from roll.envs.wrappers import EnvSpec
from roll.isolation.processes.process_pool import ProcessPool
from roll.isolation.processes.worker_process import Call, WorkerExit, WorkerProcess
from roll.types.trajectory import EpisodeError, Status

logger = logging.getLogger(__name__)

_REBUILDS = 3  # Times that an episode is rebuilt after ends that were no episode's doing
_MAX_NAMES_SHOWN = 5


@dataclass(slots=True, eq=False)
class PendingCall:
    """Whoever waits for a call, in the event loop of the future."""

    future: asyncio.Future[Packed]
    response: str | None  # None: it waits for the reset


@dataclass(slots=True, eq=False)
class PooledEpisode:
    """One episode: what was played, so that it can be played again, and what is being asked now."""

    name: str
    spec: EnvSpec
    seed: int
    options: bytes
    instance: int = -1
    responses: list[str] = field(default_factory=list)
    last: Packed | None = None  # What the last answered call gave. None: the reset hasn't been answered.
    pending: PendingCall | None = None
    process: EnvProcess | None = None
    replaying: bool = False
    rebuilds: int = 0
    failure: EpisodeError | None = None
    closed: bool = False
    queued_at: float = 0.0

    def __str__(self) -> str:
        return f"{self.spec.env_type} (tag {self.spec.tag!r}, episode {self.name!r}, seed {self.seed})"

    @property
    def doing(self) -> str:
        """Return what its process is asked for."""
        if self.replaying:
            return f"the replay of {len(self.responses)} responses"
        return "reset" if self.last is None else f"step {len(self.responses) + 1}"


EnvProcess = WorkerProcess[PooledEpisode]


class EnvPool(ProcessPool[PooledEpisode]):
    """Plays episodes in processes. Thread-safe; shut it down, or use it in a `with` block.

    The pool adds no randomness: an episode depends on its seed, options and responses alone, not on how many processes
    there are or what else they play. An environment must be deterministic in the same sense, since the episodes of a
    process that ends are played again in another.
    """

    name, handler, what = "environment", "roll.envs.env_worker:EnvHandler", "the environments"
    counted = ("episodes", "steps", "restarts", "timeouts", "replayed", "recycled", "discarded")
    """`episodes` begun, `steps` answered; processes that ended or were killed and were started again (`restarts`),
    calls or starts that took too long (`timeouts`), episodes rebuilt (`replayed`), processes replaced for their memory
    (`recycled`), packets and answers that nobody had asked for (`discarded`)."""

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
        """Start the processes without waiting for them (see `wait_ready`), under the `python` that all specs have.

        Args:
            num_processes: how many calls run at once.
            timeout_s: seconds of one `reset` or `step`; beyond, the process is killed.
            start_timeout_s: seconds a process may take to import the environments.
            max_envs_per_process: episodes that live in a process at once, others wait; null: no limit.
            memory_limit_mb: a process that is found above this when an episode ends gets no further ones: a successor
                does, and it is ended after its last one. There are two processes meanwhile, never more.
        """
        self._specs = dict(specs)
        (python,) = {spec.python for spec in specs.values()} or {None}
        self._memory_limit_mb = memory_limit_mb
        self._episodes: dict[str, PooledEpisode] = {}
        self._instances = itertools.count(1)
        self._warned_at = 0.0
        self._outcomes: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Packed], Packed | Exception]]] = {}
        super().__init__(
            self._specs,
            num_processes=num_processes,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            max_assigned=math.inf if max_envs_per_process is None else max_envs_per_process,
            python=python,
        )

    async def reset(self, episode: str, tag: str, seed: int, options: Mapping[str, Any]) -> Observation:
        """Begin an episode; waits until a process has room for it.

        Args:
            episode: a name of the caller's, that no open episode has.
            options: further arguments of `Env.reset`, which can be pickled.
        """
        if tag not in self._specs:
            raise ValueError(f"no environment with tag {tag!r} (episode {episode!r}); known: {sorted(self._specs)}")
        packed = pickle.dumps(dict(options))
        pending = PendingCall(asyncio.get_running_loop().create_future(), None)
        opened = PooledEpisode(episode, self._specs[tag], seed, packed, pending=pending)
        if self._episodes.setdefault(episode, opened) is not opened:
            raise ValueError(f"episode {episode!r} is open; close it before it starts over")
        try:
            self.post(lambda: self._open(opened), with_tick=True)
        except RuntimeError:
            del self._episodes[episode]
            raise
        return unpack_observation(await pending.future)

    async def step(self, episode: str, response: str) -> StepResult:
        """Give a response to an episode's environment."""
        opened = self._episodes.get(episode)
        if opened is None:
            raise ValueError(f"episode {episode!r} isn't open: step comes after reset and before close")
        pending = PendingCall(asyncio.get_running_loop().create_future(), response)
        self.post(lambda: self._step(opened, pending), with_tick=True)
        return unpack_step(await pending.future)

    async def close(self, episode: str) -> None:
        """End an episode; a call of it that is under way fails. The environment is closed as soon as its process comes
        to it, which isn't waited for. Harmless when it isn't open."""
        opened = self._episodes.pop(episode, None)
        if opened is not None and not self.ended_because:
            self.post(lambda: self._drop(opened), with_tick=True)

    # --- in the pool's thread ----------------------------------------------------------

    def _open(self, episode: PooledEpisode) -> None:
        """Begin an episode as soon as a process has room for it."""
        self.counters["episodes"] += 1
        episode.instance = next(self._instances)
        episode.queued_at = time.monotonic()
        self.enqueue(episode)

    def _step(self, episode: PooledEpisode, pending: PendingCall) -> None:
        """Ask for a step; after the replay, if one is under way."""
        if episode.failure is not None:
            self._tell(pending, EpisodeError(episode.failure.status, str(episode.failure)))
        elif episode.pending is not None:
            self._tell(pending, RuntimeError(f"{episode}: a step was asked for during {episode.doing}"))
        else:
            episode.pending = pending
            if episode.process is None:
                self._fail(episode, "env_error", "a step was asked for after the end of the episode")
            elif not episode.replaying:
                self._ask(episode, "step", pending.response)

    def _drop(self, episode: PooledEpisode) -> None:
        """Drop an episode, whatever it is doing."""
        episode.closed = True
        if episode.pending is not None:
            reason = "during " + episode.doing if episode.process else "while it waited for a place in a process"
            self._tell(episode.pending, EpisodeError("env_error", f"{episode} was closed {reason}"))
        self._release(episode)

    # --- what becomes of processes ----------------------------------------------------

    def _load_error(self, reason: str) -> Exception:
        under = "" if self.python is None else f" under {self.python} (env_workers.python)"
        return EnvLoadError(f"environments can't be played{under}: {reason}")

    def _unfit(self, process: EnvProcess) -> str:
        if process.resident_mb <= self._memory_limit_mb:
            return ""
        return (
            f"memory_limit_mb: got {self._memory_limit_mb:g}, but a process takes {process.resident_mb:.0f} MB before "
            "it has played anything; raise it"
        )

    def answered(self, process: EnvProcess, call: Call, answer: tuple[Any, ...]) -> None:
        kind, episode = call.arguments[0], process.assigned.get(call.key)
        if kind != "close" and answer[0] == "ok" and len(answer) == 2:  # as almost always; `match` takes longer
            if not is_packed(answer[1], step=kind == "step" or bool(call.arguments[-1])):
                process.refuse(f"it gave no result of {call.doing}", call)
            elif episode is not None:  # else it was closed meanwhile
                self._accept(episode, answer[1])
            return
        match answer:
            case ("closed", float(resident_mb), str(error)) if kind == "close":
                self._closed(process, resident_mb, error)
            case ("error", str(error)) if kind != "close":
                if episode is not None:
                    if episode.replaying:
                        error = (
                            f"it is not deterministic: no call failed the first time, but in {episode.doing}: {error}"
                        )
                    self._fail(episode, "env_error", error)
            case _:
                process.refuse(f"it gave no result of {call.doing}", call)

    def _closed(self, process: EnvProcess, resident_mb: float, error: str) -> None:
        """Recycle the process if it has become too large. Its other episodes are played to their end: they may be
        waiting for each other."""
        if error:
            logger.warning("closing an environment failed: %s", error)
        process.resident_mb = resident_mb
        if resident_mb > self._memory_limit_mb:
            logger.info("an environment process takes %.0f MB and is replaced", resident_mb)
            self.retire(process)
        else:
            self.end_if_unused(process)

    def _lost(self, items: Sequence[PooledEpisode], ended: WorkerExit, successor: EnvProcess | None) -> None:
        """Fail the episode whose call it was; the others move to the successor."""
        running = ended.running.key if ended.running is not None else None
        whose = next((episode for episode in items if episode.instance == running), None)
        logger.warning("an environment process is gone: %s%s", f"{whose}: " if whose else "", ended.reason)
        status: Status = "timeout" if ended.status == "timeout" else "env_error"
        idle_end = running is None and ended.was_ready
        for episode in items:
            episode.process = None
            if successor is None or episode is whose:
                self._fail(episode, status, ended.reason)
            elif idle_end and episode.rebuilds >= _REBUILDS:
                self._fail(episode, status, f"{ended.reason}; that was the {_REBUILDS + 1}th time")
            else:
                episode.rebuilds += idle_end
                self._begin(successor, episode)

    def _watch_queue(self) -> None:
        """Warn when the first episode in the queue has waited long."""
        now, patience = time.monotonic(), self.start_timeout_s + self.timeout_s
        first = next((episode for episode in self._queue if not episode.closed), None)
        if first is not None and now - max(first.queued_at, self._warned_at) > patience:
            self._warned_at = now
            holders = [episode for process in self._alive for episode in process.assigned.values()]
            names = ", ".join(episode.name for episode in holders[:_MAX_NAMES_SHOWN])
            more = ", ..." if len(holders) > _MAX_NAMES_SHOWN else ""
            logger.warning(
                "%s has waited %.0f s for a place in a process; they are held by %d episodes: %s%s",
                *(first, now - first.queued_at, len(holders), names, more),
            )

    # --- episodes ---------------------------------------------------------------------

    def _begin(self, process: EnvProcess, episode: PooledEpisode) -> None:
        """Begin the episode in this process, or play it again up to where it was."""
        if episode.closed:
            return
        if episode.last is not None:
            if is_over(episode.last):
                if episode.pending is not None:
                    self._fail(episode, "env_error", "a step was asked for after the end of the episode")
                return  # nothing will be asked of it
            episode.replaying = True
            self.counters["replayed"] += 1
        episode.process = process
        process.assigned[episode.instance] = episode
        self._ask(episode, "open", episode.spec.tag, episode.seed, episode.options, tuple(episode.responses))

    def _ask(self, episode: PooledEpisode, kind: Literal["open", "step"], *arguments: Any) -> None:
        assert episode.process is not None, episode
        call = Call(episode.instance, (kind, episode.instance, *arguments), episode.doing)
        call.parts = len(episode.responses) + 2  # a replay has a clock for each of its steps
        episode.process.send(call)

    def _accept(self, episode: PooledEpisode, result: Packed) -> None:
        """Note what a call gave, and hand it on."""
        if episode.replaying:
            assert episode.last is not None, episode
            differs = difference(episode.last, result)
            if differs:
                reason = f"it is not deterministic: seed and responses were the same, but the last gave {differs}"
                self._fail(episode, "env_error", reason)
                return
            episode.replaying = False
            if episode.pending is not None:
                self._ask(episode, "step", episode.pending.response)
            return
        pending, episode.pending = episode.pending, None
        assert pending is not None, episode
        if pending.response is not None:
            episode.responses.append(pending.response)
            self.counters["steps"] += 1
        episode.last = result
        self._tell(pending, result)

    def _abandon(self, item: PooledEpisode, reason: str) -> None:
        if item.pending is not None:
            self._tell(item.pending, EpisodeError("env_error", f"{item}: {reason}"))
            item.pending = None
        self._deliver()

    def _fail(self, episode: PooledEpisode, status: Status, reason: str) -> None:
        episode.failure = EpisodeError(status, f"{episode}: {reason}")
        if episode.pending is not None:
            self._tell(episode.pending, episode.failure)
        self._release(episode)

    def _release(self, episode: PooledEpisode) -> None:
        """Free its place."""
        process, episode.process, episode.pending = episode.process, None, None
        if process is not None:
            process.send(Call(episode.instance, ("close", episode.instance), f"close of {episode}"))
            del process.assigned[episode.instance]
        if self._queue:
            self._loop.call_soon(self.assign_queued)

    # --- whoever waits ----------------------------------------------------------------

    def _tell(self, pending: PendingCall, outcome: Packed | Exception) -> None:
        if not self._outcomes:
            self._loop.call_soon(self._deliver)
        self._outcomes.setdefault(pending.future.get_loop(), []).append((pending.future, outcome))

    def _deliver(self) -> None:
        """Wake every event loop once, for all that has come."""
        outcomes, self._outcomes = self._outcomes, {}
        for loop, pairs in outcomes.items():
            with contextlib.suppress(RuntimeError):  # it was closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, pairs)


def _resolve(pairs: list[tuple[asyncio.Future[Packed], Packed | Exception]]) -> None:
    for future, outcome in pairs:
        if future.done():
            continue  # cancelled
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
