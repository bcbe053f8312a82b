"""What runs in this process share: the children that play and score their episodes, and a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
from fork_server import POOLS, ForkServer, forking


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks the children of pools."""
    server = ForkServer(*POOLS)
    yield server
    server.close()


@pytest.fixture(scope="module", autouse=True)
def forked_children(fork_server: ForkServer) -> Iterator[None]:
    """Save every run the imports of its children."""
    with forking(fork_server):
        yield


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """Start one Ray for the runs of a file, whose executors join and leave it; what starts and ends Ray starts its own.

    Workers are processes of their own for every run, as ever.
    """
    from roll.distributed import ray_session
    from roll.distributed.ray_reaper import MARK, start_reaper
    from roll.distributed.ray_session import PrivateFolder, connect, disconnect

    folder = PrivateFolder()
    reaper = start_reaper(folder.path)

    def join(address: str | None, temp: object, options: object) -> None:
        assert address is None and not options, "a run with a cluster of its own"

    try:
        with mock.patch.dict(os.environ, {MARK: str(folder.path)}):
            connect(None, folder.path)
        joined = {"connect": join, "disconnect": lambda: None}
        with mock.patch.multiple(ray_session, **joined):
            yield
    finally:
        disconnect()
        folder.remove()
        os.close(reaper)
