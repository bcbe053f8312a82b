"""Inference engines that take simulated time instead of computing.

A model of continuous batching: every running request of an engine gets one token per decode step, and a step takes
longer the more requests run. Reading a prompt delays the engine's next step, unless a sibling's prompt is still in its
prefix cache. There is no event per token: the engine counts decode steps, a request is finished when the count reaches
the one it started at plus its length, and one heap per engine tells which is next. O(log n) per request.

    submit -> waiting -> running (at most max_running_requests) -> finished -> poll
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from benchmarks.simulation.engine_model import EngineModel, EngineUse, Lengths
from roll.strategies.base import Completion, EngineDied, Request

TOKEN = 7  # Every simulated token

_EPSILON = 1e-6  # Decode steps; hides rounding in the sum of many intervals

_INSTANT = 1e-7  # Seconds; what ends within it ends now. More than the loop's clock can lose to rounding.


@dataclass(eq=False, slots=True)
class _Running:
    request: Request
    length: int
    """Tokens it will have."""
    capped: bool
    """The limit ends it, not a stop token."""
    start: float = 0.0
    """The engine's step count when its first step began; less by what it had already, when it goes on after a death."""


@dataclass(eq=False)
class _SimulatedEngine:
    """One engine; computes only when looked at, up to the time that it is told."""

    model: EngineModel
    lengths: Lengths
    resume: bool
    at: float = 0.0
    """Simulated seconds up to which this state holds."""
    stalled_until: float = 0.0
    """No decode steps before: a prefill, or new weights."""
    steps: float = 0.0
    """Decode steps since the engine began: its own clock."""
    version: int = 0
    use: EngineUse = field(default_factory=EngineUse)
    dead: bool = False
    running: dict[str, _Running] = field(default_factory=dict)
    waiting: deque[str] = field(default_factory=deque)
    submitted: dict[str, _Running] = field(default_factory=dict)
    """Running and waiting."""
    finished: list[Completion] = field(default_factory=list)
    ends: list[tuple[float, int, str]] = field(default_factory=list)
    """Heap of (step count at which it is finished, arrival, request id); entries of aborted requests are skipped."""
    arrivals: int = 0
    cached: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    """Tokens read under the present weights: of a group's prompt, or of an episode's turns so far."""
    updates: list[tuple[float, int]] = field(default_factory=lambda: [(-1.0, 0)])
    """(step count, version) of every change of weights."""

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.id in self.submitted:
                raise ValueError(f"request {request.id!r} was submitted twice")
            wanted, limit = self.lengths(request), request.params.max_new_tokens
            self.submitted[request.id] = _Running(request, min(wanted, limit), wanted > limit)
            self.waiting.append(request.id)
        self.use.most_submitted = max(self.use.most_submitted, len(self.submitted))
        self._admit()

    def advance(self, now: float) -> None:
        while (ends := self.next_end()) is not None and ends <= now + _INSTANT:
            self._pass(min(ends, now))
            self.steps = max(self.steps, self.ends[0][0])
            while self.ends and self.ends[0][0] <= self.steps + _EPSILON:
                _, _, request_id = heapq.heappop(self.ends)
                entry = self.running.pop(request_id, None)
                if entry is not None:
                    del self.submitted[request_id]
                    self.finished.append(self._completion(entry, entry.length, "length" if entry.capped else "stop"))
                    self._remember(entry)
            self._admit()
        self._pass(now)

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        stopped = []
        for request_id in request_ids:
            entry = self.submitted.pop(request_id, None)
            if entry is None:
                continue
            ran = self.running.pop(request_id, None) is not None
            stopped.append(self._completion(entry, self._sampled(entry) if ran else 0, "abort"))
        self._admit()
        return stopped

    def update(self, version: int, seconds: float) -> None:
        """Stand still for `seconds`, then go on with these weights."""
        self.stalled_until = max(self.stalled_until, self.at) + seconds
        self.version = version
        self.updates.append((self.steps, version))
        self.cached.clear()
        if not self.resume:
            self.ends.clear()
            for entry in self.running.values():
                self.use.thrown_away += self._sampled(entry)
                self._start(entry)
        for entry in self.running.values():  # read again what they have under the new weights
            self._read(entry.request, self._sampled(entry))

    def die(self) -> None:
        self.use.thrown_away += sum(self._sampled(entry) for entry in self.running.values())
        self.use.thrown_away += sum(completion.num_tokens for completion in self.finished)
        self.dead = True
        for state in (self.running, self.waiting, self.submitted, self.finished, self.ends, self.cached):
            state.clear()

    def take(self) -> list[Completion]:
        finished, self.finished = self.finished, []
        return finished

    def next_end(self) -> float | None:
        """Return when the next response will be finished if nothing else happens; None when nothing runs."""
        while self.ends and self.ends[0][2] not in self.running:
            heapq.heappop(self.ends)
        if not self.ends:
            return None
        left = max(0.0, self.ends[0][0] - self.steps)
        return max(self.at, self.stalled_until) + left / self.model.steps_per_second(len(self.running))

    def _pass(self, now: float) -> None:
        """Let time pass in which nothing begins or ends."""
        if now <= self.at:
            return
        running = len(self.running)
        self.use.busy_request_seconds += running * (now - self.at)
        if running:
            self.steps += max(0.0, now - max(self.at, self.stalled_until)) * self.model.steps_per_second(running)
        self.at = now

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.model.max_running_requests:
            request_id = self.waiting.popleft()
            entry = self.submitted.get(request_id)
            if entry is None:
                continue  # aborted while it waited
            self.running[request_id] = entry
            self._start(entry)
            self._read(entry.request, 0)
        self.use.most_running = max(self.use.most_running, len(self.running))

    def _start(self, entry: _Running) -> None:
        entry.start = self.steps
        self.arrivals += 1
        heapq.heappush(self.ends, (self.steps + entry.length, self.arrivals, entry.request.id))

    def _read(self, request: Request, sampled: int) -> None:
        """Delay the next step by the time that reading prompt and sampled tokens takes."""
        prompt, known = len(request.prompt_ids), 0
        if request.affinity:
            key = (request.affinity, request.order[:-1] if request.order[-1:] != (0,) else ())
            known = min(prompt, self.cached.get(key, 0))
            self.cached[key] = max(prompt, known)
        unread = prompt - known + sampled
        self.use.cached_tokens += known
        self.use.prefill_tokens += unread
        self.stalled_until = max(self.stalled_until, self.at) + unread / self.model.prefill_tokens_per_second

    def _remember(self, entry: _Running) -> None:
        """Cache this turn: the episode's next turn begins with it."""
        request = entry.request
        if request.affinity and len(request.order) > 1:
            self.cached[request.affinity, request.order[:-1]] = len(request.prompt_ids) + entry.length

    def _sampled(self, entry: _Running) -> int:
        return max(0, min(entry.length, int(self.steps - entry.start + _EPSILON)))

    def _completion(self, entry: _Running, tokens: int, reason: str) -> Completion:
        self.use.tokens += tokens
        return Completion(
            id=entry.request.id,
            token_ids=_repeat("q", TOKEN, tokens),
            logprobs=_repeat("d", -1.0, tokens),
            versions=self._versions(entry.start, tokens),
            finish_reason=reason,  # type: ignore[arg-type]
            steps=tokens,
        )

    def _versions(self, start: float, tokens: int) -> np.ndarray:
        """Return each token's version: that of the weights in use when its step ended."""
        first = bisect.bisect_right(self.updates, start + _EPSILON, key=lambda update: update[0])
        if first == len(self.updates):
            return _repeat("q", self.updates[-1][1], tokens)
        versions: tuple[int, ...] = ()
        version = self.updates[first - 1][1]
        for steps, next_version in self.updates[first:]:
            before = min(tokens, int(steps - start + _EPSILON)) - len(versions)
            versions += (version,) * before
            version = next_version
        return np.array(versions + (version,) * (tokens - len(versions)), np.int64)


class SimulatedRanks:
    """Engines for `ContinuousDriver` on a `VirtualClockLoop`.

    Args:
        resume: `partial_rollout: resume`, else `restart`: what an update does to running requests.
        deaths: simulated seconds at which an engine dies, by rank.
    """

    def __init__(
        self,
        world_size: int,
        model: EngineModel,
        lengths: Lengths,
        *,
        loop: asyncio.AbstractEventLoop,
        resume: bool = True,
        deaths: Mapping[int, float] | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"at least one engine is needed, got {world_size}")
        self._loop = loop
        self._engines = [_SimulatedEngine(model, lengths, resume) for _ in range(world_size)]
        self._polls: dict[int, asyncio.Future[None]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.version = 0  # Of the weights that a restarted engine gets
        self.calls: list[Call] | None = None  # Set to a list to have every call noted
        for rank, at in (deaths or {}).items():
            loop.call_at(at, self._die, rank)

    @property
    def world_size(self) -> int:
        return len(self._engines)

    async def submit(self, rank: int, requests: Sequence[Request]) -> None:
        engine = self._alive("submit", rank, requests)
        engine.submit(requests)
        self._look_again(rank)

    async def poll(self, rank: int, budget: float) -> list[Completion]:
        engine = self._alive("poll", rank, budget)
        if not engine.finished and budget > 0:
            woken = self._polls[rank] = self._loop.create_future()
            deadline = self._loop.call_later(budget, _wake, woken)
            self._look_again(rank)
            try:
                await woken
            finally:
                deadline.cancel()
                self._polls.pop(rank, None)
                self._stop_timer(rank)
            engine = self._alive(None, rank, None)
        return engine.take()

    async def abort(self, rank: int, request_ids: Sequence[str]) -> list[Completion]:
        stopped = self._alive("abort", rank, list(request_ids)).abort(request_ids)
        self._look_again(rank)
        return stopped

    async def update_weights(self, version: int, seconds: float = 0.0) -> None:
        """Hold all engines for `seconds`, then go on with `version`."""
        if self.calls is not None:
            self.calls.append((self._loop.time(), "update", version, seconds))
        self.version = version
        for rank, engine in enumerate(self._engines):
            if not engine.dead:
                engine.advance(self._loop.time())
                engine.update(version, seconds)
                self._look_again(rank)
        await asyncio.sleep(seconds)

    async def restart(self, rank: int, seconds: float = 0.0) -> None:
        """Put a new engine in place of a dead one, with the weights of its peers, after `seconds`."""
        await asyncio.sleep(seconds)
        old = self._engines[rank]
        self._engines[rank] = _SimulatedEngine(
            old.model, old.lengths, old.resume, at=self._loop.time(), version=self.version, use=old.use,
            updates=[(-1.0, self.version)],
        )  # fmt: skip

    def use(self) -> EngineUse:
        """Return what all engines did until now."""
        total = EngineUse()
        for engine in self._engines:
            if not engine.dead:
                engine.advance(self._loop.time())
            total.add(engine.use)
        return total

    def _alive(self, call: str | None, rank: int, argument: object) -> _SimulatedEngine:
        """Return the engine in its state of now."""
        if self.calls is not None and call is not None:
            self.calls.append((self._loop.time(), call, rank, argument))
        engine = self._engines[rank]
        if engine.dead:
            raise EngineDied(f"simulated engine {rank} is dead")
        engine.advance(self._loop.time())
        return engine

    def _die(self, rank: int) -> None:
        self._engines[rank].advance(self._loop.time())
        self._engines[rank].die()
        if rank in self._polls:
            _wake(self._polls[rank])

    def _look_again(self, rank: int) -> None:
        """Wake this engine's poll when its next response is finished."""
        if rank not in self._polls:
            return
        self._stop_timer(rank)
        engine = self._engines[rank]
        at = self._loop.time() if engine.finished else engine.next_end()
        if at is not None:
            self._timers[rank] = self._loop.call_at(at, self._tick, rank)

    def _tick(self, rank: int) -> None:
        if rank not in self._polls:
            return
        engine = self._engines[rank]
        engine.advance(self._loop.time())
        if engine.finished:
            _wake(self._polls[rank])
        else:
            self._look_again(rank)

    def _stop_timer(self, rank: int) -> None:
        timer = self._timers.pop(rank, None)
        if timer is not None:
            timer.cancel()


Call = tuple[float, str, int, object]  # (simulated seconds, method, rank, argument)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@lru_cache(maxsize=16_384)
def _repeat(typecode: str, value: float, count: int) -> np.ndarray:
    """Return a shared column, so that a hundred thousand responses don't each hold their tokens."""
    return np.frombuffer(np.full(count, value, typecode).tobytes(), typecode)
