"""An engine that computes with the trainer's own weights, where both are in one process."""

from __future__ import annotations

from typing import Any

import pytest
from same_runs import exported, logged
from toy import run_toy, write_toy

from roll.pipelines.rl.sync import WeightSync
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.hf.fsdp2 import Fsdp2Strategy

REFERENCE = ("use_kl_loss=true", "kl_loss_coef=0.1", "reference.infer_batch_size=16")
RUNS = {
    "plain": (),
    "greedy responses, a reference": ("adv_estimator=remax", *REFERENCE),
    "several steps": ("ppo_epochs=2",),
    "more prompts": ("max_additional_running_prompts=3", "is_use_additional_prompts=true"),
    "checksums": ("verify_weight_sync=checksum",),
    "log-probs": ("verify_weight_sync=logprob",),
}
APART = {
    "half precision": ("actor_infer.model_args.dtype=bf16",),
    "adapters": ("actor_train.model_args.lora_rank=4", "actor_train.model_args.lora_target=[q_proj]"),
}


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The models of the last engine and of the last trainer that trained."""
    found: dict[str, Any] = {}
    build, train_step = HfInfer.__init__, Fsdp2Strategy.train_step

    def built(engine: HfInfer, model: Any, **options: Any) -> None:
        found["engine"] = model
        build(engine, model, **options)

    def trained(strategy: Fsdp2Strategy, *args: Any) -> Any:
        found["trainer"] = strategy._model
        return train_step(strategy, *args)

    monkeypatch.setattr(HfInfer, "__init__", built)
    monkeypatch.setattr(Fsdp2Strategy, "train_step", trained)
    return found


def shared(models: dict[str, Any]) -> set[bool]:
    theirs = {parameter.data_ptr() for parameter in models["trainer"].parameters()}
    return {parameter.data_ptr() in theirs for parameter in models["engine"].parameters()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_one_copy_of_the_weights_takes_the_same_steps(tiny_model, tmp_path, monkeypatch, models, name):
    settings = ("max_steps=3", "eval_steps=1", "save_steps=2", *RUNS[name])
    run_toy(write_toy(tmp_path / "one", tiny_model), *settings)
    assert shared(models) == {True}
    monkeypatch.setattr(WeightSync, "_lend", lambda self: None)
    run_toy(write_toy(tmp_path / "two", tiny_model), *settings)
    assert shared(models) == {False}
    assert logged(tmp_path / "one") == logged(tmp_path / "two")
    assert exported(tmp_path / "one") == exported(tmp_path / "two")


@pytest.mark.parametrize("name", APART)
def test_weights_that_differ_are_copied(tiny_model, tmp_path, models, name):
    run_toy(write_toy(tmp_path, tiny_model), "max_steps=1", *APART[name])
    assert shared(models) == {False}
