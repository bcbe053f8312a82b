"""The `ray` executor: one process per rank, on one machine or many.

Slots become bundles of one placement group, which reserves them all at once: two roles that wait for each other's
devices can't exist. An actor takes no share of its bundle; colocation is the plan's business, not the scheduler's.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.distributed.cluster import Cluster, Executor
from roll.distributed.placement import RolePlacement, num_slots
from roll.distributed.ray_cluster import Peer, RayCluster
from roll.distributed.ray_reaper import MARK, start_reaper
from roll.distributed.ray_session import PrivateFolder, connect, save_timeline
from roll.distributed.worker import Worker, WorkerInfo
from roll.utils.importing import own_files

_logger = logging.getLogger(__name__)
_BUNDLE_CPU = 0.01
_START_SECONDS = 120.0  # For Ray to give the slots
_LOOPBACK = "127.0.0.1"
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True, order=True)
class _Slot:
    """A device of the cluster. Ordered by machine, then device, which is the order of global slot numbers."""

    node: str
    device: int  # number of the accelerator on its machine
    bundle: int


class RayExecutor(Executor):
    """Starts (or joins) a Ray cluster and reserves every slot that the placements name."""

    def __init__(
        self,
        placements: Sequence[RolePlacement],
        *,
        rpc_timeout: float,
        log_dir: Path | None = None,
        address: str | None = None,
        options: Mapping[str, int] | None = None,
        timeline: Path | None = None,
    ) -> None:
        super().__init__(placements, rpc_timeout=rpc_timeout)
        self._timeline = timeline
        self._group: Any = None
        self._own_ray = address is None
        self._temp: PrivateFolder | None = PrivateFolder()
        self._reaper = start_reaper(self._temp.path) if self._own_ray and sys.platform == "linux" else None
        os.environ[MARK] = str(self._temp.path)
        try:
            connect(address, self._temp.path, options)
        except BaseException:
            self._end_session(self._temp)
            raise
        atexit.register(self.shutdown)
        self._log_dir = (log_dir or self._temp.path / "workers").absolute()
        try:
            self._accelerated, self._slots = self._reserve(num_slots(placements))
        except BaseException:
            self.shutdown()
            raise

    def _start(
        self, placement: RolePlacement, worker_cls: type[Worker], init_args: tuple[Any, ...], calls: Mapping[str, Any]
    ) -> Cluster:
        peers = [self._start_shell(placement, rank) for rank in range(placement.world_size)]
        cluster = RayCluster(placement, worker_cls, peers, **calls)
        self._clusters.append(cluster)
        try:
            self._build(cluster, init_args)
        except BaseException:
            cluster.kill()
            raise
        return cluster

    def shutdown(self) -> None:
        import ray

        temp, self._temp = self._temp, None
        if temp is None:
            return
        atexit.unregister(self.shutdown)
        if self._timeline is not None and self._clusters:
            save_timeline(self._timeline)
        super().shutdown()
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
        ray.shutdown()  # its last process ends a cluster of our own
        self._end_session(temp)

    def _end_session(self, temp: PrivateFolder) -> None:
        temp.remove()
        os.environ.pop(MARK, None)
        if self._reaper is not None:
            os.close(self._reaper)
            self._reaper = None

    def _reserve(self, count: int) -> tuple[bool, list[_Slot]]:
        """Reserve the slots; whether they are accelerators, and the device behind each slot."""
        import ray
        from ray.util.placement_group import placement_group, placement_group_table

        total = ray.cluster_resources()
        gpus = int(total.get("GPU", 0))
        if not count:
            return gpus > 0, []
        if 0 < gpus < count:
            raise ValueError(
                f"the placements name device slots 0 to {count - 1}, but the cluster has {gpus} GPU(s); name "
                "fewer in the roles' device_mapping, or hide the GPUs (CUDA_VISIBLE_DEVICES='') for CPU slots"
            )
        shape = {"CPU": _BUNDLE_CPU, "GPU": 1.0} if gpus else {"CPU": _BUNDLE_CPU}
        self._group = placement_group([shape] * count, strategy="PACK")
        if not self._group.wait(_START_SECONDS):
            raise TimeoutError(
                f"Ray didn't give {count} slots of {shape} in {_START_SECONDS:g} s; it "
                f"has {dict(total)}, free now: {dict(ray.available_resources())}; is another job using it?"
            )
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        devices = self._devices(count) if gpus else list(range(count))
        return gpus > 0, sorted(_Slot(nodes[bundle], devices[bundle], bundle) for bundle in range(count))

    def _devices(self, count: int) -> list[int]:
        """Return the accelerator that Ray gave each bundle; only a task inside the bundle can tell."""
        import ray

        def which() -> list[int]:
            return [int(gpu) for gpu in ray.get_gpu_ids()]

        probe = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(which)
        refs = [probe.options(scheduling_strategy=self._in_bundle(i)).remote() for i in range(count)]
        return [ids[0] for ids in ray.get(refs, timeout=_START_SECONDS)]

    def _in_bundle(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def _start_shell(self, placement: RolePlacement, rank: int) -> Peer:
        import ray

        from roll.distributed.ray_worker import WorkerShell

        name = f"{placement.role}-{rank}"
        log_file = self._log_dir / f"{name}.log"
        slots = [self._slots[slot] for slot in placement.ranks[rank]]
        if len({slot.node for slot in slots}) > 1:
            raise ValueError(
                f"{placement.role} rank {rank} has slots {list(placement.ranks[rank])} on different "
                "machines; num_gpus_per_worker must divide the devices of one machine"
            )
        runtime_env: dict[str, Any] = {"env_vars": self._env(placement, slots)}
        if rank in placement.nsight:
            runtime_env["nsight"] = dict(placement.nsight[rank])
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": placement.max_concurrency,
            "runtime_env": runtime_env,
            "scheduling_strategy": self._in_bundle(slots[0].bundle) if slots else "SPREAD",
        }
        shell = ray.remote(WorkerShell).options(**options).remote(name, log_file)
        return Peer(shell=shell, log_file=log_file)

    def _env(self, placement: RolePlacement, slots: Sequence[_Slot]) -> dict[str, str]:
        env = {}
        if self._own_ray:
            # The workers import what the controller imports; machines of a joined cluster have their own
            # installation.
            env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if _THREADS not in os.environ:
            env[_THREADS] = str(self._threads(len(slots)))
        if self._accelerated:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(slot.device) for slot in slots)
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        return {**env, **placement.env}

    def _threads(self, slots: int) -> int:
        """Threads of one rank: colocated roles take turns, so the cores are shared out by slot, not by process."""
        per_node = max((sum(s.node == node for s in self._slots) for node in {s.node for s in self._slots}), default=1)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // per_node) * max(1, slots)

    def _build(self, cluster: RayCluster, init_args: tuple[Any, ...]) -> None:
        from ray import cloudpickle

        placement = cluster.placement
        homes = cluster.find_homes()
        # Ranks on one machine talk over loopback, which nobody else can reach.
        local = len({home.node for home in homes}) == 1
        master = _LOOPBACK if local else homes[0].node
        port = cluster.reserve_port(master)
        _logger.info("%s: %d rank(s) on %s", placement.role, len(homes), sorted({home.host for home in homes}))
        specs = []
        for rank, slots in enumerate(placement.ranks):
            info = WorkerInfo(placement.role, rank, placement.world_size, master, port, slots, local_rank=0)
            env = {
                "MASTER_ADDR": master,
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(placement.world_size),
                "LOCAL_RANK": "0",  # a worker sees its own devices alone
            }
            if local and sys.platform == "linux":
                env["GLOO_SOCKET_IFNAME"] = "lo"
            specs.append((env, own_files(), cloudpickle.dumps((cluster.worker_cls, info, init_args))))
        cluster.build(specs)
