"""What is said of a worker that doesn't answer: its machine, and what Ray and the network know of it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from roll.distributed.cluster import START_TIMEOUT_S
from roll.distributed.placement import RolePlacement
from roll.distributed.ray_cluster import Peer, RayCluster
from roll.distributed.ray_nodes import lost
from roll.distributed.ray_worker import Home
from roll.distributed.worker import Worker
from roll.distributed.worker_errors import Failure, WorkerTimeout

ray = pytest.importorskip("ray")


def home(number: int) -> Home:
    return Home(f"10.0.0.{number}", f"host{number}", 100 + number, f"id{number}")


@pytest.fixture
def nodes(monkeypatch):
    """Ray's records: id1 answers, id2 is cut off, id3 is dead."""
    with socket.create_server(("127.0.0.1", 0)) as answers, socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
        other.close()
        address = {"NodeManagerAddress": "127.0.0.1"}
        records = [
            {"NodeID": "id1", "Alive": True, "NodeManagerPort": answers.getsockname()[1], **address},
            {"NodeID": "id2", "Alive": True, "NodeManagerPort": closed, **address},
            {"NodeID": "id3", "Alive": False, "DeathReasonMessage": "health check failed", **address},
        ]
        monkeypatch.setattr(ray, "nodes", lambda: records)
        yield


def cluster_of(*homes: Home, rpc_timeout: float = 60) -> RayCluster:
    placement = RolePlacement("actor_train", tuple((slot,) for slot in range(len(homes))))
    peers = [Peer(None, Path(), home) for home in homes]
    return RayCluster(placement, Worker, peers, rpc_timeout=rpc_timeout, balance=False)


def test_a_machine_is_alive_unreachable_or_dead(nodes):
    assert lost(home(1), 5) == ""
    cut = lost(home(2), 63.4)
    assert cut.startswith("Its machine host2 (10.0.0.2) can't be reached: nothing answers at 127.0.0.1:")
    assert "though Ray still counts it as alive; its last result came 63 s ago" in cut
    assert "host3 (10.0.0.3) is dead to Ray (health check failed)" in lost(home(3), 5)


def test_the_rank_on_the_machine_that_is_cut_off_is_named_not_the_one_that_waits_for_it(nodes):
    late = cluster_of(home(1), home(2))._late([0, 1], "train_step", 60)
    assert isinstance(late, WorkerTimeout)
    assert late.rank == 1
    assert str(late).startswith(
        "actor_train rank 1 on host2 (10.0.0.2) didn't finish 'train_step' within 60 s. Its machine host2 (10.0.0.2) "
        "can't be reached"
    )
    slow = cluster_of(home(1), home(1))._late([0, 1], "train_step", 60)
    assert "rank 0 on host1 (10.0.0.1) didn't finish" in str(slow)
    assert "raise rpc_timeout" in str(slow)


def test_a_rank_whose_peers_are_cut_off_says_so():
    failure = Failure("RuntimeError", "timed out", "", False).error("actor_train", 0, "train_step")
    assert "still in the call; rpc_timeout bounds it). It is lost" in str(failure.waiting_for([1], "It is lost"))


def test_rpc_timeout_does_not_bound_a_start_unless_it_is_longer(monkeypatch):
    limits = []
    monkeypatch.setattr(Peer, "shell", None, raising=False)

    class Shell:
        def __getattr__(self, _):
            return self

        def remote(self, *_):
            return object()

    monkeypatch.setattr(RayCluster, "_collect", lambda _, refs, call, limit: limits.append((call, limit)) or [home(1)])
    for rpc_timeout in (60, 2 * START_TIMEOUT_S):
        cluster = cluster_of(home(1), rpc_timeout=rpc_timeout)
        cluster._peers[0].shell = Shell()
        cluster.find_homes()
        cluster.reserve_port("127.0.0.1")
        cluster.build([()])
    # An hour, or rpc_timeout where that is two.
    assert limits == [(call, seconds) for seconds in (3600, 7200) for call in ("start", "reserve_port", "__init__")]
