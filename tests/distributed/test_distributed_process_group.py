"""How long ranks wait for each other, and who they say was absent."""

from __future__ import annotations

import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from roll.distributed.process_group import init_process_group, limit_collectives, reserve_port
from roll.distributed.worker import WorkerInfo


def test_ranks_that_never_come_are_named_by_each_that_waits():
    port = reserve_port("127.0.0.1")
    info = WorkerInfo("actor_train", 0, 4, "127.0.0.1", port, (0,), 0, timeout=1.0)
    said = {}

    def come(rank):
        try:
            init_process_group(replace(info, rank=rank), "gloo")
        except TimeoutError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said[0].startswith("actor_train rank 0 of 4 waited 1 s for ranks 1, 3 at 127.0.0.1:")
    assert said[0].endswith("see its log, or raise rpc_timeout")
    assert "waited 1 s for rank" in said[2]


def test_a_start_has_a_limit_of_its_own():
    """`timeout` follows rpc_timeout, which may be a minute; ranks that load for longer still meet."""
    port = reserve_port("127.0.0.1")
    info = WorkerInfo("actor_train", 0, 2, "127.0.0.1", port, (0,), 0, timeout=60.0, start_timeout=1.0)
    with pytest.raises(TimeoutError, match="waited 1 s for rank 1"):
        init_process_group(info, "gloo")


def test_without_rank_zero_it_is_rank_zero_that_is_named():
    info = WorkerInfo("critic", 1, 2, "127.0.0.1", 9, (1,), 0, timeout=1.0)
    with pytest.raises(TimeoutError, match="critic rank 1 of 2 waited 1 s for rank 0 at 127.0.0.1:9"):
        init_process_group(info, "gloo")


def limits_of_groups() -> list[float]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = dist.new_group([0])
    limit_collectives(54.0)
    groups = (dist.group.WORLD, own)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_groups_that_libraries_make_wait_as_long_as_the_others():
    # In a process of its own: another test may have left this one in a default group.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(limits_of_groups).result(60) == [54.0, 54.0]
