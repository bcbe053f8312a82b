"""Same seed, same run: twice, killed anywhere and resumed, on one process or on several."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest
from same_runs import check_ray_equals_inline, comparable, in_process, logged
from test_pipelines_learning import CRITIC
from toy import run_toy, write_toy

# Everything that has a state: two optimizers, running reward statistics, an adaptive KL coefficient, a learning-rate
# schedule, shuffled epochs, prompts that over-sampling put back, draws of PF-PPO.
EVERYTHING = (
    "max_steps=5",
    "save_steps=2",
    "eval_steps=1",
    "adv_estimator=gae",
    *CRITIC,
    "ppo_epochs=2",
    "reward_norm=running",
    "add_token_level_kl=true",
    "init_kl_coef=0.1",
    "target_kl=0.01",
    "kl_horizon=200",
    "reference.infer_batch_size=16",
    "is_use_additional_prompts=true",
    "max_additional_running_prompts=3",
    "actor_train.training_args.lr_scheduler_type=cosine",
    "pf_ppo.reweight_method=pow",
    "checkpoint_config.save_hf_model=true",
    "response_length=20",
    "actor_infer.generating_args.ignore_eos=false",
)


def weights_hash(folder: Path, step: int = 5) -> str:
    weights = folder / "output" / "checkpoints" / f"checkpoint-{step}" / "hf_model" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, tmp_path_factory):
    # In a process of its own like the others: the number of threads is part of what makes the bits.
    folder = write_toy(tmp_path_factory.mktemp("resume") / "whole", tiny_model)
    assert in_process(folder, EVERYTHING) == 0
    return folder, logged(folder)


def test_the_same_seed_gives_the_same_bits_in_another_process(uninterrupted, tiny_model, tmp_path):
    folder, rows = uninterrupted
    again = write_toy(tmp_path / "again", tiny_model)
    assert in_process(again, EVERYTHING) == 0
    assert logged(again) == rows
    assert weights_hash(again) == weights_hash(folder)


def test_another_seed_gives_another_run(uninterrupted, tiny_model, tmp_path):
    other = comparable(run_toy(write_toy(tmp_path, tiny_model), *EVERYTHING, "seed=4", "max_steps=1"))
    assert other[0]["reward/mean"] != uninterrupted[1][0]["reward/mean"]


@pytest.mark.parametrize(
    ("moment", "nth"),
    [("generation", 120), ("scoring", 300), ("update", 16), ("checkpoint write", 2), ("evaluation", 4)],
)
def test_killed_and_resumed_equals_never_killed(uninterrupted, tiny_model, tmp_path, moment, nth):
    folder, rows = uninterrupted
    killed = write_toy(tmp_path / "killed", tiny_model)
    assert in_process(killed, EVERYTHING, moment=moment, nth=nth) == -signal.SIGKILL
    done = logged(killed)
    assert 1 < len(done) < len(rows), f"killed {moment} after {len(done)} steps: choose another call"
    assert in_process(killed, EVERYTHING, "resume_from_checkpoint=auto") == 0
    assert logged(killed) == rows
    assert weights_hash(killed) == weights_hash(folder)


def test_two_ranks_that_train_under_ray_equal_one_inline(tiny_model, tmp_path):
    names = ("actor/loss", "actor/pg_loss", "reward/mean")
    check_ray_equals_inline(tiny_model, tmp_path, ("max_steps=2",), names=names)


def test_ray_with_two_data_parallel_ranks_equals_inline(tiny_model, tmp_path):
    loss = ("use_kl_loss=true", "kl_loss_coef=0.1", "reference.infer_batch_size=16")
    settings = ("max_steps=4", "adv_estimator=reinforce", "ppo_epochs=2", *loss)
    names = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "reward/mean")
    check_ray_equals_inline(tiny_model, tmp_path, settings, "actor_infer.device_mapping='0-1'", names=names)
