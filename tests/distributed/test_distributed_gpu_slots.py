"""Accelerator slots, with a Ray cluster that believes it has four."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from distributed_workers import Echo

from roll.distributed.executors import make_executor
from roll.distributed.placement import RolePlacement

ray = pytest.importorskip("ray")


def test_every_rank_sees_the_devices_of_its_slots_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray, "init", functools.partial(ray.init, num_gpus=4))
    train = RolePlacement("train", ((0,), (2,)))
    infer = RolePlacement("infer", ((0, 1), (2, 3)))  # two devices a rank, colocated with the trainer
    judge = RolePlacement("judge", ((),))
    with make_executor("ray", [train, infer, judge], rpc_timeout=60, log_dir=tmp_path) as executor:
        seen = {
            role.role: [
                env["CUDA_VISIBLE_DEVICES"]
                for env in executor.create_cluster(role, Echo).call(Echo.environment, ["CUDA_VISIBLE_DEVICES"])
            ]
            for role in (train, infer, judge)
        }
    assert seen == {"train": ["0", "2"], "infer": ["0,1", "2,3"], "judge": [""]}

    logs = {path.name for path in tmp_path.iterdir()}
    assert logs == {"train-0.log", "train-1.log", "infer-0.log", "infer-1.log", "judge-0.log"}

    greedy = RolePlacement("greedy", ((5,),))
    with pytest.raises(ValueError, match=r"slots 0 to 5, but the cluster has 4 GPU\(s\)"):
        make_executor("ray", [greedy], rpc_timeout=60)
    assert not ray.is_initialized()
