"""The `inline` executor: every worker lives in the controller's process, one rank per role.

A plain call runs on the caller's thread, so a breakpoint stops as anywhere else, and has no time limit. One from the
event loop runs on the worker's own daemon thread and has one. The two never overlap on a worker.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from roll.distributed.cluster import Cluster, Executor
from roll.distributed.placement import RolePlacement
from roll.distributed.worker import Worker, WorkerInfo
from roll.distributed.worker_errors import Failure, WorkerError, WorkerTimeout
from roll.tracking.profiling.profile_plan import CallContext, outgoing

_logger = logging.getLogger(__name__)
_CLOSE_SECONDS = 10.0
_Job = tuple["concurrent.futures.Future[Any]", Callable[[], Any]]


class InlineExecutor(Executor):
    """Runs workers in this process; the configuration sees to one rank per role and no variables of their own."""

    def _start(
        self, placement: RolePlacement, worker_cls: type[Worker], init_args: tuple[Any, ...], calls: Mapping[str, Any]
    ) -> Cluster:
        self._clusters.append(InlineCluster(placement, worker_cls, init_args, **calls))
        return self._clusters[-1]


class InlineCluster(Cluster):
    """One worker in this process."""

    def __init__(
        self, placement: RolePlacement, worker_cls: type[Worker], init_args: tuple[Any, ...], **calls: Any
    ) -> None:
        super().__init__(placement, worker_cls, **calls)
        self._free = threading.BoundedSemaphore(placement.max_concurrency)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        slots = placement.ranks[0]
        # A single rank has no peers to meet at an address.
        info = WorkerInfo(placement.role, 0, 1, "", 0, slots, slots[0] if slots else 0, self.peer_timeout)
        self._worker: Worker | None = None
        self._worker = self._attributed("__init__", lambda: worker_cls(info, *init_args))

    @property
    def processes(self) -> list[tuple[str, int]]:
        return [(socket.gethostname(), os.getpid())]

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            # A thread inside torch when the interpreter ends would abort the process.
            thread.join(_CLOSE_SECONDS)
        try:
            self._attributed("close", worker.close)
        except WorkerError as error:
            _logger.warning("%s", error, exc_info=error.__cause__)

    def _run(self, name: str, args: Mapping[int, tuple[Any, ...]], timeout: float | None) -> list[Any]:
        return [self._invoke(name, each, timeout, outgoing(self.role, rank)) for rank, each in args.items()]

    async def _run_async(self, name: str, rank: int, args: tuple[Any, ...], timeout: float | None) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._start_threads()
        self._jobs.put((future, functools.partial(self._invoke, name, args, timeout, outgoing(self.role, rank))))
        limit = self._limit(timeout)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limit)
        except TimeoutError:
            raise self._late(rank, name, limit) from None

    def _invoke(self, name: str, args: tuple[Any, ...], timeout: float | None, context: CallContext | None) -> Any:
        limit = self._limit(timeout)
        if not self._free.acquire(timeout=limit):
            raise self._late(0, name, limit)
        try:
            if self._worker is None:
                raise RuntimeError(f"{self.role} was shut down")
            worker = self._worker
            return self._attributed(name, lambda: worker.invoke(name, args, context))
        finally:
            self._free.release()

    def _attributed(self, name: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            # The chained original shows the traceback, so the message doesn't repeat it.
            raise Failure.of(error).error(self.role, 0, name, show=False) from error

    def _start_threads(self) -> None:
        for _ in range(self.placement.max_concurrency - len(self._threads)):
            thread = threading.Thread(target=self._work, name=f"{self.role}-0", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, run = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(run())
            except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the call
                future.set_exception(error)

    def _late(self, rank: int, name: str, seconds: float) -> WorkerTimeout:
        frames = sys._current_frames()
        stacks = [traceback.format_stack(frames[t.ident]) for t in self._threads if t.ident in frames]
        doing = "\n".join("".join(stack) for stack in stacks)
        return WorkerTimeout(role=self.role, rank=rank, call=name, seconds=seconds, doing=doing)
