"""Several processes that are kept running, and what is to be done in them.

Dataflow: any thread `post`s a request to the one thread of the pool, which has an event loop with the pipes of all
processes; what is asked in one tick of a caller's event loop is posted together. There a subclass `enqueue`s an item of
work; `assign_queued` gives it to the least loaded process as soon as one has room, and calls `_begin`; answers come
back through `answered`. When a process ends, or is killed because a call took too long, a successor is started and
`_lost` decides about the items that it had. A call's time limit counts from when the process begins with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from roll.isolation.processes.worker_process import Call, T, WorkerExit, WorkerProcess

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)

_STARTS = 3  # Times that a process is started before what it was given fails


class ProcessPool(ABC, Generic[T]):
    """A pool of processes, each with a number of items of work. The methods below the line run in the pool's thread."""

    name: ClassVar[str]  # `reward`, for messages
    handler: ClassVar[str]  # `package.module:Class` of the `Handler` in each process
    what: ClassVar[str]  # What a process loads, for messages
    hash_seed = 0
    """PYTHONHASHSEED of the processes."""
    counted: ClassVar[tuple[str, ...]] = ()  # Counters that are shown even while they are 0

    def __init__(
        self,
        setup: Any,
        *,
        num_processes: int,
        timeout_s: float,
        start_timeout_s: float,
        max_assigned: float = math.inf,
        memory_mb: float = 0.0,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> None:
        """Start the processes without waiting for them. A subclass is ready to serve before it calls this.

        Args:
            setup: argument of the handler.
            num_processes: how many calls run at once.
            timeout_s: seconds of one call; beyond, its process is killed with all it started.
            start_timeout_s: seconds that a process may take to load.
            max_assigned: items that a process has at once, unless its handler says so itself.
            memory_mb: what a process may allocate; 0: any amount.
            environment: variables of the processes; None: those of this one.
            python: an interpreter of their own; None: that of this process.
        """
        self.counters: Counter[str] = Counter(dict.fromkeys(self.counted, 0))
        """`restarts` of processes that ended or were killed, `timeouts` of calls or starts, `recycled` processes,
        `discarded` packets and answers that nobody had asked for."""
        self.loaded: list[Future[None]] = [Future() for _ in range(num_processes)]
        self.ended_because = ""  # Why the pool takes no further requests
        self.setup = pickle.dumps(setup)
        self.memory_mb, self.environment, self.python = memory_mb, environment, python
        self.timeout_s, self.start_timeout_s, self._max_assigned = timeout_s, start_timeout_s, max_assigned
        self._period_s = min(0.25, timeout_s / 20, start_timeout_s / 20)
        self._queue: deque[T] = deque()
        self._processes: list[WorkerProcess[T]] = []  # The one of each index that gets further items
        self._alive: list[WorkerProcess[T]] = []
        self._retired: set[WorkerProcess[T]] = set()
        self._starts = [0] * num_processes
        self._requests: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self._woken = False
        self._gathering: set[asyncio.AbstractEventLoop | None] = set()  # Callers' loops that wake it at their next tick
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._broken)
        self._thread = threading.Thread(target=self._run, name=f"{self.name} pool", daemon=True)
        self._thread.start()
        self.post(self._start_processes)

    def wait_ready(self) -> None:
        """Wait until every process has loaded; raises what `_load_error` makes of the reason why one can't."""
        patience_s = _STARTS * self.start_timeout_s + 30.0
        for loaded in list(self.loaded):
            try:
                loaded.result(timeout=patience_s)
            except FutureTimeout:
                raise TimeoutError(f"the {self.name} processes weren't ready after {patience_s:g} s") from None

    def post(self, request: Callable[[], None], *, with_tick: bool = False) -> None:
        """Have something done in the pool's thread; wakes it once for all that is posted meanwhile.

        Args:
            with_tick: if the caller runs in an event loop, wake the pool at the end of its tick, so that all that is
                asked in it travels together. For callers that don't block their loop.
        """
        loop = asyncio._get_running_loop() if with_tick else None  # None where none runs, too
        with self._lock:
            if self.ended_because:
                raise RuntimeError(self.ended_because)
            self._requests.append(request)
            if loop is None:
                self._wake()
            elif loop not in self._gathering:
                self._gathering.add(loop)
                loop.call_soon(self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        with self._lock:
            self._gathering.discard(loop)
            if not self._woken and not self.ended_because:  # a pool that ends looks at what was asked before
                self._woken = True
                self._loop.call_soon_threadsafe(self._serve)

    def shutdown(self) -> None:
        """Kill the processes and fail what is under way. Harmless when repeated."""
        self._end(f"the {self.name} pool was shut down")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30.0)

    def _end(self, reason: str) -> None:
        with self._lock:
            if self.ended_because:
                return
            self.ended_because = reason
            self._loop.call_soon_threadsafe(self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # --- what a pool is for ------------------------------------------------------------

    @abstractmethod
    def _begin(self, process: WorkerProcess[T], item: T) -> None:
        """Give an item that has waited to this process (`process.assigned`, `process.send`), or drop it."""

    @abstractmethod
    def answered(self, process: WorkerProcess[T], call: Call, answer: tuple[Any, ...]) -> None:
        """Take the answer to a call."""

    @abstractmethod
    def _lost(self, items: Sequence[T], ended: WorkerExit, successor: WorkerProcess[T] | None) -> None:
        """Decide about the items of a process that has ended. No successor: it couldn't be started."""

    @abstractmethod
    def _abandon(self, item: T, reason: str) -> None:
        """Tell whoever waits for an item that the pool has ended."""

    @abstractmethod
    def _load_error(self, reason: str) -> Exception:
        """Return the error for processes that can't load."""

    def _unfit(self, process: WorkerProcess[T]) -> str:  # noqa: ARG002
        """Return why a process that has just loaded is of no use, or an empty text."""
        return ""

    def _watch_queue(self) -> None:
        """Look after what waits, several times a second."""

    # --- in the pool's thread ----------------------------------------------------------

    def enqueue(self, item: T) -> None:
        """Have an item begun as soon as a process has room."""
        self._queue.append(item)
        self.assign_queued()

    def assign_queued(self) -> None:
        """Give queued items to processes, the least loaded first."""
        while self._queue:
            free = [process for process in self._processes if self._has_room(process, self._queue[0])]
            if not free:
                return
            process = min(free, key=lambda p: (len(p.assigned), not p.is_ready, p.index))
            if process.gone:  # it couldn't be started the last time
                loaded = self.loaded[process.index]
                if loaded.done() and loaded.exception() is not None:
                    self.loaded[process.index] = Future()
                process = self._processes[process.index] = self._new_process(process.index)
            self._begin(process, self._queue.popleft())

    def _has_room(self, process: WorkerProcess[T], item: T) -> bool:  # noqa: ARG002
        """Return whether a process may be given another item."""
        return len(process.assigned) < (process.slots or self._max_assigned)

    def retire(self, process: WorkerProcess[T]) -> None:
        """Give further items to a successor, and end the process after its last one.

        There are two processes meanwhile, never more: nothing happens while an earlier one of its index goes on.
        """
        if not any(other.index == process.index for other in self._retired):
            self._retired.add(process)
            self._processes[process.index] = self._new_process(process.index)
        self.end_if_unused(process)
        self.assign_queued()

    def end_if_unused(self, process: WorkerProcess[T]) -> None:
        """End a retired process that has nothing left to do."""
        if process in self._retired and process.idle and not process.assigned:
            self._kill_retired(process)
            self.counters["recycled"] += 1

    def ready(self, process: WorkerProcess[T]) -> None:
        """Note that a process has loaded."""
        self._starts[process.index] = 0
        loaded = self.loaded[process.index]
        if not loaded.done():
            problem = self._unfit(process)
            if problem:
                loaded.set_exception(self._load_error(problem))
            else:
                loaded.set_result(None)
        self.assign_queued()  # it may take several at once

    def ended(self, process: WorkerProcess[T], ended: WorkerExit) -> None:
        """Replace a process that is gone."""
        self._alive.remove(process)
        items = list(process.assigned.values())
        process.assigned.clear()  # so it has room, should it be started again
        self.counters["timeouts"] += ended.status == "timeout"
        was_retired = process in self._retired
        self._retired.discard(process)
        if not ended.was_ready:
            self._starts[process.index] += 1
            if ended.load_error or self._starts[process.index] >= _STARTS:
                self._starts[process.index] = 0  # a later item may try again
                loaded = self.loaded[process.index]
                if not loaded.done():
                    loaded.set_exception(self._load_error(ended.reason))
                self._lost(items, ended, None)
                self.assign_queued()
                return
        self.counters["restarts"] += 1
        try:
            successor = self._new_process(process.index)
        except BaseException:
            self._queue.extend(items)  # `_stop` tells whoever waits for them
            raise
        if was_retired:
            self._retired.add(successor)
        else:
            self._processes[process.index] = successor
        self._lost(items, ended, successor)
        if was_retired and not successor.assigned:
            self._kill_retired(successor)
        self.assign_queued()

    def _start_processes(self) -> None:
        self._processes = [self._new_process(index) for index in range(len(self._starts))]
        self._watch()

    def _new_process(self, index: int) -> WorkerProcess[T]:
        process = WorkerProcess(self, index)
        self._alive.append(process)
        return process

    def _kill_retired(self, process: WorkerProcess[T]) -> None:
        self._retired.discard(process)
        self._alive.remove(process)
        process.kill()

    def _watch(self) -> None:
        self._loop.call_later(self._period_s, self._watch)
        self._serve()  # what a loop asked for that was stopped in its tick
        for process in list(self._alive):
            process.check()
        self._watch_queue()

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
        except BaseException:
            self._loop.call_soon(self._stop)  # for what was asked after the request that failed
            raise
        for item in [*self._queue, *(item for process in self._alive for item in process.assigned.values())]:
            self._abandon(item, self.ended_because)
        for process in self._alive:
            process.kill()
        for loaded in self.loaded:
            if not loaded.done():
                loaded.set_exception(RuntimeError(self.ended_because))
        self._loop.stop()

    def _broken(self, _: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Fail all calls after a bug of ours, or if no process can be started, so that none waits forever."""
        error = context.get("exception")
        logger.error("the %s pool failed: %s", self.name, context["message"], exc_info=error)
        self._end(f"the {self.name} pool failed: {type(error).__name__}: {error}")
