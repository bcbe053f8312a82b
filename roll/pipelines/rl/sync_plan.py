"""How weights travel in a run: by which transport, and which ranks of the trainer send to which engines.

Found out before the first sync, by asking the workers where they are and what their machines have room for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll.configs.catalog.entries import implementation
from roll.configs.catalog.transport_table import MAX_SENDERS, TRANSPORTS, Lane, lanes_between
from roll.configs.schema.rl_config import RLConfig
from roll.distributed.cluster import Cluster
from roll.distributed.transports import Transport
from roll.distributed.transports.rendezvous import RendezvousStore
from roll.distributed.worker import Ping, Worker, machine_id
from roll.pipelines.workers.train_worker import TrainWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """What is the same for all transfers of a run, and what a transport needs: `Transport.build` picks it by name."""

    transport: type[Transport]
    bucket_bytes: int
    timeout: float
    checksum: bool
    keep: bool
    delta: bool
    """Only changes are sent."""
    lanes: tuple[Lane, ...]
    """Who sends to whom."""
    group: str = ""
    """Name of the process group of a broadcast, which is another one when an engine was replaced."""
    folder: str
    store: RendezvousStore | None
    """Where the ends of a streaming transport meet."""

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Return the store's host and port."""
        assert self.store is not None, "only a streaming transport meets"
        return self.store.address

    def to_engine(self, rank: int, *, retained: bool) -> SyncPlan:
        """Return the plan for one engine that gets a version again, from the trainer or by `retained` handles."""
        name = self.transport.name
        if name == "broadcast" or (retained and (name != "file" or self.delta)):
            name = "object_store"
        lanes = tuple(replace(lane, engines=(rank,)) for lane in self.lanes if rank in lane.engines)
        return replace(self, transport=transport_class(name), lanes=lanes, keep=self.keep and not retained)


def transport_class(name: str) -> type[Transport]:
    """Return the class of a transport."""
    transport: type[Transport] = implementation(TRANSPORTS, name, key="weight_transport")
    return transport


def make_plan(config: RLConfig, trainer: Cluster, engines: Cluster, *, keeps: bool) -> SyncPlan:
    """Ask the workers, and decide; `keeps`: every version has to be kept for an engine that comes later.

    Raises `ValueError` if the transport doesn't fit where the workers are.
    """
    homes = [trainer.call_rank(0, Worker.ping), *engines.call(Worker.ping)]
    bucket_bytes = config.model_update_buffer_size_mb * 2**20
    # What the workers' machine has; this process may run on another one, without accelerators and with less memory.
    free = trainer.call_rank(0, Worker.free_shared_memory)
    name = choose_transport(config.weight_transport, homes, keeps=keeps, fits=free > 2 * bucket_bytes)
    if name == "broadcast" and trainer.call_rank(0, Worker.device) != "cpu":
        _check_separate(trainer, engines)
    transport = transport_class(name)
    store = RendezvousStore(_address(homes)) if transport.streams else None
    # All senders together may take half of what is free.
    lanes = choose_lanes(name, trainer, engines, most=min(MAX_SENDERS, free // (4 * bucket_bytes)))
    logger.info("weights travel by %s from %d rank(s)", name, sum(len(lane.senders) for lane in lanes))
    delta = config.delta_weight_sync and name != "in_process"
    if delta:
        # What has changed is little, and rank 0 alone has the copy that it is found by.
        lanes = (Lane((0,), tuple(range(engines.world_size))),)
    return SyncPlan(
        transport=transport,
        bucket_bytes=bucket_bytes,
        timeout=config.rpc_timeout,
        checksum=config.verify_weight_sync != "off",
        keep=keeps,
        delta=delta,
        lanes=lanes,
        folder=str((config.output_path / "weights").absolute()),
        store=store,
    )


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


def choose_lanes(transport: str, trainer: Cluster, engines: Cluster, *, most: int = MAX_SENDERS) -> tuple[Lane, ...]:
    """Return who sends to whom, at most so many ranks to one engine."""
    ranks, receivers = trainer.placement.ranks, engines.placement.ranks
    if transport != "shared_memory":
        return lanes_between(transport, {0: ranks[0]}, receivers, on_accelerator=False)
    homes = trainer.call(Worker.ping)
    near = {rank: ranks[rank] for rank, home in enumerate(homes) if home.machine == homes[0].machine}
    if not trainer.call_rank(0, TrainWorker.sends_from_every_rank):
        near = {0: ranks[0]}
    on_accelerator = trainer.call_rank(0, Worker.device) != "cpu"
    on_accelerator &= not trainer.call_rank(0, TrainWorker.gathers_on_host)
    return lanes_between(transport, near, receivers, on_accelerator=on_accelerator, most=max(1, most))


def _check_separate(trainer: Cluster, engines: Cluster) -> None:
    shared = {s for rank in trainer.placement.ranks for s in rank} & {
        s for rank in engines.placement.ranks for s in rank
    }
    if shared:
        raise ValueError(
            f"weight_transport: broadcast needs accelerators of their own for actor_train and actor_infer, they "
            f"share {sorted(shared)}; set it to auto or shared_memory, or give them different device_mappings"
        )


def _address(homes: Sequence[Ping]) -> str:
    """Return where the workers reach this process."""
    if {home.machine for home in homes} == {machine_id()}:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())
