"""Weight sync: what engines have afterwards, for every transport, and what happens when something goes wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import run_small
from sync_workers import FakeEngine, FakeTrainer, weights_of

from roll.distributed.cluster import Cluster, Executor
from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.executors import make_executor
from roll.distributed.placement import RolePlacement
from roll.distributed.transports import shm_segments
from roll.distributed.weights import WeightSyncError, weights_checksum
from roll.distributed.worker import Ping
from roll.distributed.worker_errors import WorkerDied, WorkerFailed
from roll.pipelines.rl import sync_plan
from roll.pipelines.rl.engine_pipeline import EnginePipeline
from roll.pipelines.rl.sync import WeightSync
from roll.pipelines.rl.sync_plan import choose_transport
from roll.strategies.engines.hf.hf_infer import HfInfer

WANTED = ("auto", "object_store", "shared_memory", "broadcast", "file")


def left_by(sync: WeightSync) -> list[str]:
    """Its files in /dev/shm; other runs of the machine have theirs."""
    return [path.name for path in shm_segments.FOLDER.glob(f"{shm_segments.PREFIX}{sync._run}-*")]


def fake_config(folder: Path, **keys: Any) -> Any:
    engine = SimpleNamespace(
        strategy_args=SimpleNamespace(strategy_name=keys.pop("engine", "vllm")),
        model_args=SimpleNamespace(dtype=keys.pop("dtype", "fp32")),
    )
    values = {
        "weight_transport": "auto",
        "model_update_buffer_size_mb": 1,
        "verify_weight_sync": "checksum",
        "engine_restarts": 0,
        "async_generation_ratio": 0.0,
        "lora_sync": "merged",
        "delta_weight_sync": False,
        "rpc_timeout": 30.0,
        "output_path": folder,
        **keys,
    }
    return SimpleNamespace(actor_infer=engine, **values)


def sync_of(config: Any, trainer: Cluster, engines: Cluster) -> WeightSync:
    return WeightSync(config, SimpleNamespace(actor_train=trainer, actor_infer=engines), tokenizer=None)


def pair(executor: Executor, trainer: str = "trainer", engines: str = "engines") -> tuple[Cluster, Cluster]:
    placements = executor.placements
    return (
        executor.create_cluster(placements[trainer], FakeTrainer),
        executor.create_cluster(placements[engines], FakeEngine),
    )


@pytest.fixture
def inline() -> Iterator[Executor]:
    roles = [RolePlacement("trainer", ((0,),)), RolePlacement("engines", ((1,),))]
    with make_executor("inline", roles, rpc_timeout=30) as executor:
        yield executor


def state_of(step: int) -> str:
    return weights_checksum(weights_of(step))


# --- in one process


@pytest.mark.parametrize("wanted", WANTED)
def test_engines_have_the_trainers_weights_after_every_sync(inline: Executor, tmp_path: Path, wanted: str) -> None:
    trainer, engines = pair(inline)
    sync = sync_of(fake_config(tmp_path, weight_transport=wanted), trainer, engines)
    for version in (0, 1, 2):
        sync(version)
        assert engines.call(FakeEngine.state) == [(version, state_of(version))]
        trainer.call(FakeTrainer.train)
    assert sync.metrics["sync/gigabytes"] == pytest.approx(12 * 3000 * 4 / 1e9)
    assert sync.metrics["sync/gathered_gigabytes"] == 0
    copies = {"auto": 0, "file": 2}.get(wanted, 1)  # besides the one into the engine's model
    assert sync.metrics["sync/copied_gigabytes"] == pytest.approx(copies * sync.metrics["sync/gigabytes"])
    assert sync.metrics["throughput/sync_gb_per_second"] > 0
    assert not left_by(sync)
    sync.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_one_engine_gets_the_version_of_the_others_again(
    inline: Executor, tmp_path: Path, wanted: str, ratio: float
) -> None:
    trainer, engines = pair(inline)
    config = fake_config(tmp_path, weight_transport=wanted, engine_restarts=1, async_generation_ratio=ratio)
    sync = sync_of(config, trainer, engines)
    sync.resend(0)  # nothing was sent yet: the new engine starts as the others did
    trainer.call(FakeTrainer.train)
    sync(1)
    engines.call(FakeEngine.forget)
    if ratio:
        trainer.call(FakeTrainer.train)  # generation runs ahead, the trainer has gone on
    sync.resend(0)
    assert engines.call(FakeEngine.state) == [(1, state_of(1))]
    sync(2)
    assert engines.call(FakeEngine.state) == [(2, state_of(2 if ratio else 1))]


def test_nothing_is_kept_where_no_engine_can_be_replaced(inline: Executor, tmp_path: Path) -> None:
    trainer, engines = pair(inline)
    for keys in ({"engine": "hf_infer", "engine_restarts": 1}, {"engine_restarts": 0}):
        sync = sync_of(fake_config(tmp_path, async_generation_ratio=1.0, **keys), trainer, engines)
        sync(0)
        assert sync._last["merged"].handles == []


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_adapters_follow_the_base_and_a_new_engine_gets_both(
    inline: Executor, tmp_path: Path, wanted: str, ratio: float
) -> None:
    trainer, engines = pair(inline)
    keys = {"lora_sync": "adapters", "engine_restarts": 1, "async_generation_ratio": ratio}
    sync = sync_of(fake_config(tmp_path, weight_transport=wanted, **keys), trainer, engines)

    def loaded() -> tuple[list[tuple[str, int]], str]:
        ((log, state),) = engines.call(FakeEngine.loaded)
        return log, state

    sync(0)
    both = sync.metrics["sync/gigabytes"]
    trainer.call(FakeTrainer.train)
    sync(1)
    assert loaded() == ([("base", 0), ("adapters", 0), ("adapters", 1)], state_of(1))
    assert sync.metrics["sync/gigabytes"] == pytest.approx(both / 2)
    engines.call(FakeEngine.forget)
    if ratio:
        trainer.call(FakeTrainer.train)  # generation runs ahead, the trainer has gone on
    sync.resend(0)
    assert loaded() == ([("base", 0), ("adapters", 1)], state_of(1))
    sync(2)
    assert loaded()[0][2:] == [("adapters", 2)]
    sync.leave()
    sync(3)
    assert loaded()[0][3:] == [("adapters", 3)]
    sync.leave()
    engines.call(FakeEngine.forget)
    sync.resend(0)
    assert loaded()[0] == ([("base", 0), ("adapters", 3)] if ratio else [])
    sync(4)
    assert loaded()[0][-1] == ("adapters", 4) and loaded()[0][0][0] == "base"
    sync.close()
    assert list(tmp_path.iterdir()) == []
    assert not left_by(sync)


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize(("end", "role"), [(FakeEngine, "engines"), (FakeTrainer, "trainer")])
def test_a_sync_that_fails_raises_names_the_role_and_can_be_done_again(
    inline: Executor, tmp_path: Path, wanted: str, end: type, role: str
) -> None:
    trainer, engines = pair(inline)
    sync = sync_of(fake_config(tmp_path, weight_transport=wanted, verify_weight_sync="off"), trainer, engines)
    (engines if role == "engines" else trainer).call(end.arm, ("raise", 0, 7))
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="layer.7 is unknown"):
        sync(1)
    assert time.monotonic() - started < 5
    assert engines.call(FakeEngine.state)[0][0] == -1
    assert not left_by(sync)
    sync(1)
    assert engines.call(FakeEngine.state) == [(1, state_of(0))]


def test_a_difference_names_engine_version_and_both_values(inline: Executor, tmp_path: Path) -> None:
    trainer, engines = pair(inline)
    sync = sync_of(fake_config(tmp_path), trainer, engines)
    trainer.call(FakeTrainer.arm, ("flip", 0, 3))  # the first pass is the one that is hashed
    with pytest.raises(WeightSyncError) as error:
        sync(5)
    told = str(error.value)
    assert "engines rank 0 didn't get the weights of version 5 as they were sent by in_process: sent 12 tensors" in told
    assert f"received 12 tensors, 144000 bytes, checksum {state_of(0)}" in told


@pytest.mark.parametrize(
    ("homes", "keeps", "fits", "expected"),
    [
        ([("a", 1), ("a", 1)], False, True, "in_process"),
        ([("a", 1), ("a", 1)], True, True, "in_process"),
        ([("a", 1), ("a", 2)], False, True, "shared_memory"),
        ([("a", 1), ("a", 2)], True, True, "object_store"),
        ([("a", 1), ("a", 2)], False, False, "object_store"),
        ([("a", 1), ("a", 2), ("b", 3)], False, True, "object_store"),
        ([("a", 1), ("b", 1)], False, True, "object_store"),
    ],
)
def test_auto_chooses_by_where_the_workers_are(
    homes: list[tuple[str, int]], keeps: bool, fits: bool, expected: str
) -> None:
    pings = [Ping("role", i, node, pid, f"id of {node}") for i, (node, pid) in enumerate(homes)]
    assert choose_transport("auto", pings, keeps=keeps, fits=fits) == expected
    assert choose_transport("file", pings, keeps=keeps, fits=fits) == "file"
    if len({node for node, _ in homes}) > 1:
        with pytest.raises(ValueError, match="needs actor_train and actor_infer on one machine, they are on a, b"):
            choose_transport("shared_memory", pings, keeps=keeps, fits=fits)


def test_machines_are_told_apart_by_rays_ids_and_not_by_their_names() -> None:
    """Containers of two machines are often called the same, and so are their processes numbered."""
    homes = [Ping("actor_train", 0, "worker", 7, "4f1d"), Ping("actor_infer", 0, "worker", 7, "a0c2")]
    assert choose_transport("auto", homes, keeps=False, fits=True) == "object_store"
    with pytest.raises(ValueError, match=r"they are on worker \(4f1d\), worker \(a0c2\)"):
        choose_transport("shared_memory", homes, keeps=False, fits=True)


class ElsewhereTrainer(FakeTrainer):
    """On a machine that has other devices and more memory than that of the controller."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def free_shared_memory(self) -> int:
        return 1 << 40

    @dispatch(Dispatch.ONE_TO_ALL)
    def device(self) -> str:
        return "cuda"


def test_the_machines_of_the_workers_are_asked_and_not_that_of_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_segments, "FOLDER", tmp_path / "none")  # the controller has no shared memory
    roles = [RolePlacement("trainer", ((0,),)), RolePlacement("engines", ((0,),))]
    with make_executor("inline", roles, rpc_timeout=30) as executor:
        trainer = executor.create_cluster(roles[0], ElsewhereTrainer)
        engines = executor.create_cluster(roles[1], FakeEngine)
        seen: dict[str, bool] = {}
        monkeypatch.setattr(sync_plan, "choose_transport", lambda wanted, homes, *, keeps, fits: (
            seen.update(fits=fits) or wanted))  # fmt: skip
        assert sync_of(fake_config(tmp_path, weight_transport="object_store"), trainer, engines)._plan
        assert seen == {"fits": True}
        with pytest.raises(ValueError, match=r"broadcast needs accelerators of their own .*share \[0\]"):
            assert sync_of(fake_config(tmp_path, weight_transport="broadcast"), trainer, engines)._plan


# --- the whole loop


@pytest.mark.parametrize(("wanted", "verify"), [("auto", "logprob"), ("file", "checksum")])
def test_a_run_samples_from_what_it_trains(tiny_model: Path, tmp_path: Path, wanted: str, verify: str) -> None:
    keys = (f"weight_transport={wanted}", f"verify_weight_sync={verify}")
    run = run_small(tmp_path, tiny_model, "max_steps=2", *keys)
    assert all(abs(row["mismatch/kl"]) < 1e-8 for row in run.rows)
    assert run.rows[1]["sync/gigabytes"] > 0


def test_an_engine_replaced_after_the_trainer_moved_on_gets_the_next_version_only(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_weights = EnginePipeline.sync_weights

    def replaced_before(pipeline: EnginePipeline, version: int) -> None:
        pipeline.weight_sync.resend(0)  # no copy of the last version is kept while generation and training take turns
        sync_weights(pipeline, version)

    monkeypatch.setattr(EnginePipeline, "sync_weights", replaced_before)
    arguments = ("actor_train.training_args.learning_rate=0.1", "verify_weight_sync=checksum", "max_steps=2")
    assert len(run_small(tmp_path, tiny_model, *arguments).rows) == 2


def stale(self: HfInfer, version: int, weights: Any) -> None:
    """An engine that goes on with what it has."""
    for _ in weights:
        pass
    self._version = version


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        ("checksum", r"engine 0 was sent weights of version 1 with checksum \w{32}, its model now holds"),
        ("logprob", r"engine 0 was sent weights of version 1 with checksum \w{32}, its model now holds"),
        ("off", r"rank 0 \(hf_infer\) and actor_train give what was just sampled under weights of version 1 different"),
    ],
)
def test_an_engine_that_goes_on_with_old_weights_is_found_out(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: str, message: str
) -> None:
    monkeypatch.setattr(HfInfer, "update_weights", stale)
    monkeypatch.setattr(HfInfer, "borrow_weights", None)  # what is the trainer's own can't be old
    arguments = (tmp_path, tiny_model, "actor_train.training_args.learning_rate=0.1", f"verify_weight_sync={verify}")
    with pytest.raises((WorkerFailed, WeightSyncError), match=message):
        run_small(*arguments)


def test_an_engine_that_cannot_tell_what_it_holds_is_found_out_by_its_logprobs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HfInfer, "update_weights", stale)
    monkeypatch.setattr(HfInfer, "borrow_weights", None)
    monkeypatch.setattr(HfInfer, "loaded_weights", lambda _: None)
    with pytest.raises(WeightSyncError, match="actor_infer rank 0 and the trainer disagree under weights of version 1"):
        run_small(tmp_path, tiny_model, "actor_train.training_args.learning_rate=0.1", "verify_weight_sync=logprob")


# --- several processes


@pytest.fixture(scope="module")
def ray() -> Iterator[Executor]:
    pytest.importorskip("ray")
    ranks = {"trainer": ((0,), (1,)), "engines": ((2,), (3,)), "lone_trainer": ((0,),), "lone_engine": ((2,),)}
    roles = [RolePlacement(name, slots, env={"OMP_NUM_THREADS": "1"}) for name, slots in ranks.items()]
    with make_executor("ray", roles, rpc_timeout=60) as executor:
        yield executor


def test_every_transport_reaches_every_process(ray: Executor, tmp_path: Path) -> None:
    trainer, engines = pair(ray)
    both = []
    for wanted in WANTED:
        for ratio in (0.0, 1.0):
            config = fake_config(tmp_path, weight_transport=wanted, engine_restarts=1, async_generation_ratio=ratio)
            sync = sync_of(config, trainer, engines)
            both.append(sync)
            step = len(both) - 1
            for version in (7, 8):
                sync(version)
            assert engines.call(FakeEngine.state) == [(8, state_of(step))] * 2, wanted
            engines.call_rank(1, FakeEngine.forget)
            trainer.call(FakeTrainer.train)
            if ratio:
                sync.resend(1)
                assert engines.call(FakeEngine.state) == [(8, state_of(step))] * 2, wanted
            assert not left_by(sync)
    assert both[0]._plan.transport.name == "shared_memory"
    assert both[1]._plan.transport.name == "object_store"
    for sync in both:
        sync.close()


@pytest.mark.parametrize(
    ("wanted", "role", "rank"),
    [
        ("shared_memory", "engines", 1),
        ("in place", "engines", 1),
        ("broadcast", "engines", 1),
        ("shared_memory", "lone_trainer", 0),
        ("in place", "lone_trainer", 0),
    ],
)
def test_a_process_that_is_killed_in_the_middle_is_named_within_seconds(
    ray: Executor, tmp_path: Path, wanted: str, role: str, rank: int
) -> None:
    trainer, engines = pair(ray, "lone_trainer")
    if wanted == "in place":
        trainer.call(FakeTrainer.place)
        wanted = "shared_memory"
    keys = {"weight_transport": wanted, "verify_weight_sync": "off"}
    sync = sync_of(fake_config(tmp_path, **keys), trainer, engines)
    # A bucket of 1 MiB would hold all of them.
    sync._plan = replace(sync._plan, bucket_bytes=20000)
    sync(1)
    cluster = engines if role == "engines" else trainer
    cluster.call(FakeTrainer.arm, ("kill", rank, 6))
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=f"{role} rank {rank} died during"):
        sync(2)
    assert time.monotonic() - started < 15
    assert not left_by(sync)
    for each in (trainer, engines):
        each.shutdown()


def test_weights_are_read_where_another_process_trains_them(ray: Executor, tmp_path: Path) -> None:
    trainer, engines = pair(ray, "lone_trainer")
    sync = sync_of(fake_config(tmp_path, weight_transport="shared_memory"), trainer, engines)
    trainer.call(FakeTrainer.place)
    for version in range(3):
        sync(version)
        trainer.call(FakeTrainer.train)  # what the engines copied stays as it is
        assert engines.call(FakeEngine.state) == [(version, state_of(version))] * 2
        assert sync.metrics["sync/copied_gigabytes"] == 0
        assert not left_by(sync)
    for each in (trainer, engines):
        each.shutdown()


def test_two_runs_at_once_on_one_machine(ray: Executor, tmp_path: Path) -> None:
    runs = []
    for i in range(2):
        trainer, engines = pair(ray, "lone_trainer", "lone_engine")
        for _ in range(i):
            trainer.call(FakeTrainer.train)
        runs.append((sync_of(fake_config(tmp_path, weight_transport="shared_memory"), trainer, engines), engines))
    with ThreadPoolExecutor(len(runs)) as pool:
        for version in range(5):
            list(pool.map(lambda run, v=version: run[0](v), runs))
            assert [run[1].call(FakeEngine.state) for run in runs] == [[(version, state_of(i))] for i in range(2)]
