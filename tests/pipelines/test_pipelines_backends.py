"""The whole loop on every training backend: the same first steps, a solved task, and a resumed run."""

from __future__ import annotations

from statistics import fmean

import pytest
from same_runs import comparable
from toy import run_toy, write_toy

ACTOR = "actor_train.strategy_args.strategy_name"
OPTIONS = "+actor_train.strategy_args.strategy_config"
BACKENDS = {
    "zero 1": (f"{ACTOR}=deepspeed_train", f"{OPTIONS}={{zero_optimization: {{stage: 1}}}}"),
    "zero 3": (f"{ACTOR}=deepspeed_train", f"{OPTIONS}={{zero_optimization: {{stage: 3}}}}"),
    "megatron": (f"{ACTOR}=megatron_train",),
}
MIXED = (
    f"{ACTOR}=megatron_train",
    "adv_estimator=gae",
    "ppo_epochs=2",
    "use_kl_loss=true",
    "kl_loss_coef=0.001",
    "reference.strategy_args.strategy_name=fsdp2_infer",
    "critic.strategy_args.strategy_name=deepspeed_train",
    "critic.model_args.disable_gradient_checkpointing=true",
    "critic.training_args.per_device_train_batch_size=32",
    "critic.training_args.gradient_accumulation_steps=2",
    "critic.training_args.learning_rate=1e-2",
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_takes_the_steps_that_fsdp2_takes(tiny_model, tmp_path, backend):
    # Advantages of a group cancel in the gradient of what it didn't sample; Adam must not blow up what rounding leaves.
    schedule = ("max_steps=3", "actor_train.training_args.adam_epsilon=1e-4")
    expected = run_toy(write_toy(tmp_path / "fsdp2", tiny_model), *schedule)
    rows = run_toy(write_toy(tmp_path / "other", tiny_model), *BACKENDS[backend], *schedule)
    for row, other in zip(rows, expected, strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/lr"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("backend", [*BACKENDS, "mixed"])
def test_every_backend_solves_the_toy(tiny_model, tmp_path, backend):
    overrides = MIXED if backend == "mixed" else BACKENDS[backend]
    rows = run_toy(write_toy(tmp_path, tiny_model), *overrides, "max_steps=30")
    training = [row["reward/mean"] for row in rows]
    assert fmean(training[:2]) < 0.4
    assert fmean(training[-3:]) > 0.9


@pytest.mark.parametrize("backend", [*BACKENDS, "mixed"])
def test_a_run_resumed_from_a_checkpoint_equals_the_whole_one(tiny_model, tmp_path, backend):
    overrides = MIXED if backend == "mixed" else BACKENDS[backend]
    whole = run_toy(write_toy(tmp_path / "whole", tiny_model), *overrides, "max_steps=4")
    folder = write_toy(tmp_path / "parts", tiny_model)
    run_toy(folder, *overrides, "max_steps=2", "save_steps=2")
    resumed = run_toy(folder, *overrides, "max_steps=4", "save_steps=2", "resume_from_checkpoint=true")
    assert comparable(resumed) == comparable(whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exported", [False, True])
def test_a_checkpoint_of_another_backend_is_refused_by_name(tiny_model, tmp_path, backend, exported):
    folder = write_toy(tmp_path, tiny_model)
    run_toy(folder, "max_steps=1", "save_steps=1", f"checkpoint_config.save_hf_model={exported}")
    overrides = (*BACKENDS[backend], "max_steps=2", "resume_from_checkpoint=auto")
    with pytest.raises(ValueError, match="holds actor_train as fsdp2_train wrote it.*go on with fsdp2_train") as error:
        run_toy(folder, *overrides)
    assert ("model_name_or_path=" in str(error.value)) is exported
    if exported:  # what the message says can be done
        model = folder / "output" / "checkpoints" / "checkpoint-1" / "hf_model"
        run_toy(folder, *BACKENDS[backend], "max_steps=1", f"actor_train.model_args.model_name_or_path={model}")


def test_a_critic_of_another_backend_is_not_offered_the_actors_model(tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    run_toy(folder, *MIXED, "max_steps=1", "save_steps=1", "checkpoint_config.save_hf_model=true")
    overrides = (*MIXED, "critic.strategy_args.strategy_name=fsdp2_train", "resume_from_checkpoint=auto")
    with pytest.raises(ValueError, match="holds critic as deepspeed_train wrote it.*go on with deepspeed_train$"):
        run_toy(folder, *overrides, "max_steps=2")
