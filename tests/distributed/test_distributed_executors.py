"""One contract for both executors, then what only processes can do. All Ray tests share one cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from distributed_workers import Clumsy, Echo, Pair, Sampler, Trainer, weights
from torch import Tensor

from roll.distributed.cluster import Cluster, Executor
from roll.distributed.executors import make_executor
from roll.distributed.handles import put, resolve
from roll.distributed.placement import RolePlacement
from roll.distributed.rank_parent import THREADS, rank_threads
from roll.distributed.ray_session import begun_session
from roll.distributed.weights import weights_checksum
from roll.distributed.worker_errors import WorkerDied, WorkerFailed, WorkerRefused, WorkerTimeout
from roll.types.ragged import Ragged, token_column

SOLO = [
    RolePlacement("solo", ((0,),)),
    RolePlacement("trainer", ((0,),)),
    RolePlacement("sampler", ((1,),)),
    RolePlacement("broken", ((0,),)),
]
DUO = RolePlacement("duo", ((0,), (1,)), {"ROLL_TEST_NOTE": "a b", "ROLL_TEST_DOLLARS": "$HOME ${HOME} $"})
PEERS = RolePlacement("peers", ((0,), (1,)))
LATE = RolePlacement("late", ((0,), (1,)))
VICTIMS = [RolePlacement(f"victim{i}", ((0,), (1,))) for i in range(4)]
SLOTLESS = RolePlacement("slotless", ((),))


@dataclass(frozen=True, eq=False, kw_only=True)
class Values(Ragged):
    value: Tensor | None = token_column()


def batch_of(*lengths: int) -> Values:
    total = sum(lengths)
    return Values(
        row_ids=tuple(f"row{i}" for i in range(len(lengths))),
        offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        value=torch.arange(total, dtype=torch.float32),
    )


@pytest.fixture(scope="module")
def ray_executor() -> Iterator[Executor]:
    """Ray, and a warm parent from which those ranks are forked that have no variables of their own."""
    pytest.importorskip("ray")
    roles = [*SOLO, DUO, PEERS, LATE, *VICTIMS, SLOTLESS]
    session = begun_session({}, ["distributed_workers"], {THREADS: str(rank_threads(1, 2))})
    with session, make_executor("ray", roles, rpc_timeout=60) as executor:
        yield executor


@pytest.fixture(scope="module", params=["inline", "ray"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "ray":
        yield request.getfixturevalue("ray_executor")
    else:
        with make_executor("inline", SOLO, rpc_timeout=60) as made:
            yield made


@pytest.fixture(scope="module")
def solo(executor: Executor) -> Cluster:
    return executor.create_cluster(SOLO[0], Echo, ("good day",))


@pytest.fixture(scope="module")
def duo(ray_executor: Executor) -> Cluster:
    return ray_executor.create_cluster(DUO, Echo)


def victims(ray_executor: Executor, number: int) -> Cluster:
    return ray_executor.create_cluster(VICTIMS[number], Echo)


# --- the contract


def test_calls_reach_the_worker_with_what_it_was_built_with(solo: Cluster) -> None:
    assert (solo.role, solo.world_size) == ("solo", 1)
    assert solo.call(Echo.greet, "you") == ["good day you from solo 0"]
    info = solo.call(Echo.first)
    assert (info.role, info.rank, info.world_size, info.slots, info.local_rank) == ("solo", 0, 1, (0,), 0)
    assert info.timeout == 0.9 * 60
    assert solo.call_rank(0, Echo.greet, "me") == "good day me from solo 0"
    assert solo.call(Echo.ping)[0].pid > 0


def test_a_split_call_gives_rows_metrics_or_nothing(solo: Cluster) -> None:
    batch = batch_of(3, 1, 2)
    doubled = solo.call(Echo.double, batch, 10.0)
    assert doubled.row_ids == batch.row_ids
    assert doubled.value.tolist() == [0, 10, 20, 30, 40, 50]
    assert solo.call(Echo.count, batch).result() == {"rows": 3, "tokens_max": 6, "tokens_min": 6}
    assert solo.call(Echo.swallow, batch) is None


def test_a_value_error_of_the_worker_stays_one_and_names_role_rank_and_call(solo: Cluster) -> None:
    with pytest.raises(ValueError, match=r"solo rank 0 failed in 'refuse': ValueError: can't do this") as caught:
        solo.call(Echo.refuse, "this")
    assert isinstance(caught.value, WorkerRefused)
    assert (caught.value.role, caught.value.rank, caught.value.type_name) == ("solo", 0, "ValueError")
    assert "distributed_workers.py" in caught.value.remote_traceback
    assert solo.call(Echo.greet, "again") == ["good day again from solo 0"]


def test_another_exception_is_a_failed_worker_and_no_value_error(solo: Cluster) -> None:
    with pytest.raises(WorkerFailed, match="KeyError: 'absent'") as caught:
        solo.call(Echo.lookup)
    assert not isinstance(caught.value, ValueError)
    assert "lookup" in caught.value.remote_traceback


def test_a_constructor_that_raises_is_reported_like_a_call(executor: Executor) -> None:
    with pytest.raises(WorkerRefused, match="broken rank 0 failed in '__init__': ValueError: greeting 'refuse'"):
        executor.create_cluster(SOLO[3], Echo, ("refuse",))


def test_calls_that_make_no_sense_are_refused_before_they_are_sent(solo: Cluster) -> None:
    with pytest.raises(ValueError, match=r"Echo, which has no 'receive'; it has .*'greet'"):
        solo.call(Sampler.receive, [], 0)
    with pytest.raises(ValueError, match=r"Worker.close can't be called on a cluster: declare it"):
        solo.call(Echo.close)
    with pytest.raises(ValueError, match="solo has ranks 0 to 0, got 1"):
        solo.call_rank(1, Echo.greet, "x")
    with pytest.raises(TypeError, match=r"solo.double splits its first argument.*: expected a Ragged, got str"):
        solo.call(Echo.double, "text")
    with pytest.raises(TypeError, match=r"returns a Ragged, Metrics or None on every rank, got \['str'\]"):
        solo.call(Echo.answer_wrongly, batch_of(1))


def test_a_worker_that_fails_to_close_is_a_warning_and_keeps_nobody_alive(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = executor.create_cluster(SOLO[3], Clumsy)
    with caplog.at_level(logging.WARNING):
        cluster.shutdown()
        cluster.shutdown()
    assert caplog.text.count("broken rank 0 failed in 'close': OSError: the engine doesn't answer") == 1
    with pytest.raises(RuntimeError, match="broken was shut down"):
        cluster.call(Echo.greet, "x")


def test_an_undeclared_role_is_refused(executor: Executor) -> None:
    with pytest.raises(ValueError, match="'other' isn't among the executor's placements"):
        executor.create_cluster(RolePlacement("other", ((0,),)), Echo)


def test_the_event_loop_runs_on_while_a_worker_works(solo: Cluster) -> None:
    async def both() -> tuple[float, int]:
        ticks = 0
        call = asyncio.ensure_future(solo.call_rank_async(0, Echo.sleep, 0.3))
        while not call.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return call.result(), ticks

    seconds, ticks = asyncio.run(both())
    assert seconds == 0.3
    assert ticks > 5


def test_asynchronous_calls_of_one_rank_run_in_order_and_carry_errors(solo: Cluster) -> None:
    async def several() -> list[Any]:
        calls = [solo.call_rank_async(0, Echo.greet, str(i)) for i in range(5)]
        calls.append(solo.call_rank_async(0, Echo.refuse, "that"))
        return await asyncio.gather(*calls, return_exceptions=True)

    *greetings, error = asyncio.run(several())
    assert greetings == [f"good day {i} from solo 0" for i in range(5)]
    assert isinstance(error, WorkerRefused)
    assert "can't do that" in str(error)


def test_an_asynchronous_call_that_hangs_times_out_naming_what_it_did(solo: Cluster) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"solo rank 0 didn't finish 'sleep' within 0.2 s.*raise rpc_timeout") as e:
        asyncio.run(solo.call_rank_async(0, Echo.sleep, 1.0, timeout=0.2))
    assert time.monotonic() - start < 1
    assert "in sleep" in e.value.doing
    assert solo.call(Echo.greet, "after") == ["good day after from solo 0"]


def test_payloads_travel_by_handle(executor: Executor) -> None:
    trainer = executor.create_cluster(SOLO[1], Trainer)
    sampler = executor.create_cluster(SOLO[2], Sampler)
    handle = put([1, 2])
    assert sampler.call(Sampler.read, handle) == [[1, 2]]
    published = trainer.call(Trainer.publish, "from the trainer")
    assert sampler.call(Sampler.read, published) == [{"text": "from the trainer"}]
    assert resolve(published) == {"text": "from the trainer"}

    expected = weights_checksum(weights())
    for bucket_bytes in (1, 200, 10**9):
        handles = trainer.call(Trainer.send, bucket_bytes, 3)
        assert len(handles) == {1: 7, 200: 3, 10**9: 1}[bucket_bytes]
        assert sampler.call(Sampler.receive, handles, 3) == [expected]
    with pytest.raises(WorkerRefused, match="expected weights of version 4, bucket 0 holds 3"):
        sampler.call(Sampler.receive, handles, 4)


# --- inline alone


def test_a_plain_inline_call_runs_on_the_callers_thread_so_that_breakpoints_work() -> None:
    with make_executor("inline", SOLO, rpc_timeout=60) as inline:
        cluster = inline.create_cluster(SOLO[0], Echo)
        assert cluster.call(Echo.thread) == threading.current_thread().name
        assert asyncio.run(cluster.call_rank_async(0, Echo.thread)) == "solo-0"


def test_a_plain_inline_call_waits_for_a_running_asynchronous_one_but_not_for_ever() -> None:
    with make_executor("inline", SOLO, rpc_timeout=60) as inline:
        cluster = inline.create_cluster(SOLO[0], Echo)

        async def overlap() -> None:
            call = asyncio.ensure_future(cluster.call_rank_async(0, Echo.sleep, 0.5))
            await asyncio.sleep(0.1)
            with pytest.raises(WorkerTimeout, match="'greet' within 0.05 s"):
                cluster.call(Echo.greet, "x", timeout=0.05)
            assert cluster.call(Echo.greet, "x") == ["hello x from solo 0"]
            await call

        asyncio.run(overlap())


def test_inline_keeps_the_original_exception_as_the_cause() -> None:
    with make_executor("inline", SOLO, rpc_timeout=60) as inline:
        cluster = inline.create_cluster(SOLO[0], Echo)
        with pytest.raises(WorkerFailed) as caught:
            cluster.call(Echo.lookup)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_cluster_that_was_shut_down_says_so() -> None:
    inline = make_executor("inline", SOLO, rpc_timeout=60)
    cluster = inline.create_cluster(SOLO[0], Echo)
    inline.shutdown()
    inline.shutdown()
    with pytest.raises(RuntimeError, match="solo was shut down"):
        cluster.call(Echo.greet, "x")


# --- processes


def test_two_ranks_share_a_batch_by_tokens_and_give_rows_back_in_order(duo: Cluster) -> None:
    # 10 tokens in four rows: 4 + 1 against 3 + 2 is even, the cut in the middle (4 + 3 against 2 + 1) isn't.
    batch = batch_of(4, 3, 2, 1)
    assert duo.call(Echo.count, batch).result() == {"rows": 4, "tokens_max": 5, "tokens_min": 5}
    doubled = duo.call(Echo.double, batch)
    assert doubled.row_ids == batch.row_ids
    assert doubled.value.tolist() == [2.0 * i for i in range(10)]
    # One row for two ranks: the second takes part with none.
    assert duo.call(Echo.double, batch_of(5)).value.tolist() == [2.0 * i for i in range(5)]


def test_results_come_in_rank_order_from_processes_of_their_own(duo: Cluster) -> None:
    pings = duo.call(Echo.ping)
    assert [ping.rank for ping in pings] == [0, 1]
    assert len({os.getpid(), *(ping.pid for ping in pings)}) == 3


def test_the_environment_stands_before_anything_is_imported(duo: Cluster) -> None:
    names = ["ROLL_TEST_NOTE", "ROLL_TEST_DOLLARS", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK"]
    first, second = duo.call(Echo.environment, names)
    assert first["torch_was_loaded"] is False
    assert first["ROLL_TEST_NOTE"] == "a b"
    assert first["ROLL_TEST_DOLLARS"] == "$HOME ${HOME} $"
    # Two slots on this machine: each rank has half the cores.
    assert int(first["OMP_NUM_THREADS"]) == int(
        os.environ.get("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // 2))
    )
    assert [(e["RANK"], e["WORLD_SIZE"]) for e in (first, second)] == [("0", "2"), ("1", "2")]
    assert first["LOCAL_RANK"] == second["LOCAL_RANK"] == "0"


def test_ranks_are_forked_but_for_those_with_variables_of_their_own(ray_executor: Executor, duo: Cluster) -> None:
    slotless = ray_executor.create_cluster(SLOTLESS, Echo)
    parent = psutil.Process(slotless.call(Echo.ping)[0].pid).parent()
    assert "rank_parent" in " ".join(parent.cmdline())
    assert {psutil.Process(ping.pid).parent().name() for ping in duo.call(Echo.ping)} == {"raylet"}


def test_ranks_meet_in_a_process_group(duo: Cluster) -> None:
    assert duo.call(Echo.all_reduce) == [3.0, 3.0]  # 1 + 2


def test_a_role_without_slots_runs_too(ray_executor: Executor) -> None:
    cluster = ray_executor.create_cluster(SLOTLESS, Echo)
    assert cluster.call(Echo.first).slots == ()


def test_rays_ports_are_on_loopback(duo: Cluster) -> None:
    """Ray has no authentication: whoever reaches one of its ports can run code."""
    assert duo.placement.world_size == 2
    me = psutil.Process()
    listening = {
        (process.name(), connection.laddr)
        for process in (me, *me.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) >= 7
    assert {address.ip.removeprefix("::ffff:") for _, address in listening} == {"127.0.0.1"}, listening


def test_peers_of_one_shard_get_the_same_rows_and_the_collecting_one_answers(ray_executor: Executor) -> None:
    peers = ray_executor.create_cluster(PEERS, Pair)
    assert (peers.world_size, peers.dp_size) == (2, 1)
    assert peers.call(Pair.count, batch_of(2, 1)).result() == {"rows": 2, "tokens_max": 3, "tokens_min": 3}
    with pytest.raises(WorkerFailed, match=r"peers rank 0 .*waited 1 s for rank 1 at "):
        peers.call(Pair.meet_nobody)


def test_who_comes_late_to_a_collective_is_named_before_the_call_itself_is_late(ray_executor: Executor) -> None:
    late = ray_executor.create_cluster(LATE, Echo, rpc_timeout=120)
    assert late.call(Echo.first).timeout == 108.0
    with pytest.raises(WorkerFailed, match=r"late rank 0 failed in 'reduce_late'.*it waited for rank 1 of late"):
        late.call(Echo.reduce_late, 1, 30.0, 2.0)
    late.kill()


def test_a_result_that_cannot_be_sent_is_an_error_that_says_so(duo: Cluster) -> None:
    with pytest.raises(WorkerFailed, match="duo rank 0 failed in 'give_a_lock'.*lock"):
        duo.call(Echo.give_a_lock)


def test_one_failing_rank_is_reported_without_waiting_for_the_others(duo: Cluster) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="duo rank 1 failed in 'fail_on': KeyError"):
        duo.call(Echo.fail_on, 1, 3.0)
    assert time.monotonic() - start < 2.5
    assert duo.call(Echo.greet, "later")[0] == "hello later from duo 0"  # waits for rank 0 to come back


def test_a_hanging_rank_is_named_with_the_line_it_hangs_in(ray_executor: Executor) -> None:
    cluster = victims(ray_executor, 0)
    with pytest.raises(WorkerTimeout, match="victim0 rank 0 didn't finish 'sleep' within 0.5 s") as caught:
        cluster.call(Echo.sleep, 60.0, timeout=0.5)
    assert "distributed_workers.py" in caught.value.doing
    assert "in sleep" in caught.value.doing
    cluster.shutdown()


@pytest.mark.parametrize(("number", "others"), [(1, "hang"), (2, "fail")])
def test_a_dead_rank_is_named_with_its_last_words(ray_executor: Executor, number: int, others: str) -> None:
    cluster = victims(ray_executor, number)
    pid = cluster.call(Echo.ping)[1].pid
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"victim{number} rank 1 died during 'exit_on' \(process {pid} on ") as caught:
        cluster.call(Echo.exit_on, 1, others)
    assert time.monotonic() - start < 10
    assert caught.value.stderr_tail.endswith("the last words of rank 1")
    with pytest.raises(WorkerDied, match="rank 1 died during 'greet'"):
        cluster.call_rank(1, Echo.greet, "x")
    cluster.shutdown()


def test_a_killed_rank_is_named_to_an_asynchronous_caller_too(ray_executor: Executor) -> None:
    cluster = victims(ray_executor, 3)
    start = time.monotonic()
    with pytest.raises(WorkerDied, match="victim3 rank 0 died during 'kill_on'"):
        asyncio.run(cluster.call_rank_async(0, Echo.kill_on, 0))
    assert time.monotonic() - start < 10
    cluster.shutdown()
