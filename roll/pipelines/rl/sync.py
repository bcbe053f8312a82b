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

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from roll.configs.catalog.strategy_table import is_lockstep
from roll.configs.catalog.transport_table import MAX_SENDERS, who_sends
from roll.configs.schema.rl_config import RLConfig
from roll.distributed.handles import Handle
from roll.distributed.transports import STREAMING, Route, Sent, TransferSummary, shm_segments
from roll.distributed.transports import file_transport as files
from roll.distributed.transports.rendezvous import RendezvousStore
from roll.distributed.weights import WeightPart, WeightSyncError
from roll.distributed.worker import Ping, Worker, machine_id
from roll.distributed.worker_errors import WorkerDied
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
    snapshot: str  # Name of the copies of it; empty where there are none


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
        self._folder = (config.output_path / "weights").absolute()
        self._run = uuid.uuid4().hex[:12]
        self._transfers = 0
        self._group = 0
        self._template: Route | None = None
        self._rendezvous: RendezvousStore | None = None
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
            if self._delta:
                self.metrics["sync/delta_share"] = gigabytes / (sum(total.bytes for total in totals) / 1e9)

    def _parts(self) -> tuple[WeightPart, ...]:
        """Return what the engines lack of the trainer's weights."""
        if self._config.lora_sync == "merged":
            return ("merged",)
        return ("adapters",) if "base" in self._last else ("base", "adapters")

    def _send(self, part: WeightPart, version: int) -> TransferSummary:
        started = time.perf_counter()
        route = self._route(version, part, receivers=self._engines.world_size)
        if self._delta:
            # What has changed is little, and rank 0 alone has the copy that it is found by.
            route = replace(route, snapshot=route.transfer, base=self._common_copy(), senders=(0,), sources=())
        sent, summaries = self._carry(route, lambda r, h: self._engines.call(InferWorker.update_weights, r, h))
        summary = self._compare(route, sent.summary, summaries, range(len(summaries)))
        self._last[part] = _Last(version, summary, sent.retained, route.snapshot)
        if route.transport == "file":
            retained = [handle for last in self._last.values() for handle in last.handles]
            files.discard(self._folder, keep=[] if self._delta else retained)
        logger.debug("version %d, %s: %s to %d engine(s) by %s in %.3f s", version, part, summary, len(summaries),
                     route.transport, time.perf_counter() - started)  # fmt: skip
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
        route = self._route(last.version, part, receivers=1)
        if last.snapshot:
            route = replace(route, snapshot=last.snapshot, senders=(0,), sources=())
        if route.sources:
            route = replace(route, sources=tuple(s if i == rank else None for i, s in enumerate(route.sources)))
        if route.transport == "broadcast":
            route = replace(route, transport="object_store")
        update = InferWorker.update_weights
        if last.handles:
            stored = "file" if route.transport == "file" and not self._delta else "object_store"
            route = replace(route, transport=stored, keep=False)
            summaries = [self._engines.call_rank(rank, update, route, last.handles)]
        else:
            _, summaries = self._carry(route, lambda r, h: [self._engines.call_rank(rank, update, r, h)])
            if route.transport == "file":
                files.discard(self._folder)
        self._compare(route, last.summary, summaries, [rank])

    def close(self) -> None:
        """Let go of what was kept."""
        self._last = {}
        self._rendezvous = None
        if self._template is not None and self._template.transport == "file":
            files.discard(self._folder)
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    @property
    def _delta(self) -> bool:
        """Return whether only changes are sent; in one process nothing is."""
        wanted = self._config.delta_weight_sync
        return wanted and self._template is not None and self._template.transport != "in_process"

    def _common_copy(self) -> str:
        """Return the name of the weights that the trainer and all engines have a copy of; empty: there are none."""
        names = {self._trainer.call_rank(0, TrainWorker.weight_copy), *self._engines.call(InferWorker.weight_copy)}
        return names.pop() if len(names) == 1 else ""

    # --- one transfer ---------------------------------------------------------------------------------------------

    def _route(self, version: int, part: WeightPart, *, receivers: int) -> Route:
        if self._template is None:
            self._template = self._first_route()
        self._transfers += 1
        return replace(
            self._template,
            version=version,
            part=part,
            dtype="" if part == "adapters" else self._config.actor_infer.model_args.dtype,
            transfer=f"{self._run}-{self._transfers}",
            group=f"{self._run}-group-{self._group}",
            receivers=receivers,
        )

    def _first_route(self) -> Route:
        config = self._config
        homes = [self._trainer.call_rank(0, Worker.ping), *self._engines.call(Worker.ping)]
        bucket_bytes = config.model_update_buffer_size_mb * 2**20
        # What the workers' machine has; this process may run on another one, without accelerators and with less memory.
        free = self._trainer.call_rank(0, Worker.free_shared_memory)
        fits = free > 2 * bucket_bytes
        transport = choose_transport(config.weight_transport, homes, keeps=self._keeps, fits=fits)
        if transport == "broadcast" and self._trainer.call_rank(0, Worker.device) != "cpu":
            self._check_separate()
        if transport in STREAMING:
            self._rendezvous = RendezvousStore(_address(homes))
        # All senders together may take half of what is free.
        senders, sources = self._senders(transport, most=min(MAX_SENDERS, free // (4 * bucket_bytes)))
        logger.info("weights travel by %s from %d rank(s)", transport, len(set(sources) or senders))
        return Route(
            transport=transport,
            version=0,
            transfer="",
            bucket_bytes=bucket_bytes,
            timeout=config.rpc_timeout,
            rendezvous=self._rendezvous.address if self._rendezvous is not None else None,
            folder=str(self._folder),
            senders=senders,
            sources=sources,
            on_device=bool(sources),
            checksum=config.verify_weight_sync != "off",
            keep=self._keeps,
        )

    def _senders(self, transport: str, *, most: int = MAX_SENDERS) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `senders` and `sources` of a route."""
        if transport != "shared_memory":
            return (0,), ()
        trainer, engines = self._trainer.placement.ranks, self._engines.placement.ranks
        homes = self._trainer.call(Worker.ping)
        near = {rank: trainer[rank] for rank, home in enumerate(homes) if home.machine == homes[0].machine}
        if not self._trainer.call_rank(0, TrainWorker.sends_from_every_rank):
            near = {0: trainer[0]}
        on_accelerator = self._trainer.call_rank(0, Worker.device) != "cpu"
        on_accelerator &= not self._trainer.call_rank(0, TrainWorker.gathers_on_host)
        return who_sends(transport, near, engines, on_accelerator=on_accelerator, most=max(1, most))

    def _check_separate(self) -> None:
        shared = {s for rank in self._trainer.placement.ranks for s in rank} & {
            s for rank in self._engines.placement.ranks for s in rank
        }
        if shared:
            raise ValueError(
                f"weight_transport: broadcast needs accelerators of their own for actor_train and actor_infer, they "
                f"share {sorted(shared)}; set it to auto or shared_memory, or give them different device_mappings"
            )

    def _carry(
        self, route: Route, receive: Callable[[Route, list[Handle]], list[TransferSummary]]
    ) -> tuple[Sent, list[TransferSummary]]:
        """Run both ends of a transfer, one after the other or at once."""
        if route.transport not in STREAMING:
            sent = self._trainer.call(TrainWorker.send_weights, route)[0]
            return sent, receive(route, sent.handles)
        assert self._rendezvous is not None
        pool = ThreadPoolExecutor(2, thread_name_prefix="weight-sync")
        try:
            sending = pool.submit(self._trainer.call, TrainWorker.send_weights, route)
            receiving = pool.submit(receive, route, [])
            both: list[Future[Any]] = [sending, receiving]
            done, _ = wait(both, return_when=FIRST_EXCEPTION)
            first = next((error for future in done if (error := future.exception()) is not None), None)
            if first is not None:
                self._rendezvous.abort(route.transfer, f"the transfer failed: {_line(first)}")
                wait(both, timeout=_ABORT_GRACE_S)
                raise _root_cause(first, both)
            return _together(sending.result()), receiving.result()
        except BaseException as error:
            self._rendezvous.abort(route.transfer, _line(error))
            shm_segments.discard(route.transfer)
            self._group += 1
            raise
        finally:
            pool.shutdown(wait=False)

    def _compare(
        self, route: Route, sent: TransferSummary | None, summaries: Sequence[TransferSummary], ranks: Sequence[int]
    ) -> TransferSummary:
        expected = sent or replace(summaries[0], gathered=0, copied=0)
        for rank, summary in zip(ranks, summaries, strict=True):
            if summary != expected:
                raise WeightSyncError(
                    f"{self._engines.role} rank {rank} didn't get the weights of version {route.version} as they were "
                    f"sent by {route.transport}: sent {expected}; received {summary}"
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


def choose_transport(wanted: str, homes: Sequence[Ping], *, keeps: bool, fits: bool) -> str:
    """Return the way for weights from the first of `homes`, the trainer's rank 0, to the others.

    `keeps`: every version has to be kept, which the object store does by itself. `fits`: two buckets fit into the
    shared memory of the trainer's machine. Raises `ValueError` for shared memory and several machines.
    """
    machines = {home.machine: home.node for home in homes}
    nodes = sorted(machines.values())
    if len(set(nodes)) < len(nodes):
        nodes = sorted(f"{node} ({machine[:8]})" for machine, node in machines.items())  # containers with one name
    if wanted == "shared_memory" and len(nodes) > 1:
        raise ValueError(
            f"weight_transport: shared_memory needs actor_train and actor_infer on one machine, they are on "
            f"{', '.join(nodes)}; set it to auto, object_store, broadcast or file"
        )
    if wanted != "auto":
        return wanted
    if len({(home.machine, home.pid) for home in homes}) == 1:
        return "in_process"
    return "shared_memory" if len(nodes) == 1 and fits and not keeps else "object_store"


def _address(homes: Sequence[Ping]) -> str:
    """Return where the workers reach this process."""
    if {home.machine for home in homes} == {machine_id()}:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _root_cause(first: BaseException, calls: Sequence[Future[Any]]) -> BaseException:
    """Return a death, when there is one: peers fail of it, and may say so earlier."""
    errors = [call.exception() for call in calls if call.done()]
    return next((error for error in errors if isinstance(error, WorkerDied)), first)
