"""Delta sync: engines have exactly the weights of a whole sync, whatever happened before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from same_runs import comparable
from small import run_small
from sync_workers import FakeEngine, FakeTrainer
from test_pipelines_sync import fake_config, sync_of

from roll.distributed.cluster import Cluster, Executor
from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.executors import make_executor
from roll.distributed.placement import RolePlacement
from roll.distributed.weights import weights_checksum
from roll.distributed.worker_errors import WorkerFailed
from roll.pipelines.rl.engine_pipeline import EnginePipeline
from roll.pipelines.rl.sync import WeightSync
from roll.pipelines.workers.infer_worker import InferWorker

WAYS = ("object_store", "shared_memory", "broadcast", "file")
WHOLE = 12 * 3000 * 2


class SmallSteps(FakeTrainer):
    """Each step changes ten numbers of every third tensor, of bfloat16."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def train(self) -> None:
        if not self.placed:
            self.placed = {f"layer.{i}": torch.full((3000,), i / 8, dtype=torch.bfloat16) for i in range(12)}
        for i, tensor in enumerate(self.placed.values()):
            if i % 3 == self.step % 3:
                tensor[self.step * 10 : self.step * 10 + 10] += 1
        self.step += 1

    @dispatch(Dispatch.ONE_TO_ALL)
    def checksum(self) -> str:
        return weights_checksum(self.placed.items())


@pytest.fixture
def inline() -> Iterator[Executor]:
    roles = [RolePlacement("trainer", ((0,),)), RolePlacement("engines", ((1,),))]
    with make_executor("inline", roles, rpc_timeout=30) as executor:
        yield executor


def started(inline: Executor, folder: Path, **keys: Any) -> tuple[WeightSync, Cluster, Cluster]:
    trainer = inline.create_cluster(inline.placements["trainer"], SmallSteps)
    engines = inline.create_cluster(inline.placements["engines"], FakeEngine)
    trainer.call(SmallSteps.train)
    return sync_of(fake_config(folder, delta_weight_sync=True, **keys), trainer, engines), trainer, engines


def sent_bytes(sync: WeightSync) -> int:
    return round(sync.metrics["sync/gigabytes"] * 1e9)


@pytest.mark.parametrize("wanted", WAYS)
def test_after_the_first_sync_only_changes_are_sent(inline: Executor, tmp_path: Path, wanted: str) -> None:
    sync, trainer, engines = started(inline, tmp_path, weight_transport=wanted)
    for version in range(4):
        sync(version)
        assert engines.call(FakeEngine.state) == [(version, trainer.call(SmallSteps.checksum)[0])]
        assert sent_bytes(sync) == (4 * 10 * (4 + 2) if version else WHOLE)
        assert sync.metrics["sync/delta_share"] == pytest.approx(sent_bytes(sync) / WHOLE)
        trainer.call(SmallSteps.train)
    sync.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wanted", WAYS)
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_replaced_engine_gets_all_weights_and_changes_from_then_on(
    inline: Executor, tmp_path: Path, wanted: str, ratio: float
) -> None:
    keys = {"weight_transport": wanted, "engine_restarts": 1, "async_generation_ratio": ratio}
    sync, trainer, engines = started(inline, tmp_path, **keys)
    for version in (0, 1):
        sync(version)
        of_the_last = trainer.call(SmallSteps.checksum)[0]
        if version == 0 or ratio:
            trainer.call(SmallSteps.train)  # with generation ahead, the trainer has gone on when the engine dies
    engines.call(FakeEngine.forget)
    sync.resend(0)
    assert engines.call(FakeEngine.state) == [(1, of_the_last)]
    trainer.call(SmallSteps.train)
    sync(2)
    assert engines.call(FakeEngine.state) == [(2, trainer.call(SmallSteps.checksum)[0])]
    assert sent_bytes(sync) < WHOLE / 50
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_missed_a_version_gets_all_weights(inline: Executor, tmp_path: Path) -> None:
    sync, trainer, engines = started(inline, tmp_path, weight_transport="object_store")
    sync(0)
    sync.leave()  # the trainer works: who is replaced now gets the next version
    engines.call(FakeEngine.forget)
    sync.resend(0)
    trainer.call(SmallSteps.train)
    sync(1)
    assert engines.call(FakeEngine.state) == [(1, trainer.call(SmallSteps.checksum)[0])]
    assert sent_bytes(sync) == WHOLE


@pytest.mark.parametrize(
    ("wanted", "role", "at"),
    [
        ("object_store", "engines", 7),
        ("object_store", "trainer", 7),
        ("shared_memory", "engines", 0),
        ("shared_memory", "trainer", 7),
        ("broadcast", "engines", 7),
        ("file", "engines", 7),
    ],
)
def test_after_a_failure_half_way_all_weights_are_sent(
    inline: Executor, tmp_path: Path, wanted: str, role: str, at: int
) -> None:
    sync, trainer, engines = started(inline, tmp_path, weight_transport=wanted)
    sync(0)
    trainer.call(SmallSteps.train)
    end, cluster = (FakeEngine, engines) if role == "engines" else (SmallSteps, trainer)
    cluster.call(end.arm, ("raise", 0, at))
    with pytest.raises(WorkerFailed, match=f"layer.{at} is unknown"):
        sync(1)
    assert "" in {*engines.call(FakeEngine.weight_copy), *trainer.call(SmallSteps.weight_copy)}
    sync(1)
    assert engines.call(FakeEngine.state) == [(1, trainer.call(SmallSteps.checksum)[0])]
    assert sent_bytes(sync) == WHOLE
    trainer.call(SmallSteps.train)
    sync(2)
    assert engines.call(FakeEngine.state) == [(2, trainer.call(SmallSteps.checksum)[0])]
    assert sent_bytes(sync) < WHOLE / 50


def test_in_one_process_nothing_is_copied(inline: Executor, tmp_path: Path) -> None:
    sync, trainer, engines = started(inline, tmp_path, weight_transport="auto")
    for version in range(2):
        sync(version)
        assert engines.call(FakeEngine.state) == [(version, trainer.call(SmallSteps.checksum)[0])]
    assert engines.call(FakeEngine.weight_copy) == [""]
    assert "sync/delta_share" not in sync.metrics


# --- whole runs

KEYS = ("weight_transport=object_store", "verify_weight_sync=checksum", "max_steps=4")
LEARNING_RATE = "actor_train.training_args.learning_rate"


def test_a_run_is_the_same_with_an_engine_replaced_in_between(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_weights = EnginePipeline.sync_weights
    shares: list[float] = []

    def replaced_after(pipeline: EnginePipeline, version: int) -> None:
        sync_weights(pipeline, version)
        shares.append(pipeline.weight_sync.metrics.get("sync/delta_share", 1.0))
        if version == 2:
            pipeline.clusters.actor_infer.call(InferWorker.restart)
            pipeline.weight_sync.resend(0)

    monkeypatch.setattr(EnginePipeline, "sync_weights", replaced_after)
    dtype = ("actor_infer.model_args.dtype=bf16", f"{LEARNING_RATE}=1e-6")
    whole = run_small(tmp_path / "whole", tiny_model, *KEYS, *dtype)
    assert shares == [1.0] * len(shares)
    shares.clear()
    delta = run_small(tmp_path / "delta", tiny_model, *KEYS, *dtype, "delta_weight_sync=true")

    def rows(run: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "sync/gigabytes"} for row in comparable(run.rows)]

    assert rows(delta) == rows(whole)
    assert shares[0] == 1.0
    assert all(0 < share < 0.3 for share in shares[1:]), shares
