"""Which ranks of the trainer send weights to which engines, and syncs in which several do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sync_workers import FakeEngine, FakeTrainer
from test_pipelines_sync import fake_config, left_by, pair, state_of, sync_of

from roll.configs.catalog.transport_table import Lane
from roll.distributed.cluster import Executor
from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.executors import make_executor
from roll.distributed.placement import RolePlacement
from roll.distributed.transports import Sent, TransferSummary
from roll.distributed.weights import WeightSyncError
from roll.distributed.worker_errors import WorkerDied
from roll.pipelines.rl.sync import _together
from roll.pipelines.rl.sync_plan import choose_lanes
from roll.strategies.hf.fsdp2 import Fsdp2Strategy

MODEL = 12 * 3000 * 4  # bytes of a FakeTrainer's weights


class AcceleratedTrainer(FakeTrainer):
    """Says that it has an accelerator."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def device(self) -> str:
        return "cuda"


@pytest.fixture(scope="module")
def ray() -> Iterator[Executor]:
    pytest.importorskip("ray")
    ranks = {"trainer": ((0,), (1,)), "engines": ((2,), (3,)), "beside": ((1,), (0,))}
    roles = [RolePlacement(name, slots, env={"OMP_NUM_THREADS": "1"}) for name, slots in ranks.items()]
    with make_executor("ray", roles, rpc_timeout=60) as executor:
        yield executor


class Cluster:
    """The trainer or the engines, as far as the choice of senders asks."""

    def __init__(
        self, *ranks: tuple[int, ...], device: str = "cuda", whole: bool = True, on_host: bool = False, near: int = 99
    ) -> None:
        self.placement = SimpleNamespace(ranks=ranks)
        self.world_size = len(ranks)
        self._says = {"device": device, "sends_from_every_rank": whole, "gathers_on_host": on_host}
        self._near = near  # so many ranks are on the first machine

    def call_rank(self, rank: int, method: Any) -> Any:
        assert rank == 0
        return self._says[method.__name__]

    def call(self, method: Any) -> list[Any]:
        assert method.__name__ == "ping"
        return [SimpleNamespace(machine=f"m{rank >= self._near}") for rank in range(self.world_size)]


TWO, FOUR = Cluster((0,), (1,)), Cluster((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("trainer", "engines", "senders", "sources"),
    [
        (FOUR, FOUR, (0,), (0, 1, 2, 3)),
        (FOUR, Cluster((0, 1), (2, 3)), (0,), (0, 2)),  # engines of two accelerators
        (FOUR, Cluster((3,), (2,), (2,)), (0,), (3, 2, 2)),
        (FOUR, Cluster((3,), (4,)), (0, 1, 2, 3), ()),  # one has an accelerator of its own
        (Cluster((0,)), Cluster((0,)), (0,), (0,)),
        (Cluster((0,)), Cluster((1,)), (0,), ()),
        (Cluster((0, 1), (2, 3)), Cluster((0,), (2,)), (0, 1), ()),  # ranks of two accelerators
        (Cluster((0,), (1,), device="cpu"), TWO, (0, 1), ()),  # two copies of all on the host would be no gain
        (Cluster((0,), (1,), whole=False), TWO, (0,), ()),
        (Cluster((0,), (1,), whole=False), Cluster((0,)), (0,), (0,)),
        (Cluster(*((i,) for i in range(8))), Cluster((9,)), tuple(range(8)), ()),
        (Cluster(*((i,) for i in range(20))), Cluster((30,)), (0, 3, 6, 9, 12, 15, 18), ()),
        (Cluster(*((i,) for i in range(2, 16)), near=6), Cluster((0,), (1,)), (0, 1, 2, 3, 4, 5), ()),  # two machines
        (Cluster((0,), (1,), on_host=True), TWO, (0, 1), ()),  # offloaded weights: as on a CPU
    ],
)
def test_who_sends_follows_from_where_the_ranks_are(trainer: Any, engines: Any, senders: Any, sources: Any) -> None:
    everyone = tuple(range(engines.world_size))
    alone = (Lane((0,), everyone),)
    lanes = choose_lanes("shared_memory", trainer, engines)
    if sources:  # of each engine the rank that sends it everything
        assert {engine: lane.senders for lane in lanes for engine in lane.engines} == {
            engine: (source,) for engine, source in enumerate(sources)
        }
        assert len(lanes) == len(set(sources))
        assert all(lane.on_device for lane in lanes)
    else:
        assert lanes == (Lane(senders, everyone),)
    if len(senders) > 1:  # room for two senders, and for none
        assert len(choose_lanes("shared_memory", trainer, engines, most=2)[0].senders) == 2
        assert choose_lanes("shared_memory", trainer, engines, most=0) == alone
    for other in ("broadcast", "object_store", "file", "in_process"):
        assert choose_lanes(other, trainer, engines) == alone


def test_two_ranks_send_a_share_each(ray: Executor, tmp_path: Path) -> None:
    trainer, engines = pair(ray)
    sync = sync_of(fake_config(tmp_path, weight_transport="shared_memory"), trainer, engines)
    sync._plan = replace(sync._plan, bucket_bytes=40000)
    assert sync._plan.lanes == (Lane((0, 1), (0, 1)),)
    for version in range(3):
        sync(version)
        assert engines.call(FakeEngine.state) == [(version, state_of(version))] * 2
        assert sync.metrics["sync/copied_gigabytes"] == sync.metrics["sync/gigabytes"] == MODEL / 1e9
        assert not left_by(sync)
        trainer.call(FakeTrainer.train)
    for each in (trainer, engines):
        each.shutdown()


def test_engines_take_all_from_the_rank_on_their_own_accelerator(ray: Executor, tmp_path: Path) -> None:
    trainer = ray.create_cluster(ray.placements["trainer"], AcceleratedTrainer)
    receivers = ray.create_cluster(ray.placements["beside"], FakeEngine)
    keys = {"weight_transport": "shared_memory", "engine_restarts": 1}
    sync = sync_of(fake_config(tmp_path, **keys), trainer, receivers)
    for version in range(2):
        sync(version)
        assert receivers.call(FakeEngine.state) == [(version, state_of(version))] * 2
        assert sync.metrics["sync/copied_gigabytes"] == 2 * MODEL / 1e9  # stand-ins: they are on the host
        trainer.call(FakeTrainer.train)
    assert sync._plan.lanes == (Lane((1,), (0,), on_device=True), Lane((0,), (1,), on_device=True))
    # The trainer's last version again, to one engine that was replaced.
    sync(2)
    receivers.call_rank(1, FakeEngine.forget)
    sync.resend(1)
    assert receivers.call(FakeEngine.state) == [(2, state_of(2))] * 2
    assert not left_by(sync)
    for each in (trainer, receivers):
        each.shutdown()


def test_a_rank_that_is_killed_while_it_sends_its_share_is_named(ray: Executor, tmp_path: Path) -> None:
    trainer, engines = pair(ray)
    sync = sync_of(fake_config(tmp_path, weight_transport="shared_memory"), trainer, engines)
    sync._plan = replace(sync._plan, bucket_bytes=40000)
    sync(1)
    trainer.call(FakeTrainer.arm, ("kill", 1, 6))
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="trainer rank 1 died during"):
        sync(2)
    assert time.monotonic() - started < 15
    assert not left_by(sync)
    for each in (trainer, engines):
        each.shutdown()


def test_ranks_that_went_through_other_weights_are_found_out() -> None:
    def said(tensors: int, copied: int) -> Sent:
        return Sent([], TransferSummary(tensors, 800, "", copied=copied), [])

    first = Sent([], TransferSummary(3, 800, "abc", gathered=5, copied=100), [])
    together = _together([first, said(3, 300), Sent([], None, []), said(3, 400)])
    assert together.summary == TransferSummary(3, 800, "abc")
    assert (together.summary.copied, together.summary.gathered) == (800, 5)
    with pytest.raises(
        WeightSyncError, match=r"rank 2 has other weights than rank 0: 4 tensors.*sends_from_every_rank"
    ):
        _together([first, said(3, 300), said(4, 300)])


def test_a_backend_with_weights_of_its_own_sends_from_rank_0_unless_it_says_otherwise() -> None:
    class Own(Fsdp2Strategy):
        def named_weights(self, part: Any = "merged", dtype: Any = None) -> Any:
            yield from super().named_weights(part, dtype)

    class OwnOnEveryRank(Own):
        sends_from_every_rank = True

        def named_weights(self, part: Any = "merged", dtype: Any = None) -> Any:
            yield from super().named_weights(part, dtype)

    assert Fsdp2Strategy.sends_from_every_rank
    assert not Own.sends_from_every_rank
    assert OwnOnEveryRank.sends_from_every_rank
