"""Process groups of one role: a port that no other run can take, and an initialisation that can't hang for ever."""

from __future__ import annotations

import socket
from datetime import timedelta

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


def init_process_group(info: WorkerInfo, backend: str, *, timeout: float = 600.0) -> None:
    """Join the process group of the role; does nothing for a single rank.

    `timeout` seconds bound both the meeting of the ranks and every later collective.
    """
    if info.world_size == 1:
        return
    import torch.distributed as dist

    limit = timedelta(seconds=timeout)
    held = _reserved.pop(info.master_port, None) if info.rank == 0 else None
    try:
        store = dist.TCPStore(
            info.master_addr,
            info.master_port,
            info.world_size,
            is_master=info.rank == 0,
            timeout=limit,
            master_listen_fd=held.detach() if held is not None else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise TimeoutError(
            f"{info.role} rank {info.rank} of {info.world_size} waited {timeout:g} s for its peers at "
            f"{info.master_addr}:{info.master_port}; a rank died or never called init_process_group"
        ) from error
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=limit)
