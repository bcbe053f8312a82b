"""Colocated roles take turns: never two on the devices but where a sync or a save needs both copies of the weights."""

from __future__ import annotations

import pytest
from toy import metrics_of, run_toy, write_toy

from roll.distributed.worker import Worker
from roll.pipelines.run import role_offload as module
from roll.pipelines.run.role_offload import ENGINE, DeviceOffloader
from roll.pipelines.workers.infer_worker import InferWorker
from roll.pipelines.workers.train_worker import ForwardWorker
from roll.strategies.engines.hf.hf_infer import HfInfer

ALL = {"parameters", "gradients", "optimizer"}
ROLES = ("actor_train", "actor_infer", "reference", "critic")


class OnOneDevice:
    """Clusters on one accelerator of 10 units: an engine's weights are 4, its cache 5, a trainer's parts 4, 4 and 1."""

    SIZES = {"weights": 4, "kv_cache": 5, "parameters": 4, "optimizer": 4, "gradients": 1}

    def __init__(self, room):
        self.room = room
        self.used = {}
        self.most = 0
        self.log = []

    def cluster(self, role):
        parts = ("weights", "kv_cache") if role == "actor_infer" else ("parameters", "gradients", "optimizer")
        self.used[role] = {part: self.SIZES[part] for part in parts}
        self._measure()
        return FakeCluster(self, role)

    def _measure(self):
        total = sum(sum(parts.values()) for parts in self.used.values())
        assert total <= self.room, f"too much on the device: {self.used}"
        self.most = max(self.most, total)

    def sleep(self, role, parts):
        self.log.append(("sleep", role, parts))
        return [sum(self.used[role].pop(part) for part in parts)]

    def wake(self, role, parts):
        self.log.append(("wake", role, parts))
        self.used[role].update({part: self.SIZES[part] for part in parts})
        self._measure()


class FakeCluster:
    def __init__(self, device, role):
        self.device, self.role = device, role

    def call(self, method, *args):
        if method is Worker.device:
            return ["cuda"]
        assert method in (InferWorker.sleep, ForwardWorker.sleep, InferWorker.wake, ForwardWorker.wake)
        return getattr(self.device, method.__name__)(self.role, *args)


def built(colocated):
    device = OnOneDevice(13 if colocated else 99)
    offloader = DeviceOffloader(colocated)
    for role in ROLES:
        offloader.add(role, device.cluster(role))
    return device, offloader


EVERYBODY = [(a, b) for i, a in enumerate(ROLES) for b in ROLES[i + 1 :]]


def test_a_whole_step_never_has_two_roles_on_the_device():
    device, offloader = built(EVERYBODY)
    for _ in range(2):
        with offloader.while_syncing():
            # 4 + 4 for the weights; the trainer's other 5 fit because the cache isn't there.
            assert set(device.used["actor_infer"]) == {"weights"}
            assert not device.used["critic"] and not device.used["reference"]
        offloader.onload(ENGINE)
        assert {role for role, parts in device.used.items() if parts} == {"actor_infer"}
        assert set(device.used["actor_infer"]) == {"weights", "kv_cache"}
        offloader.mark_engine_stale()
        for role in ("reference", "critic", "actor_train"):
            offloader.onload(role)
            assert {r for r, parts in device.used.items() if parts} == {role}
    assert device.most <= 13


def test_an_engine_keeps_the_weights_it_was_just_sent_while_a_checkpoint_is_saved():
    device, offloader = built(EVERYBODY)
    with offloader.while_syncing():
        pass
    offloader.onload(ENGINE)
    offloader.onload("actor_train")  # to save
    assert set(device.used["actor_infer"]) == {"weights"}
    offloader.onload(ENGINE)
    assert device.log[-1] == ("wake", "actor_infer", ("kv_cache",))


def test_roles_that_share_nothing_and_machines_without_accelerators_are_left_alone():
    device, offloader = built([])
    offloader.onload(ENGINE)
    offloader.onload("actor_train")
    assert device.log == []

    class OnCpu(FakeCluster):
        def call(self, method, *args):
            assert method is Worker.device
            return ["cpu"]

    offloader = DeviceOffloader(EVERYBODY)
    for role in ROLES:
        offloader.add(role, OnCpu(None, role))
    offloader.onload(ENGINE)
    with offloader.while_syncing():
        offloader.onload("critic")


def test_a_reward_model_works_while_others_do():
    device, offloader = built([*EVERYBODY, ("reward_model", "actor_infer")])
    offloader.add("reward_model", FakeCluster(device, "reward_model"))
    assert "reward_model" not in offloader.offloaded


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_a_real_run_that_takes_turns_takes_the_same_steps(tiny_model, tmp_path, monkeypatch, estimator):
    settings = ("max_steps=2", "save_steps=1", "eval_steps=1", f"adv_estimator={estimator}")
    settings += ("use_kl_loss=true", "kl_loss_coef=0.1", "reference.infer_batch_size=16", "verify_weight_sync=logprob")
    plain = run_toy(write_toy(tmp_path / "plain", tiny_model), *settings)
    calls = []
    monkeypatch.setattr(Worker, "device", as_cuda(Worker.device))
    original = module.DeviceOffloader._offload
    seen = lambda self, *args: (calls.append(args), original(self, *args))[1]  # noqa: E731
    monkeypatch.setattr(module.DeviceOffloader, "_offload", seen)
    turns = run_toy(write_toy(tmp_path / "turns", tiny_model), *settings)
    assert {role for role, _ in calls} >= {"actor_train", "actor_infer", "reference"}
    for mine, theirs in zip(turns, plain, strict=True):
        for name in ("reward/mean", "actor/grad_norm", "actor/kl_loss", "val/accuracy"):
            assert mine[name] == theirs[name], name
    assert metrics_of(tmp_path / "turns" / "output" / "logs")


def test_an_engine_that_slept_before_a_mere_validation_gets_its_weights_back(tiny_model, tmp_path, monkeypatch):
    settings = ("val_only=true", "val_before_train=false")
    plain = run_toy(write_toy(tmp_path / "plain", tiny_model), *settings)
    monkeypatch.setattr(Worker, "device", as_cuda(Worker.device))
    monkeypatch.setattr(HfInfer, "wake", wake_without_weights)
    turns = run_toy(write_toy(tmp_path / "turns", tiny_model), *settings)
    assert [row["val/accuracy"] for row in turns] == [row["val/accuracy"] for row in plain]


def wake_without_weights(engine, parts):
    """vLLM and SGLang don't always keep what slept."""
    if "weights" in parts:
        for _, tensor in engine.loaded_weights():
            tensor.data.fill_(float("nan"))


def as_cuda(original):
    """The same remote method, which says that there is an accelerator."""

    def device(self):
        return "cuda"

    device.__dict__.update(original.__dict__)
    return device
