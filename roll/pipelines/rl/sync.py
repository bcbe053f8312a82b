"""Weight sync: every engine gets the trainer's weights, or the run ends.

    send     actor_train, all ranks: whole tensors, streamed in buckets    (distributed/transports)
    receive  actor_infer, every engine: loads them under a new version
    compare  what left with what arrived: tensors and bytes always, more with `verify_weight_sync`

A streaming transport has both at work at once; when one end fails, the other is told and nothing of it stays behind.

With `delta_weight_sync` all ends keep a copy of the weights, and only what has changed is sent (transports/delta.py).
Each sync begins by asking which copy they have: if it isn't the same everywhere, as at the first one, after a failure,
or with an engine that was replaced, everything is sent.

With `lora_sync: adapters` the first sync is two transfers, base weights and adapters, and the later ones send adapters
alone: the base is frozen. An engine that was replaced gets both.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from roll.configs.catalog.strategy_table import is_lockstep
from roll.configs.schema.rl_config import RLConfig
from roll.distributed.handles import Handle
from roll.distributed.transports import Sent, Transfer, TransferSummary, Transport
from roll.distributed.transports.delta import Delta
from roll.distributed.weights import WeightPart, WeightSyncError
from roll.distributed.worker_errors import WorkerDied
from roll.pipelines.rl.sync_plan import SyncPlan, make_plan
from roll.pipelines.rl.sync_probe import compare_logprobs
from roll.pipelines.run.clusters import Clusters
from roll.pipelines.workers.infer_worker import InferWorker
from roll.pipelines.workers.train_worker import TrainWorker

logger = logging.getLogger(__name__)

_CHECKED_VERSIONS = 2  # Versions: the one that the run begins with, and the first that was trained
_ABORT_GRACE_S = 30.0  # Seconds that the other end of a failed transfer has to give up as well


@dataclass(frozen=True)
class _Last:
    """The last transfer of a part to all engines."""

    version: int
    summary: TransferSummary
    handles: list[Handle]  # Handles to this version; empty where the trainer is asked again
    delta: Delta | None  # With the name of the copies of it; None where there are none


class WeightSync:
    """Brings engines to the weights of the trainer.

    An engine that was replaced gets the version of the others by `resend`. While generation and training take turns,
    the trainer still has that version then. With `async_generation_ratio` it has moved on, so each sync keeps a copy:
    in the object store, in files, or in this process, as large as the model.
    """

    def __init__(self, config: RLConfig, clusters: Clusters, tokenizer: Any) -> None:
        self._config = config
        self._clusters = clusters
        self._trainer = clusters.actor_train
        self._engines = clusters.actor_infer
        self._tokenizer = tokenizer
        restarts = config.engine_restarts > 0
        lockstep = is_lockstep(config.actor_infer.strategy_args.strategy_name)
        self._keeps = restarts and not lockstep and config.async_generation_ratio > 0
        self._run = uuid.uuid4().hex[:12]
        self._transfers = 0
        self._group = 0
        self._latest: Transport | None = None
        self._last: dict[WeightPart, _Last] = {}  # Together what the engines have, in the order of loading
        self._looked_at: set[int] = set()  # Versions under which engines and trainer were compared
        self._lock = threading.Lock()
        self.metrics: dict[str, float] = {}  # Of the last sync

    def __call__(self, version: int) -> None:
        """Bring all engines to the trainer's weights under this version.

        Raises:
            WeightSyncError: an engine has got something else than was sent, or says something else than the trainer.
            WorkerError: a worker failed, died or was late; names it.
            ValueError: the transport doesn't fit where the workers are.
        """
        with self._lock:
            started = time.perf_counter()
            totals = [self._send(part, version) for part in self._parts()]
            seconds = time.perf_counter() - started
            gigabytes = sum(total.moved for total in totals) / 1e9
            self.metrics = {
                "sync/gigabytes": gigabytes,
                "sync/gathered_gigabytes": sum(total.gathered for total in totals) / 1e9,
                "sync/copied_gigabytes": sum(total.copied for total in totals) / 1e9,
                "throughput/sync_gb_per_second": gigabytes / seconds,
            }
            if self._plan.delta:
                self.metrics["sync/delta_share"] = gigabytes / (sum(total.bytes for total in totals) / 1e9)

    def _parts(self) -> tuple[WeightPart, ...]:
        """Return what the engines lack of the trainer's weights."""
        if self._config.lora_sync == "merged":
            return ("merged",)
        return ("adapters",) if "base" in self._last else ("base", "adapters")

    def _send(self, part: WeightPart, version: int) -> TransferSummary:
        started = time.perf_counter()
        plan = self._plan
        transport = self._latest = self._transport(plan, version, part)
        delta = Delta(transport.transfer.name, base=self._common_copy()) if plan.delta else None
        update = partial(self._engines.call, InferWorker.update_weights, transport)
        sent, summaries = self._carry(transport, delta, lambda handles: update(handles, delta))
        summary = self._compare(transport, sent.summary, summaries, range(len(summaries)))
        self._last[part] = _Last(version, summary, sent.retained, delta and replace(delta, base=""))
        transport.discard([] if plan.delta else [handle for last in self._last.values() for handle in last.handles])
        logger.debug("version %d, %s: %s to %d engine(s) by %s in %.3f s", version, part, summary, len(summaries),
                     transport.name, time.perf_counter() - started)  # fmt: skip
        return summary

    def verify(self, version: int) -> None:
        """Check that engines and trainer agree under this version: at the first weights of the run, at the first that
        were trained, and with `verify_weight_sync: logprob` always.

        Raises `WeightSyncError` naming the engine if they don't.
        """
        if self._config.verify_weight_sync == "logprob":
            compare_logprobs(self._config, self._clusters, self._tokenizer, version)
        if len(self._looked_at) < _CHECKED_VERSIONS and version not in self._looked_at:
            from roll.pipelines.rl.engine_check import check_engines

            check_engines(self._config, self._clusters, self._tokenizer, version)
            self._looked_at.add(version)

    def leave(self) -> None:
        """Note that the trainer is about to work, and leaves the version that the engines have.

        Where no copy was kept, an engine that is replaced from now on can't get that version. It needn't: it gets the
        next one before it samples. What is being sent again is waited for: the trainer is one thread's at a time.
        """
        with self._lock:
            if not self._keeps:
                self._last = {part: last for part, last in self._last.items() if part == "base"}

    def resend(self, rank: int) -> None:
        """Bring one engine, which has just been replaced, to the version that the others have.

        Before the first sync there is nothing to do: all engines still have the weights they start with. Nor is there
        after `leave`, when all will get others.
        """
        with self._lock:
            self._group += 1  # the old engine was a member of the broadcast group
            if set(self._last) == {"base"}:
                self._last = {}  # the next sync begins with it again
            for part, last in self._last.items():
                self._resend_part(rank, part, last)

    def _resend_part(self, rank: int, part: WeightPart, last: _Last) -> None:
        plan = self._plan.to_engine(rank, retained=bool(last.handles))
        transport = self._transport(plan, last.version, part)

        def receive(handles: list[Handle]) -> list[TransferSummary]:
            return [self._engines.call_rank(rank, InferWorker.update_weights, transport, handles, last.delta)]

        if last.handles:
            summaries = receive(last.handles)
        else:
            _, summaries = self._carry(transport, last.delta, receive)
            transport.discard([])
        self._compare(transport, last.summary, summaries, [rank])

    def close(self) -> None:
        """Let go of what was kept."""
        self._last = {}
        if self._latest is not None:
            self._latest.close()
        self._latest = None
        vars(self).pop("_plan", None)  # and with it the port of its store

    def _common_copy(self) -> str:
        """Return the name of the weights that the trainer and all engines have a copy of; empty: there are none."""
        names = {self._trainer.call_rank(0, TrainWorker.weight_copy), *self._engines.call(InferWorker.weight_copy)}
        return names.pop() if len(names) == 1 else ""

    # --- one transfer ---------------------------------------------------------------------------------------------

    @cached_property
    def _plan(self) -> SyncPlan:
        plan = make_plan(self._config, self._trainer, self._engines, keeps=self._keeps)
        if plan.transport.name == "in_process" and self._config.async_generation_ratio == 0:
            self._lend()
        return plan

    def _lend(self) -> None:
        """Have the engine compute with the trainer's own weights, where it can: both are in this process.

        They take turns, and each turn of the engine begins with a sync, which has nothing to copy then.
        """
        lent = self._trainer.call_rank(0, TrainWorker.lend_weights, self._config.actor_infer.model_args.dtype)
        if lent:
            self._engines.call_rank(0, InferWorker.borrow_weights, lent)

    def _transport(self, plan: SyncPlan, version: int, part: WeightPart) -> Transport:
        """Return the transport of the next transfer."""
        self._transfers += 1
        transfer = Transfer(
            version=version,
            name=f"{self._run}-{self._transfers}",
            bucket_bytes=plan.bucket_bytes,
            part=part,
            dtype="" if part == "adapters" else self._config.actor_infer.model_args.dtype,
            timeout=plan.timeout,
            checksum=plan.checksum,
            keep=plan.keep,
        )
        return plan.transport.build(transfer, replace(plan, group=f"{self._run}-group-{self._group}"))

    def _carry(
        self, transport: Transport, delta: Delta | None, receive: Callable[[list[Handle]], list[TransferSummary]]
    ) -> tuple[Sent, list[TransferSummary]]:
        """Run both ends of a transfer, one after the other or at once."""
        if not transport.streams:
            sent = self._trainer.call(TrainWorker.send_weights, transport, delta)[0]
            return sent, receive(sent.handles)
        store, name = self._plan.store, transport.transfer.name
        assert store is not None
        pool = ThreadPoolExecutor(2, thread_name_prefix="weight-sync")
        try:
            sending = pool.submit(self._trainer.call, TrainWorker.send_weights, transport, delta)
            receiving = pool.submit(receive, [])
            both: list[Future[Any]] = [sending, receiving]
            done, _ = wait(both, return_when=FIRST_EXCEPTION)
            first = next((error for future in done if (error := future.exception()) is not None), None)
            if first is not None:
                store.abort(name, f"the transfer failed: {_line(first)}")
                wait(both, timeout=_ABORT_GRACE_S)
                raise _root_cause(first, both)
            return _together(sending.result()), receiving.result()
        except BaseException as error:
            store.abort(name, _line(error))
            transport.close()
            self._group += 1
            raise
        finally:
            pool.shutdown(wait=False)

    def _compare(
        self,
        transport: Transport,
        sent: TransferSummary | None,
        summaries: Sequence[TransferSummary],
        ranks: Sequence[int],
    ) -> TransferSummary:
        expected = sent or replace(summaries[0], gathered=0, copied=0)
        for rank, summary in zip(ranks, summaries, strict=True):
            if summary != expected:
                raise WeightSyncError(
                    f"{self._engines.role} rank {rank} didn't get the weights of version {transport.transfer.version} "
                    f"as they were sent by {transport.name}: sent {expected}; received {summary}"
                )
        return replace(
            expected,
            gathered=expected.gathered + max(summary.gathered for summary in summaries),
            copied=expected.copied + max(summary.copied for summary in summaries),
        )


def _together(ends: Sequence[Sent]) -> Sent:
    """Return what rank 0 says, with the bytes that all ranks copied; raises if they haven't gone through the same."""
    first = ends[0]
    assert first.summary is not None, "a streaming transport counts what passes"
    copied = 0
    for rank, end in enumerate(ends):
        if end.summary is None:
            continue
        copied += end.summary.copied
        if replace(end.summary, checksum=first.summary.checksum) != first.summary:
            raise WeightSyncError(
                f"actor_train rank {rank} has other weights than rank 0: {end.summary} instead of {first.summary}; a "
                "backend whose ranks don't all have the whole tensors must leave `sends_from_every_rank` False"
            )
    return replace(first, summary=replace(first.summary, copied=copied))


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _root_cause(first: BaseException, calls: Sequence[Future[Any]]) -> BaseException:
    """Return a death, when there is one: peers fail of it, and may say so earlier."""
    errors = [call.exception() for call in calls if call.done()]
    return next((error for error in errors if isinstance(error, WorkerDied)), first)
