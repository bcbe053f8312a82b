"""The worker around an inference engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from roll.configs.catalog.strategy_table import is_lockstep
from roll.configs.schema.rl_config import RLConfig
from roll.distributed.cluster import Cluster
from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.handles import Handle
from roll.distributed.transports import TransferSummary, Transport, receive
from roll.distributed.transports.delta import Delta, WeightCopy
from roll.distributed.worker import Worker, WorkerInfo
from roll.distributed.worker_errors import WorkerFailed
from roll.pipelines.workers.engine_probe import EngineProbes, LoadedCheck
from roll.pipelines.workers.train_worker import resolved_model_args
from roll.strategies import build_engine
from roll.strategies.abilities import BorrowsWeights, CountsUpdates, Sleeps, TakesAdapters
from roll.strategies.base import (
    Completion,
    EngineCounters,
    EngineDied,
    EnginePart,
    EngineSettings,
    InferEngine,
    Request,
)
from roll.strategies.hf.lora import largest_rank
from roll.utils.staging import release


class InferWorker(Worker):
    """One engine."""

    def __init__(self, info: WorkerInfo, config: RLConfig) -> None:
        super().__init__(info)
        self._config = config
        self._start()

    def _start(self) -> None:
        self._received = WeightCopy()
        self.engine = self._build()
        # Sooner than the call to this worker, so that the error says what it was.
        self._probes = EngineProbes(self.engine, timeout=0.9 * self._config.rpc_timeout)

    def _build(self) -> InferEngine:
        config = self._config
        args = resolved_model_args(config, "actor_infer")
        if config.lora_sync == "adapters":
            args = replace(args, lora_rank=largest_rank(config.actor_train.model_args))
        settings = EngineSettings(
            max_running_requests=config.max_running_requests,
            max_sequence_length=config.max_sequence_length,
            seed=config.seed,
            partial_rollout=config.partial_rollout,
            slots=self.info.slots,
            return_routed_experts=config.router_replay,
            update_buffer_bytes=config.model_update_buffer_size_mb * 2**20,
        )
        return build_engine(config.actor_infer, args, settings)

    @dispatch(Dispatch.ONE_TO_ALL)
    def restart(self) -> None:
        """Replace a dead engine by a new one, which has the weights of the model's folder until it gets others."""
        self.engine.close()
        self._start()
        release()  # of a copy of the model that was made again for this

    def close(self) -> None:
        self.engine.close()

    @dispatch(Dispatch.ONE_TO_ALL)
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; those that the engine can't run come back from `poll` as refused."""
        self._probes.submit(requests)

    @dispatch(Dispatch.ONE_TO_ALL)
    def poll(self, budget: float) -> list[Completion]:
        """Work for a while; return what has finished."""
        return self._probes.poll(budget)

    @dispatch(Dispatch.ONE_TO_ALL)
    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """Stop requests."""
        return self.engine.abort(request_ids)

    @dispatch(Dispatch.ONE_TO_ALL)
    def update_weights(
        self, transport: Transport, handles: list[Handle], delta: Delta | None = None
    ) -> TransferSummary:
        """Load new weights; what arrived."""
        transfer = transport.transfer
        check = LoadedCheck(self.engine) if transfer.checksum else None
        load = self._update_adapters if transfer.part == "adapters" else self.engine.update_weights
        with receive(transport, handles, self.info.rank, delta=delta, copy=self._received) as incoming:
            load(transfer.version, check.watch(incoming) if check else incoming)
        summary = incoming.summary()
        if check is not None:
            check.verify(self.info.rank, transfer.version)
        return summary

    @property
    def _update_adapters(self) -> Callable[[int, Iterable[tuple[str, Tensor]]], None]:
        if not isinstance(self.engine, TakesAdapters):
            raise NotImplementedError(f"{type(self.engine).__name__} takes merged weights only")
        return self.engine.update_adapters

    @dispatch(Dispatch.ONE_TO_ALL)
    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these tensors of the trainer from now on, as far as the engine can."""
        if isinstance(self.engine, BorrowsWeights):
            self.engine.borrow_weights(weights)

    @dispatch(Dispatch.ONE_TO_ALL)
    def weight_copy(self) -> str:
        """Return the name of the weights that this worker has a copy of, as it got them; empty: of none."""
        return self._received.name

    @dispatch(Dispatch.ONE_TO_ALL)
    def take_counters(self) -> EngineCounters:
        """Return what weight updates did to responses on their way, since the last call."""
        return self.engine.take_counters() if isinstance(self.engine, CountsUpdates) else EngineCounters()

    @dispatch(Dispatch.ONE_TO_ALL)
    def sleep(self, parts: Sequence[EnginePart]) -> int:
        """Give the memory of these parts back; bytes freed."""
        return self.engine.sleep(parts) if isinstance(self.engine, Sleeps) else 0

    @dispatch(Dispatch.ONE_TO_ALL)
    def wake(self, parts: Sequence[EnginePart]) -> None:
        """Bring these parts back."""
        if isinstance(self.engine, Sleeps):
            self.engine.wake(parts)

    @dispatch(Dispatch.ONE_TO_ALL)
    def probe(self, requests: Sequence[Request], patience: float | None = None) -> list[Completion]:
        """Sample these responses now, whatever else is under way; waits at most `patience` seconds."""
        return self._probes.sample(requests, patience)


class ClusterEngines:
    """The inference cluster as the scheduler sees it (`EngineRanks`)."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def world_size(self) -> int:
        """Return the number of engines."""
        return self._cluster.world_size

    async def submit(self, rank: int, requests: Sequence[Request]) -> None:
        """Queue requests on one engine."""
        await self._cluster.call_rank_async(rank, InferWorker.submit, requests)

    async def poll(self, rank: int, budget: float) -> list[Completion]:
        """Let one engine work."""
        return await self._cluster.call_rank_async(rank, InferWorker.poll, budget)

    async def abort(self, rank: int, request_ids: Sequence[str]) -> list[Completion]:
        """Stop requests on one engine."""
        return await self._cluster.call_rank_async(rank, InferWorker.abort, request_ids)


def engine_died(error: BaseException) -> bool:
    """Return whether an error of the inference cluster says that an engine is gone and a new one may take its place."""
    return isinstance(error, WorkerFailed) and error.type_name == EngineDied.__name__


def uses_lockstep_driver(config: RLConfig) -> bool:
    """Return whether the scheduler decides when engines compute; it doesn't with generation ahead of training."""
    return is_lockstep(config.actor_infer.strategy_args.strategy_name) and config.async_generation_ratio == 0
