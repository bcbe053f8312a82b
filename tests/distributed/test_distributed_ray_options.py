"""`ray_init`: options of the Ray that a run starts itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.distributed.executors import make_executor

JOB = """
pipeline: rlvr
pretrain: model
max_steps: 1
rewards: {math: {name: gsm8k}}
actor_train: {data_args: {file_name: rows.jsonl}}
"""


def test_a_ray_of_its_own_has_the_options_and_needs_no_home(monkeypatch):
    """Ray 2.60 would write its token there, and go by it ever after."""
    import ray

    monkeypatch.setenv("HOME", "/proc/no-such-home")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with make_executor("ray", [], rpc_timeout=60, ray_options={"num_cpus": 3, "object_store_memory": 90 * 2**20}):
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.parent.stat().st_mode & 0o777 == 0o700, "Ray opens the folder that it is given to everybody"
        assert "RAY_AUTH_TOKEN" not in os.environ
        resources = ray.cluster_resources()
        assert resources["CPU"] == 3.0
        assert resources["object_store_memory"] == pytest.approx(90 * 2**20, rel=0.01)
    assert os.environ["RAY_AUTH_TOKEN"] == "of another cluster"
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"} & set(os.environ)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["num_nodes=2", "ray_init.num_cpus=4"], "started by `ray start`"),
        (["executor=inline", "ray_init.num_cpus=4"], "no Ray is started"),
        (["num_gpus_per_node=200", "ray_init.num_cpus=1"], "at least 2: each of the 200 device slots"),
        (["++ray_init.num_gpus=8"], "write num_gpus_per_node"),
        (["++ray_init.include_dashboard=true"], "a dashboard has no password"),
        (["++ray_init.num_cpu=8"], "did you mean 'num_cpus'"),
        (["ray_init.object_store_memory=1000"], ">= 83886080"),
    ],
)
def test_options_that_cannot_act_are_refused(tmp_path, keys, said):
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path, "job", keys)
    assert said in str(caught.value)
