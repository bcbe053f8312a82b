"""Scoring responses in killable processes, so that a hanging or crashing reward function costs a status, not the run.

A process scores one response after the other with a plain function, several side by side with an async one, and
several in one call with one that takes lists. While calls of a plain function are short, a process is sent many at
once; those that it hasn't begun after 10 ms go to whichever process is free. No answer within the time limit: the
process is killed with all it started, and the result is `timeout`; an async call is cancelled, and its process goes on.
Death or an exception: tried again `retries` times, then `error`. Who was only in the same process is scored again, and
it isn't counted. Results come in the order of the requests, whoever finished first.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from roll.configs.catalog.reward_table import REWARDS
from roll.isolation.processes.limits import passed_environment
from roll.isolation.processes.process_pool import ProcessPool
from roll.isolation.processes.worker_process import Call, WorkerExit, WorkerProcess
from roll.rewards.base import ResultStatus, Reward, RewardLoadError, RewardRequest, RewardResult, RewardSpec, as_reward

logger = logging.getLogger(__name__)

_MAX_TOGETHER = 64
"""Responses in one message to a process that scores them one after the other."""
_QUICK_S = 0.01
"""Answers that come sooner than this let a process be given more at once."""


@dataclass(slots=True, eq=False)
class _Job:
    """One response that is to be scored."""

    number: int
    request: RewardRequest
    message: bytes
    future: Future[RewardResult]
    attempts: int = 0
    started_at: float = 0.0
    alone: bool = False  # It gets a process to itself: its last one ended, or didn't come to it


class RewardPool(ProcessPool[_Job]):
    """Persistent processes that score responses. Thread-safe; shut it down, or use it in a `with` block.

    A timeout is not tried again: the call had its whole time, and hostile responses would cost it several times.
    """

    name, handler, what = "reward", "roll.rewards.reward_worker:RewardHandler", "the reward functions"
    counted = ("discarded",)

    def __init__(
        self,
        specs: Mapping[str, RewardSpec],
        *,
        num_processes: int = 2,
        timeout_s: float = 30.0,
        retries: int = 1,
        start_timeout_s: float = 60.0,
        recycle_after: int = 10_000,
        memory_limit_mb: float = 8192.0,
    ) -> None:
        """Start the processes without waiting for them (see `wait_ready`).

        Args:
            num_processes: how many processes score.
            timeout_s: wall time of one call.
            retries: further attempts after an exception or a death.
            start_timeout_s: wall time a process may take to import the reward functions.
            recycle_after: calls after which a process is replaced, which bounds its memory; 0 = never.
            memory_limit_mb: what a process may allocate; a function that wants more gets a `MemoryError`.
        """
        self._specs = dict(specs)
        self._built_in = {domain for domain, spec in specs.items() if all(name in REWARDS for name in spec.functions)}
        self._numbers = itertools.count(1)
        self._retries, self._recycle_after = retries, recycle_after
        self._together = 1
        super().__init__(
            self._specs,
            num_processes=num_processes,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            memory_mb=memory_limit_mb,
            environment=passed_environment(os.environ, {name for spec in specs.values() for name in spec.environment}),
        )

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Queue one request. The future always gets a result, unless the functions can't load or the pool closes."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[RewardRequest]) -> list[Future[RewardResult]]:
        """Queue several at once, so that they travel together and a function that takes lists is given them in lists.

        So do those that are queued in one tick of an event loop, one by one.
        """
        jobs = [self._job(request) for request in requests]

        def enqueue() -> None:
            self._queue.extend(jobs)
            self.assign_queued()

        self.post(enqueue, with_tick=True)
        return [job.future for job in jobs]

    def _job(self, request: RewardRequest) -> _Job:
        if request.domain not in self._specs:
            raise ValueError(
                f"no reward for domain {request.domain!r} (request {request.id!r}); known: {sorted(self._specs)}"
            )
        if request.domain in self._built_in:  # none of which reads these
            request = replace(request, completion_ids=None, completion_text=None, messages=())
        return _Job(next(self._numbers), request, pickle.dumps(request), Future())

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all requests; results in their order. Blocks; may be called from several threads."""
        return [future.result() for future in self.submit_all(requests)]

    # --- in the pool's thread ----------------------------------------------------------

    def _load_error(self, reason: str) -> Exception:
        # What was refused in a sentence needs no traceback: the last line of one is the sentence.
        refused = reason.rpartition(f"\n{RewardLoadError.__module__}.{RewardLoadError.__name__}: ")[2]
        return RewardLoadError(f"responses can't be scored: {refused.strip()}")

    def _begin(self, process: WorkerProcess[_Job], item: _Job) -> None:
        if not item.future.running() and not item.future.set_running_or_notify_cancel():
            return
        if not item.attempts:
            item.started_at = time.monotonic()
        item.attempts += 1
        process.assigned[item.number] = item
        process.send(Call(item.number, (item.message,), "scoring", "while scoring"))

    def _has_room(self, process: WorkerProcess[_Job], item: _Job) -> bool:
        if item.alone or any(job.alone for job in process.assigned.values()):
            return not process.assigned
        if process.slots:
            return len(process.assigned) < process.slots
        until_recycled = self._recycle_after - process.answers if self._recycle_after else _MAX_TOGETHER
        return len(process.assigned) < max(1, min(self._together, until_recycled))

    def answered(self, process: WorkerProcess[_Job], call: Call, answer: tuple[Any, ...]) -> None:
        job = process.assigned.pop(call.key)
        is_quick = answer[0] != "later" and time.monotonic() - call.sent_at < _QUICK_S
        self._together = min(self._together + 1, _MAX_TOGETHER) if is_quick else max(1, self._together // 2)
        if answer == ("later",) and not job.alone:
            process.answers -= 1
            self._put_back(job, alone=True)
            self.assign_queued()
            return
        if answer[0] == "timeout":
            self._finish(job, "timeout", error=f"scoring took over {self.timeout_s:g} s")
            self.assign_queued()
            return
        text = answer[1] if len(answer) == 2 and isinstance(answer[1], str) else ""
        if answer[0] in ("unscored", "final") and text:
            self._finish(job, "unscored" if answer[0] == "unscored" else "error", error=text)
            self._go_on(process)
            return
        try:
            reward = as_reward(Reward(*answer[1:]), job.request.domain) if answer[0] == "ok" else None
        except (TypeError, ValueError, OverflowError) as error:
            self._retry(job, f"its process gave no reward: {error}")
        else:
            if reward is None:
                self._retry(job, text or "its process gave no reward")
            else:
                self._finish(job, "ok", reward)
        self._go_on(process)

    def _go_on(self, process: WorkerProcess[_Job]) -> None:
        if self._recycle_after and process.answers >= self._recycle_after:
            self.retire(process)
        self.assign_queued()

    def _lost(self, items: Sequence[_Job], ended: WorkerExit, successor: WorkerProcess[_Job] | None) -> None:
        if ended.load_error:  # for all that wait, too: another process would do no better
            items, self._queue = [*items, *self._queue], type(self._queue)()
        blamed = {call.key for call in ended.blamed} or {job.number for job in items}
        for job in items:
            if ended.load_error:
                self._fail(job, self._load_error(ended.reason))
            elif not ended.was_ready and successor is not None:  # not the response's fault
                self._put_back(job, alone=job.alone)
            elif len(blamed) > 1 or job.number not in blamed:
                self._put_back(job, alone=job.number in blamed)
            elif ended.status == "timeout" and ended.blamed:
                self._finish(job, "timeout", error=ended.reason)
            else:
                self._retry(job, ended.reason)

    def _abandon(self, item: _Job, reason: str) -> None:
        self._fail(item, RuntimeError(reason))

    def _fail(self, job: _Job, error: Exception) -> None:
        if job.future.running() or job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)

    def _put_back(self, job: _Job, *, alone: bool) -> None:
        """Queue a job again as if it had never left."""
        job.alone = alone
        job.attempts -= 1
        self._queue.appendleft(job)

    def _retry(self, job: _Job, error: str) -> None:
        if job.attempts <= self._retries:
            self._queue.appendleft(job)
        else:
            self._finish(job, "error", error=error)

    def _finish(self, job: _Job, status: ResultStatus, reward: Reward | None = None, error: str = "") -> None:
        self.counters[status] += 1
        self.counters["retries"] += job.attempts - 1
        error = error.encode("utf-8", "backslashreplace").decode()
        if error:
            logger.debug("reward request %s: %s after %d attempts: %s", job.request.id, status, job.attempts, error)
        job.future.set_result(
            RewardResult(
                id=job.request.id,
                status=status,
                reward=reward,
                error=error,
                attempts=job.attempts,
                seconds=time.monotonic() - job.started_at,
            )
        )
