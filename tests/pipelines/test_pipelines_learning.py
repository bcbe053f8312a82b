"""The whole loop solves a toy task with every family of estimators, in seconds, on a random model."""

from __future__ import annotations

from statistics import fmean

import pytest
from toy import run_toy, write_toy

CRITIC = (
    "critic.model_args.disable_gradient_checkpointing=true",
    "critic.training_args.per_device_train_batch_size=32",
    "critic.training_args.gradient_accumulation_steps=2",
    "critic.training_args.learning_rate=1e-2",
)
ALGORITHMS = {
    "grpo": (),
    "rloo": ("adv_estimator=rloo",),
    "reinforce_plus_plus": ("adv_estimator=reinforce_plus_plus",),
    "ppo with critic": ("adv_estimator=gae", "ppo_epochs=2", *CRITIC),
    "remax": ("adv_estimator=remax",),
    "gspo": ("policy_loss=gspo", "loss_agg_mode=seq-mean-token-mean", "ppo_epochs=2", "pg_clip=0.1"),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_toy_is_solved(tiny_model, tmp_path, algorithm):
    schedule = ("max_steps=30", "eval_steps=30", "val_before_train=true")
    rows = run_toy(write_toy(tmp_path, tiny_model), *ALGORITHMS[algorithm], *schedule)
    training = [row["reward/mean"] for row in rows if row["step"] > 0]
    assert fmean(training[:2]) < 0.4
    assert fmean(training[-3:]) > 0.9
    before, after = rows[0]["val/accuracy"], rows[-1]["val/accuracy"]
    assert after > 0.9 > before


def test_mismatch_between_sampler_and_trainer_is_measured_every_step_and_tiny(tiny_model, tmp_path):
    cooler = "actor_infer.generating_args.temperature=0.8"
    for overrides in ((), ("ppo_epochs=2",)):
        rows = run_toy(write_toy(tmp_path / str(len(overrides)), tiny_model), *overrides, cooler)
        assert len(rows) == 4
        assert all(row["mismatch/kl"] < 1e-10 for row in rows)
        assert all(abs(row["mismatch/ratio_max"] - 1) < 1e-4 for row in rows)
