"""Scoring responses in killable processes, so that a hanging or crashing reward function costs a status, not
the run.

Dataflow: `submit` puts a request in the queue of a thread pool with one thread per process. A thread takes an
idle process, sends the request and waits for the answer up to the time limit. No answer in time: the process
is killed with all it started, and the result is `timeout`. Death or an exception: tried again `retries`
times, then `error`. The thread then hands the process (or a fresh one) back. Results come in the order of the
requests, whoever finished first.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType

from roll.rewards.base import ResultStatus, Reward, RewardRequest, RewardResult, RewardSpec
from roll.rewards.reward_process import CallTimeout, ProcessDied, RewardProcess

logger = logging.getLogger(__name__)


class RewardPool:
    """Persistent processes that score responses. Thread-safe; close it, or use it in a `with` block.

    A timeout is not tried again: the call had its whole time, and hostile responses would cost it several
    times.
    """

    def __init__(
        self,
        specs: Mapping[str, RewardSpec],
        *,
        num_processes: int = 2,
        timeout_s: float = 30.0,
        retries: int = 1,
        start_timeout_s: float = 60.0,
        recycle_after: int = 10_000,
    ) -> None:
        """Start the processes without waiting for them (see `wait_ready`).

        Args:
            specs: reward function by domain.
            num_processes: how many responses are scored at once.
            timeout_s: wall time of one call.
            retries: further attempts after an exception or a death.
            start_timeout_s: wall time a process may take to import the reward functions.
            recycle_after: calls after which a process is replaced, which bounds its memory; 0 = never.
        """
        if not specs:
            raise ValueError("a reward pool needs at least one domain")
        for name, value, least in (
            ("num_processes", num_processes, 1),
            ("retries", retries, 0),
            ("recycle_after", recycle_after, 0),
        ):
            if value < least:
                raise ValueError(f"reward pool: {name} must be >= {least}, got {value}")
        for name, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not seconds > 0:
                raise ValueError(f"reward pool: {name} must be > 0 seconds, got {seconds}")
        self._specs = dict(specs)
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._retries, self._recycle_after = retries, recycle_after
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._closed = False
        self._processes: set[RewardProcess] = set()
        self._idle: queue.SimpleQueue[RewardProcess | None] = queue.SimpleQueue()
        for _ in range(num_processes):
            self._idle.put(self._start())
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="reward")

    def wait_ready(self) -> None:
        """Wait until every idle process has loaded its functions; raises `RewardLoadError` naming what is
        wrong.
        """
        with self._lock:
            processes = list(self._processes)
        taken: list[RewardProcess | None] = []
        try:
            for _ in processes:
                process = self._idle.get(timeout=self._start_timeout_s + self._timeout_s)
                taken.append(process)
                if process is not None:
                    process.wait_ready(self._start_timeout_s)
        finally:
            for slot in taken:
                self._idle.put(slot)

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Queue one request. The future always gets a result, unless the functions can't be loaded or the
        pool closes.
        """
        if request.domain not in self._specs:
            raise ValueError(
                f"no reward for domain {request.domain!r} (request {request.id!r}); known: {sorted(self._specs)}"
            )
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        return self._threads.submit(self._score, request, pickle.dumps(request))

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all requests; results in their order. Blocks; may be called from several threads."""
        futures = [self.submit(request) for request in requests]
        return [self._wait(future, request) for future, request in zip(futures, requests, strict=True)]

    def counters(self) -> dict[str, int]:
        """Totals so far: `ok`, `error`, `timeout`, `retries`, `restarts`."""
        with self._lock:
            return {name: self._counters[name] for name in ("ok", "error", "timeout", "retries", "restarts")}

    def close(self) -> None:
        """Drop what is queued and kill the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            processes = list(self._processes)
            self._processes.clear()
        for process in processes:
            process.kill()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, future: Future[RewardResult], request: RewardRequest) -> RewardResult:
        """The result, as long as the pool goes on answering somebody."""
        stall_s = (self._start_timeout_s + self._timeout_s) * (self._retries + 1) + 60.0
        answered = -1
        while True:
            try:
                return future.result(timeout=stall_s)
            except FutureTimeout:
                before, answered = answered, sum(self.counters().values())
                if before == answered:
                    raise TimeoutError(
                        f"the reward pool answered nobody for {stall_s:g} s; waiting for request {request.id!r}"
                    ) from None

    # --- in the threads ---------------------------------------------------------------

    def _start(self) -> RewardProcess:
        process = RewardProcess(self._specs, call_timeout_s=self._timeout_s)
        with self._lock:
            self._processes.add(process)
            closed = self._closed
        if closed:
            process.kill()
            raise RuntimeError("the reward pool was closed")
        return process

    def _discard(self, process: RewardProcess) -> None:
        process.kill()
        with self._lock:
            self._processes.discard(process)
            self._counters["restarts"] += 1

    def _score(self, request: RewardRequest, message: bytes) -> RewardResult:
        started = time.monotonic()
        # One process per thread, so this waits only while `wait_ready` holds them.
        slot = self._idle.get(timeout=self._start_timeout_s + self._timeout_s + 10.0)
        status: ResultStatus = "error"
        outcome: Reward | str = ""
        attempt = 0
        try:
            while status == "error" and attempt <= self._retries:
                attempt += 1
                status, outcome, slot = self._attempt(slot, message)
        finally:
            self._idle.put(slot)
        with self._lock:
            self._counters[status] += 1
            self._counters["retries"] += attempt - 1
        reward, error = (outcome, "") if isinstance(outcome, Reward) else (None, outcome)
        if error:
            logger.debug("reward request %s: %s after %d attempts: %s", request.id, status, attempt, error)
        return RewardResult(
            id=request.id,
            status=status,
            reward=reward,
            error=error,
            attempts=attempt,
            seconds=time.monotonic() - started,
        )

    def _attempt(
        self, process: RewardProcess | None, message: bytes
    ) -> tuple[ResultStatus, Reward | str, RewardProcess | None]:
        """One call: how it ended, the reward or what went wrong, and the process if it is still good."""
        if process is not None and self._recycle_after and process.calls >= self._recycle_after:
            self._discard(process)
            process = None
        try:
            process = process or self._start()
            process.wait_ready(self._start_timeout_s)
            reply = process.call(message, self._timeout_s)
        except (CallTimeout, ProcessDied, OSError) as error:
            if process is not None:
                self._discard(process)
            return "timeout" if isinstance(error, CallTimeout) else "error", str(error), None
        if "error" in reply:
            return "error", reply["error"], process
        return "ok", Reward(reply["value"], reply["parts"]), process
