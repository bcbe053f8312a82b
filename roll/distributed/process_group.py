"""Process groups of one role: a port that no other run can take, and an initialisation that can't hang for ever."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from roll.distributed.worker import WorkerInfo

_reserved: dict[int, socket.socket] = {}


def reserve_port(host: str) -> int:
    """Listen on a free port of `host` and keep it: rank 0's rendezvous takes the socket over, so nobody can race it."""
    server = socket.create_server((host, 0), backlog=2048)
    port: int = server.getsockname()[1]
    _reserved[port] = server
    return port


def connect(info: WorkerInfo, backend: str) -> None:
    """Join the process group of the role, for libraries that insist on one; a single rank forms it alone.

    Roles that share a process share its group.
    """
    import torch.distributed as dist

    if info.world_size > 1:
        init_process_group(info, backend)
    elif not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def init_process_group(info: WorkerInfo, backend: str, *, timeout: float | None = None) -> None:
    """Join the process group of the role; does nothing for a single rank.

    `timeout` seconds, by default those of `info` for a start, bound both the meeting of the ranks and every later
    collective; see `limit_collectives`.

    Raises:
        TimeoutError: not all ranks came; names those that didn't.
    """
    if info.world_size == 1:
        return
    import torch.distributed as dist

    seconds = next(s for s in (timeout, info.start_timeout, info.timeout) if s is not None)
    limit = timedelta(seconds=seconds)
    held = _reserved.pop(info.master_port, None) if info.rank == 0 else None
    try:
        store = dist.TCPStore(
            info.master_addr,
            info.master_port,
            info.world_size,
            is_master=info.rank == 0,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=held.detach() if held is not None else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if info.rank == 0:  # which waits for nobody here: its port is taken, and torch says so
            raise
        raise _absent_error(info, seconds, [0]) from error
    _meet(store, info, seconds)
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=limit)


def _meet(store: Any, info: WorkerInfo, seconds: float) -> None:
    """Wait until every rank has set its key in the store."""
    import torch.distributed as dist

    keys = [f"roll/here/{rank}" for rank in range(info.world_size)]
    store.set(keys[info.rank], "")
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        try:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        except (dist.DistNetworkError, dist.DistStoreError):
            absent = [0]  # it hosts the store, which is gone
        raise _absent_error(info, seconds, absent) from error


def _absent_error(info: WorkerInfo, seconds: float, absent: Sequence[int]) -> TimeoutError:
    ranks = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent[:16]))}"
    more = f" and {len(absent) - 16} more" if len(absent) > 16 else ""
    return TimeoutError(
        f"{info.role} rank {info.rank} of {info.world_size} waited {seconds:g} s for {ranks}{more} at "
        f"{info.master_addr}:{info.master_port}; each died or is still loading: see its log, or raise rpc_timeout"
    )


def limit_collectives(seconds: float) -> None:
    """Let every collective of this process, in whatever group, wait at most `seconds` for the other ranks.

    Libraries make groups of their own, with torch's default of 10 or 30 minutes (torch.distributed.new_group).
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    from torch.distributed import distributed_c10d as c10d

    for group in list(c10d._world.pg_map):
        if dist.get_backend(group) != "fake":
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)
