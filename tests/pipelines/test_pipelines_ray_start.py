"""Which runs start Ray and a warm parent of their ranks while they import."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rows import make_config

from roll.configs.checks.machine_checks import Machine
from roll.configs.schema.training_args import TrainingArgs
from roll.configs.schema.worker_config import ActorTrainConfig, ModelArgs
from roll.pipelines import ray_start

REMOTE = ActorTrainConfig(
    model_args=ModelArgs(trust_remote_code=True), training_args=TrainingArgs(per_device_train_batch_size=2)
)


@pytest.mark.parametrize(
    ("keys", "machine", "begins"),
    [
        ({"executor": "ray"}, Machine(), True),
        ({"executor": "inline"}, Machine(), False),
        ({"executor": "ray", "num_nodes": 2}, Machine(), False),
        ({"executor": "ray", "external_lib": ("json",)}, Machine(), False),
        ({"executor": "ray", "actor_train": REMOTE}, Machine(), False),
        ({"executor": "ray"}, Machine(accelerators=("H100",)), False),
    ],
)
def test_a_run_of_its_own_on_a_cpu_starts_ray_while_it_imports(monkeypatch, keys, machine, begins):
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_start, "this_machine", lambda: machine)
    assert ray_start._begins_early(make_config(**keys)) is begins


def test_the_warm_parent_imports_workers_backends_and_the_classes_of_the_models(tiny_model: Path):
    config = make_config(pretrain=str(tiny_model))
    modules = ray_start._modules(config)
    assert "roll.pipelines.workers.train_worker" in modules
    assert {"roll.strategies.hf.fsdp2", "roll.strategies.engines.hf.hf_infer"} <= set(modules)
    assert [name for name in modules if name.startswith("transformers.models.")]


def test_a_model_type_that_is_no_module_of_transformers_is_left_to_the_ranks(tmp_path):
    # The warm parent forks nobody where an import fails.
    for kind in ("gemma3_text", "gemma3"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        modules = ray_start._modules(make_config(pretrain=str(tmp_path)))
        assert ("transformers.models.gemma3.modeling_gemma3" in modules) is (kind == "gemma3")
        assert not any("gemma3_text" in module for module in modules)


def test_ranks_have_the_variables_of_all_workers_and_their_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    # One slot: all eight cores.
    assert ray_start._variables(make_config(system_envs={"A": "1"})) == {"A": "1", "OMP_NUM_THREADS": "8"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ray_start._variables(make_config()) == {}
