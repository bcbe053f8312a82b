"""The `ray` executor: one process per rank, on one machine or many.

The devices of a machine are one bundle of a placement group (`ray_slots.py`). An actor takes no share of its bundle;
colocation is the plan's business, not the scheduler's.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.distributed.cluster import PEERS_SHARE, Cluster, Executor
from roll.distributed.placement import RolePlacement, num_slots
from roll.distributed.rank_parent import THREADS, rank_threads, rank_variables
from roll.distributed.ray_cluster import Peer, RayCluster
from roll.distributed.ray_session import RaySession, early_session, save_timeline
from roll.distributed.ray_slots import Reservation, Slot, in_bundle, reserve, run_on_each
from roll.distributed.worker import Worker, WorkerInfo
from roll.utils.importing import own_files

_logger = logging.getLogger(__name__)
_START_SECONDS = 120.0  # For Ray to give the slots
_MACHINE_SECONDS = 300.0  # For a machine to start a process, import what it asks for, and answer
_LOOPBACK = "127.0.0.1"
_FORWARDED = ("NCCL_", "TORCH_NCCL_", "GLOO_")
"""Beginnings of the variables that choose networks: machines that were joined don't have those of this process."""
_DOLLAR = "ROLL_DOLLAR"


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
        slots_per_machine: int | None = None,
    ) -> None:
        super().__init__(placements, rpc_timeout=rpc_timeout)
        self._timeline = timeline
        self._reserved = Reservation(False, ())
        self._begun: dict[str, list[Peer]] = {}
        self._own_ray = address is None
        session = (early_session() if self._own_ray else None) or RaySession(address, options)
        session.connect()
        self._session: RaySession | None = session
        atexit.register(self.shutdown)
        self._log_dir = (log_dir or session.path / "workers").absolute()
        try:
            machine = None if self._own_ray else slots_per_machine
            self._reserved = reserve(num_slots(placements), machine, _START_SECONDS)
        except BaseException:
            self.shutdown()
            raise

    def begin(self, roles: Collection[str]) -> None:
        for role in roles:
            placement = self.placements[role]
            self._begun[role] = [self._start_shell(placement, rank) for rank in range(placement.world_size)]

    def _start(
        self, placement: RolePlacement, worker_cls: type[Worker], init_args: tuple[Any, ...], calls: Mapping[str, Any]
    ) -> Cluster:
        if placement.role not in self._begun:
            self.begin([placement.role])
        peers = self._begun.pop(placement.role)
        cluster = RayCluster(placement, worker_cls, peers, **calls)
        self._clusters.append(cluster)
        try:
            self._build(cluster, init_args)
        except BaseException:
            cluster.kill()
            raise
        return cluster

    def on_each_machine(
        self, function: Callable[..., Any], *args: Any, roles: Collection[str] | None = None
    ) -> dict[str, Any]:
        slots = None
        if roles is not None:
            slots = {slot for role in roles for rank in self.placements[role].ranks for slot in rank}
        answers = run_on_each(self._reserved, function, args, _MACHINE_SECONDS, slots)
        return answers or super().on_each_machine(function, *args)

    def shutdown(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        atexit.unregister(self.shutdown)
        if self._timeline is not None and self._clusters:
            save_timeline(self._timeline)
        super().shutdown()
        if self._reserved.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._reserved.group)
        session.close()

    def _start_shell(self, placement: RolePlacement, rank: int) -> Peer:
        import ray

        from roll.distributed.ray_worker import WorkerShell

        name = f"{placement.role}-{rank}"
        log_file = self._log_dir / f"{name}.log"
        slots = [self._reserved.slots[slot] for slot in placement.ranks[rank]]
        if len({slot.node for slot in slots}) > 1:
            raise ValueError(
                f"{placement.role} rank {rank} has slots {list(placement.ranks[rank])} on different "
                "machines; num_gpus_per_worker must divide the devices of one machine"
            )
        variables = self._env(placement, slots)
        runtime_env: dict[str, Any] = {"env_vars": _unexpanded(variables)}
        parent = self._session.rank_parent if self._session is not None and not self._reserved.accelerated else None
        if rank in placement.nsight:
            runtime_env["nsight"] = dict(placement.nsight[rank])
        elif parent is not None and (command := parent.command(variables)) is not None:
            runtime_env["py_executable"] = command
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": placement.max_concurrency,
            "runtime_env": runtime_env,
            "scheduling_strategy": in_bundle(self._reserved.group, slots[0].bundle) if slots else "SPREAD",
        }
        shell = ray.remote(WorkerShell).options(**options).remote(name, log_file, os.getcwd())
        return Peer(shell=shell, log_file=log_file)

    def _env(self, placement: RolePlacement, slots: Sequence[Slot]) -> dict[str, str]:
        env = {}
        if self._own_ray:
            # The workers import what the controller imports; machines of a joined cluster have their own
            # installation.
            env.update(rank_variables())
        if THREADS not in os.environ:
            # Colocated roles take turns, so the cores are shared out by slot, not by process.
            per_machine = max(Counter(slot.node for slot in self._reserved.slots).values(), default=1)
            env[THREADS] = str(rank_threads(len(slots), per_machine))
        if self._reserved.accelerated:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(slot.device for slot in slots)
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        env.update({name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)})
        return {**env, **placement.env}

    def _build(self, cluster: RayCluster, init_args: tuple[Any, ...]) -> None:
        from ray import cloudpickle

        placement = cluster.placement
        homes = cluster.find_homes()
        # Ranks on one machine talk over loopback, which nobody else can reach.
        local = len({home.machine for home in homes}) == 1
        master = _LOOPBACK if local else homes[0].node
        port = cluster.reserve_port(master)
        _logger.info("%s: %d rank(s) on %s", placement.role, len(homes), sorted({home.host for home in homes}))
        specs = []
        for rank, slots in enumerate(placement.ranks):
            limits = (cluster.peer_timeout, PEERS_SHARE * cluster.start_timeout)
            info = WorkerInfo(placement.role, rank, placement.world_size, master, port, slots, 0, *limits)
            env = {
                **{name: value for name, value in placement.env.items() if "$" in value},
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


def _unexpanded(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables for Ray, which replaces `$NAME` by the variable of its own process, as in a shell.

    It also drops `${NAME}`, whatever is written: `_build` sets values with a dollar sign again.
    """
    if not any("$" in value for value in env.values()):
        return dict(env)
    return {_DOLLAR: "$", **{name: value.replace("$", f"${{{_DOLLAR}}}") for name, value in env.items()}}
