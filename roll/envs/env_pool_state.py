"""Which episode lives in which process, and what becomes of it when the process ends. The inside of `EnvPool`.

Everything here runs in the thread of the pool's event loop, so nothing needs a lock. Dataflow: `reset` queues an
episode; `_place` gives it to the least loaded process as soon as that has room; answers come back through `answered`,
go into the episode's history and on to whoever waits. When a process ends, the episode whose call was under way fails,
and the others are rebuilt in its successor: same seed, options and responses, and the last result must be as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.envs.env_process import Call, Ended, EnvProcess
from roll.envs.env_registry import EnvLoadError, EnvSpec
from roll.envs.messages import Packed, difference, is_over

logger = logging.getLogger(__name__)

_STARTS = 3
"""Times that a process is started before its episodes fail."""
_REBUILDS = 3
"""Times that an episode is rebuilt after ends that were no episode's doing."""
_MAX_NAMES_SHOWN = 5


class EnvFailed(RuntimeError):
    """An episode's environment failed; no reward can be given. `status` says how, the message whose and why."""

    def __init__(self, status: Literal["env_error", "timeout"], message: str) -> None:
        super().__init__(message)
        self.status: Literal["env_error", "timeout"] = status


@dataclass(frozen=True, slots=True)
class PendingCall:
    """Whoever waits for a call, in an event loop of their own."""

    future: asyncio.Future[Packed]
    loop: asyncio.AbstractEventLoop
    response: str | None
    """None: it waits for the reset."""


@dataclass(slots=True, eq=False)
class PooledEpisode:
    """One episode: what was played, so that it can be played again, and what is being asked now."""

    name: str
    spec: EnvSpec
    seed: int
    options: bytes
    instance: int = -1
    responses: list[str] = field(default_factory=list)
    last: Packed | None = None
    """What the last answered call gave. None: the reset hasn't been answered."""
    pending: PendingCall | None = None
    process: EnvProcess | None = None
    replaying: bool = False
    rebuilds: int = 0
    failure: EnvFailed | None = None
    closed: bool = False
    queued_at: float = 0.0

    def __str__(self) -> str:
        return f"{self.spec.env_type} (tag {self.spec.tag!r}, episode {self.name!r}, seed {self.seed})"

    @property
    def doing(self) -> str:
        """What its process is asked for."""
        if self.replaying:
            return f"the replay of {len(self.responses)} responses"
        return "reset" if self.last is None else f"step {len(self.responses) + 1}"


class EnvPoolState:
    """The episodes and processes of a pool."""

    def __init__(
        self,
        specs: Mapping[str, EnvSpec],
        *,
        num_processes: int,
        timeout_s: float,
        start_timeout_s: float,
        max_envs_per_process: int | None,
        memory_limit_mb: float,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._specs = dict(specs)
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._max_envs = math.inf if max_envs_per_process is None else max_envs_per_process
        self._memory_limit_mb = memory_limit_mb
        self._period_s = min(0.25, timeout_s / 20, start_timeout_s / 20)
        self._instances = itertools.count(1)
        self._queue: deque[PooledEpisode] = deque()
        self._warned_at = 0.0
        self._processes: list[EnvProcess] = []
        self._episodes_of: dict[EnvProcess, dict[int, PooledEpisode]] = {}
        self._retired: set[EnvProcess] = set()
        self._starts = [0] * num_processes
        self.loaded: list[Future[None]] = [Future() for _ in range(num_processes)]
        self._outcomes: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Packed], Packed | Exception]]] = {}

    # --- what the pool asks for -------------------------------------------------------

    def start(self) -> None:
        """Start the processes and look after them from now on."""
        self._loop = asyncio.get_running_loop()
        for index in range(len(self._starts)):
            self._processes.append(self._new_process(index))
        self._watch()

    def reset(self, episode: PooledEpisode) -> None:
        """Begin an episode as soon as a process has room for it."""
        self.counters["episodes"] += 1
        episode.instance = next(self._instances)
        episode.queued_at = time.monotonic()
        self._queue.append(episode)
        self._place()

    def step(self, episode: PooledEpisode, pending: PendingCall) -> None:
        """Ask for a step; after the replay, if one is under way."""
        if episode.failure is not None:
            self._tell(pending, EnvFailed(episode.failure.status, str(episode.failure)))
        elif episode.pending is not None:
            self._tell(pending, RuntimeError(f"{episode}: a step was asked for during {episode.doing}"))
        else:
            episode.pending = pending
            if episode.process is None:
                self._fail(episode, "env_error", "a step was asked for after the end of the episode")
            elif not episode.replaying:
                self._ask(episode, "step", pending.response)

    def close(self, episode: PooledEpisode) -> None:
        """Drop an episode, whatever it is doing."""
        episode.closed = True
        if episode.pending is not None:
            reason = "during " + episode.doing if episode.process else "while it waited for a place in a process"
            self._tell(episode.pending, EnvFailed("env_error", f"{episode} was closed {reason}"))
        self._release(episode)

    def stop(self, reason: str, episodes: Iterable[PooledEpisode]) -> None:
        """End everything."""
        for episode in episodes:
            if episode.pending is not None:
                self._tell(episode.pending, EnvFailed("env_error", f"{episode}: {reason}"))
                episode.pending = None
        for process in self._episodes_of:
            process.kill()
        for loaded in self.loaded:
            if not loaded.done():
                loaded.set_exception(RuntimeError(reason))
        self._deliver()

    # --- what processes say -----------------------------------------------------------

    def ready(self, process: EnvProcess) -> None:
        """It can play."""
        self._starts[process.index] = 0
        loaded = self.loaded[process.index]
        if loaded.done():
            return
        if process.resident_mb > self._memory_limit_mb:
            loaded.set_exception(
                EnvLoadError(
                    f"memory_limit_mb: got {self._memory_limit_mb:g}, but a process takes {process.resident_mb:.0f} MB "
                    "before it has played anything; raise it"
                )
            )
        else:
            loaded.set_result(None)

    def answered(self, process: EnvProcess, call: Call, answer: tuple[Any, ...]) -> None:
        """A call has come back."""
        if answer[0] == "closed":
            if answer[2]:
                logger.warning("closing an environment failed: %s", answer[2])
            self._recycle_if_over_memory(process)
            return
        episode = self._episodes_of[process].get(call.instance)
        if episode is None:
            return  # closed meanwhile
        if answer[0] == "ok":
            self._accept(episode, answer[1])
        elif episode.replaying:
            reason = f"it is not deterministic: no call failed the first time, but in {episode.doing}: {answer[1]}"
            self._fail(episode, "env_error", reason)
        else:
            self._fail(episode, "env_error", answer[1])

    def ended(self, process: EnvProcess, ended: Ended) -> None:
        """It is gone: the episode whose call it was fails, the others move to its successor."""
        lives = self._episodes_of.pop(process)
        was_retired = process in self._retired
        self._retired.discard(process)
        self.counters["timeouts"] += ended.status == "timeout"
        whose = lives.get(ended.running.instance) if ended.running is not None else None
        logger.warning("an environment process is gone: %s%s", f"{whose}: " if whose else "", ended.reason)
        if not process.is_ready:
            self._starts[process.index] += 1
            if ended.load_error or self._starts[process.index] >= _STARTS:
                self._give_up(process, ended, lives)
                return
        self.counters["restarts"] += 1
        successor = self._new_process(process.index)
        if was_retired:
            self._retired.add(successor)
        else:
            self._processes[process.index] = successor
        for episode in lives.values():
            episode.process = None
            if ended.running is not None and episode.instance == ended.running.instance:
                self._fail(episode, ended.status, ended.reason)
            elif ended.running is None and process.is_ready and episode.rebuilds >= _REBUILDS:
                self._fail(episode, ended.status, f"{ended.reason}; that was the {_REBUILDS + 1}th time")
            else:
                episode.rebuilds += ended.running is None and process.is_ready
                self._rebuild(successor, episode)
        if was_retired and not self._episodes_of[successor]:
            self._retire_for_good(successor)

    # --- processes --------------------------------------------------------------------

    def _new_process(self, index: int) -> EnvProcess:
        process = EnvProcess(
            self, self._specs, index=index, timeout_s=self._timeout_s, start_timeout_s=self._start_timeout_s
        )
        self._episodes_of[process] = {}
        return process

    def _give_up(self, process: EnvProcess, ended: Ended, lives: Mapping[int, PooledEpisode]) -> None:
        """It can't be started: a later episode may try again."""
        self._starts[process.index] = 0
        loaded = self.loaded[process.index]
        if not loaded.done():
            loaded.set_exception(EnvLoadError(f"environments can't be played: {ended.reason}"))
        for episode in lives.values():
            episode.process = None
            self._fail(episode, ended.status, ended.reason)

    def _recycle_if_over_memory(self, process: EnvProcess) -> None:
        """Retire a process that has become too large: its episodes are played to their end beside a successor, which
        gets all further ones. Nobody has to wait for them, since they may be waiting for each other.
        """
        retiring = any(other.index == process.index for other in self._retired)
        if process.resident_mb > self._memory_limit_mb and not retiring:
            self._retired.add(process)
            logger.info("an environment process takes %.0f MB and is replaced", process.resident_mb)
            self._processes[process.index] = self._new_process(process.index)
            self._place()
        if process in self._retired and process.idle and not self._episodes_of[process]:
            self._retire_for_good(process)
            self.counters["recycled"] += 1

    def _retire_for_good(self, process: EnvProcess) -> None:
        self._retired.discard(process)
        del self._episodes_of[process]
        process.kill()

    def _watch(self) -> None:
        self._loop.call_later(self._period_s, self._watch)
        for process in list(self._episodes_of):
            process.check()
        now, patience = time.monotonic(), self._start_timeout_s + self._timeout_s
        first = next((episode for episode in self._queue if not episode.closed), None)
        if first is not None and now - max(first.queued_at, self._warned_at) > patience:
            self._warned_at = now
            holders = [episode for lives in self._episodes_of.values() for episode in lives.values()]
            names = ", ".join(episode.name for episode in holders[:_MAX_NAMES_SHOWN])
            more = ", ..." if len(holders) > _MAX_NAMES_SHOWN else ""
            logger.warning(
                "%s has waited %.0f s for a place in a process; they are held by %d episodes: %s%s",
                *(first, now - first.queued_at, len(holders), names, more),
            )

    # --- episodes ---------------------------------------------------------------------

    def _place(self) -> None:
        """Give queued episodes to processes, the least loaded first."""
        while self._queue:
            if self._queue[0].closed:
                self._queue.popleft()
                continue
            open_to_more = [p for p in self._processes if self._load(p) < self._max_envs]
            if not open_to_more:
                return
            process = min(open_to_more, key=lambda p: (self._load(p), p.index))
            if process.gone:  # it couldn't be started the last time
                if self.loaded[process.index].exception() is not None:
                    self.loaded[process.index] = Future()
                process = self._processes[process.index] = self._new_process(process.index)
            self._rebuild(process, self._queue.popleft())

    def _load(self, process: EnvProcess) -> int:
        return len(self._episodes_of.get(process, ()))

    def _rebuild(self, process: EnvProcess, episode: PooledEpisode) -> None:
        """Begin the episode in this process, or play it again up to where it was."""
        if episode.last is not None:
            if is_over(episode.last):
                if episode.pending is not None:
                    self._fail(episode, "env_error", "a step was asked for after the end of the episode")
                return  # nothing will be asked of it
            episode.replaying = True
            self.counters["replayed"] += 1
        episode.process = process
        self._episodes_of[process][episode.instance] = episode
        self._ask(episode, "open", episode.spec.tag, episode.seed, episode.options, tuple(episode.responses))

    def _ask(self, episode: PooledEpisode, kind: Literal["open", "step"], *arguments: Any) -> None:
        assert episode.process is not None, episode
        episode.process.send(Call(episode.instance, kind, arguments, episode.doing))

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

    def _fail(self, episode: PooledEpisode, status: Literal["env_error", "timeout"], reason: str) -> None:
        episode.failure = EnvFailed(status, f"{episode}: {reason}")
        if episode.pending is not None:
            self._tell(episode.pending, episode.failure)
        self._release(episode)

    def _release(self, episode: PooledEpisode) -> None:
        """Free its place."""
        process, episode.process, episode.pending = episode.process, None, None
        if process is not None:
            process.send(Call(episode.instance, "close", (), f"close of {episode}"))
            del self._episodes_of[process][episode.instance]
        if self._queue:
            self._loop.call_soon(self._place)

    # --- whoever waits ----------------------------------------------------------------

    def _tell(self, pending: PendingCall, outcome: Packed | Exception) -> None:
        if not self._outcomes:
            self._loop.call_soon(self._deliver)
        self._outcomes.setdefault(pending.loop, []).append((pending.future, outcome))

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
