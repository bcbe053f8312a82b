"""The whole loop on every training backend: the same first steps, a solved task, and a resumed run."""

from __future__ import annotations

from statistics import fmean

import pytest
from pipeline_contract import JOBS, MIXED
from toy import run_toy, write_toy

BACKENDS = JOBS["rlvr"].backends


@pytest.mark.parametrize("backend", [*BACKENDS, "mixed"])
def test_every_backend_solves_the_toy(tiny_model, tmp_path, backend):
    overrides = MIXED if backend == "mixed" else BACKENDS[backend]
    rows = run_toy(write_toy(tmp_path, tiny_model), *overrides, "max_steps=30")
    training = [row["reward/mean"] for row in rows]
    assert fmean(training[:2]) < 0.4
    assert fmean(training[-3:]) > 0.9


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
