"""Hybrids of attention and recurrent layers through whole runs: sampled as trained, and learning as fast as a Llama.

`dtype: fp32` in every role: differences here are below half precision.
"""

from __future__ import annotations

from statistics import fmean

import preferences
import pytest
from tiny_models import build_tiny_model, build_tiny_picture_model
from toy import run_toy, write_toy
from toy_sft import write_sft

KINDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid")
WAYS = {
    "padded": ("use_prefix_sharing=false",),
    "packed": ("use_prefix_sharing=false", "use_sequence_packing=true"),
    "shared": ("use_prefix_sharing=true", "use_sequence_packing=true"),
}
FP32 = "model_args.dtype=fp32"


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request, tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("hybrid") / request.param, request.param)


def ways(role="actor_train"):
    return {way: tuple(f"{role}.{key}" for key in keys) for way, keys in WAYS.items()}


def test_the_sampler_has_the_trainers_log_probs_before_and_after_every_sync(hybrid, tmp_path):
    losses = []
    for way, keys in ways().items():
        precision = (f"actor_train.{FP32}", f"actor_infer.{FP32}", "max_steps=3")
        rows = run_toy(write_toy(tmp_path / way, hybrid), *keys, *precision)
        assert all(row["mismatch/kl"] < 1e-9 for row in rows), rows
        assert all(abs(row["mismatch/ratio_max"] - 1) < 1e-4 for row in rows)
        assert len({row["actor/grad_norm"] for row in rows}) == 3
        losses.append([row["actor/grad_norm"] for row in rows])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)


def test_a_picture_models_folder_trains_on_text_and_comes_out_as_one(tmp_path):
    from transformers import AutoModelForImageTextToText

    model = build_tiny_picture_model(tmp_path / "model", tie_word_embeddings=True)
    precision = (f"actor_train.{FP32}", f"actor_infer.{FP32}", "max_steps=3", "verify_weight_sync=logprob")
    rows = run_toy(write_toy(tmp_path / "run", model), *precision)
    assert len(rows) == 3
    assert all(row["mismatch/kl"] < 1e-9 and row["actor/grad_norm"] > 0 for row in rows), rows
    folders = (model, tmp_path / "run" / "output" / "hf_model")
    before, after = (AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in folders)
    assert before.keys() == after.keys()
    towers = [name for name in before if name.startswith("model.visual.")]
    assert towers and all(before[name].equal(after[name]) for name in towers)
    assert not any(before[name].equal(after[name]) for name in before if name.endswith("_proj.weight"))


def test_supervised_steps_are_the_same_padded_and_packed(hybrid, tmp_path):
    precision = (f"actor_train.{FP32}", "max_steps=6")
    runs = [run_toy(write_sft(tmp_path / way, hybrid), *keys, *precision) for way, keys in ways().items()]
    for rows in zip(*runs, strict=True):
        assert [row["sft/loss"] for row in rows] == pytest.approx([rows[0]["sft/loss"]] * len(rows), rel=1e-4)
    assert runs[0][-1]["sft/loss"] < runs[0][0]["sft/loss"]


def test_steps_on_preferences_are_the_same_padded_and_packed(hybrid, tmp_path):
    runs = []
    for way, keys in ways().items():
        folder = preferences.write(tmp_path / way, hybrid)
        keys = (*keys, f"actor_train.{FP32}", "+reference={model_args: {dtype: fp32}}", "max_steps=2")
        runs.append(run_toy(folder, *keys))
    for rows in zip(*runs, strict=True):
        losses = [row["preference/loss"] for row in rows]
        assert losses == pytest.approx([losses[0]] * len(rows), rel=1e-4)


def steps_to_solve(folder, family):
    model = build_tiny_model(folder / "model", family, hidden=64)
    rows = run_toy(write_toy(folder, model), "max_steps=30", "actor_train.training_args.learning_rate=5e-3")
    rewards = [row["reward/mean"] for row in rows]
    return next((step for step in range(2, len(rewards)) if fmean(rewards[step - 2 : step + 1]) > 0.9), 99)


def test_a_hybrid_learns_in_at_most_a_third_more_steps_than_a_llama(tmp_path):
    steps = {family: steps_to_solve(tmp_path / family, family) for family in ("llama", "qwen3_5_text")}
    assert steps["qwen3_5_text"] <= 1.3 * steps["llama"] < 1.3 * 30, steps
