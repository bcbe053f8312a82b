"""The whole loop with LoRA: it learns, the base model is the reference, a kill changes nothing."""

from __future__ import annotations

import json
from statistics import fmean

import pytest
from small import CRITIC, REFERENCE, run_small
from tiny_models import build_tiny_model
from torch.distributed.checkpoint import FileSystemReader
from toy import run_toy, write_toy

from roll.configs.parsing.loader import load_config
from roll.pipelines.rl.engine_pipeline import EnginePipeline
from roll.pipelines.run.model_options import has_model_options, option_problems

MODEL = "actor_train.model_args"
RANK = (f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=32", "actor_train.training_args.learning_rate=5e-3")
KL = ("use_kl_loss=true", "kl_loss_coef=0.1", "add_token_level_kl=true", "allow_both_kl=true", "ppo_epochs=2")


def test_the_toy_is_solved_by_adapters_alone_and_the_engine_samples_from_what_is_trained(tmp_path):
    # A head as small as a random model's can't be sharp, whatever the adapters feed it, and it is frozen here.
    model = build_tiny_model(tmp_path / "model", initializer_range=0.3)
    rows = run_toy(write_toy(tmp_path / "toy", model), *RANK, "max_steps=30")
    rewards = [row["reward/mean"] for row in rows]
    assert fmean(rewards[:2]) < 0.4
    assert fmean(rewards[-3:]) > 0.9
    assert all(row["mismatch/kl"] < 1e-8 for row in rows)


def test_the_base_model_is_the_reference_and_no_model_is_started_for_it(tiny_model, tmp_path):
    own = run_small(tmp_path / "own", tiny_model, *RANK, *KL, "max_steps=3")
    explicit = run_small(tmp_path / "explicit", tiny_model, *RANK, *KL, "max_steps=3", *REFERENCE)
    assert set(own.strategies) == {"actor_train"}
    assert set(explicit.strategies) == {"actor_train", "reference"}
    assert own.last["kl/reference"] > 1e-3
    for mine, theirs in zip(own.rows, explicit.rows, strict=True):
        for name in ("kl/reference", "actor/kl_loss", "actor/loss", "reward/mean"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6), name


def test_a_critic_with_adapters_of_its_own(tiny_model, tmp_path):
    run = run_small(tmp_path, tiny_model, *RANK, *CRITIC, "critic.model_args.lora_rank=4", "max_steps=3")
    moved = {name for name, changed in run.moved("critic").items() if changed}
    assert "value_head.weight" in moved
    assert any(".lora_A." in name for name in moved)
    assert all(".lora_" in name for name in moved - {"value_head.weight"})
    assert all(".lora_" in name for name, changed in run.moved().items() if changed)


def test_a_checkpoint_has_both_folders_and_a_validation_alone_reads_the_adapters(tiny_model, tmp_path, monkeypatch):
    steps = ("max_steps=3", "save_steps=3", "eval_steps=3", "checkpoint_config.save_hf_model=true")
    run = run_small(tmp_path, tiny_model, *RANK, *steps)
    checkpoint = tmp_path / "output" / "checkpoints" / "checkpoint-3"
    config = json.loads((checkpoint / "hf_model" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (8, str(tiny_model))
    written = FileSystemReader(checkpoint / "actor_train" / "state").read_metadata().state_dict_metadata
    assert len(written) > 28 and all(".lora_" in name for name in written if name.startswith("model."))
    again = run_toy(tmp_path, "val_only=true", f"resume_from_checkpoint={checkpoint}", *RANK)
    assert again[-1]["val/accuracy"] == run.last["val/accuracy"]
    adapters = f"{MODEL}.adapter_name_or_path={checkpoint / 'hf_model' / 'adapter'}"
    synced: list[int] = []
    monkeypatch.setattr(EnginePipeline, "sync_weights", lambda self, version: synced.append(version))
    run_toy(tmp_path, "val_only=true", adapters)
    assert synced == [0], "engines that read the model's folder lack the adapters that the actor starts from"


def test_layers_that_the_model_lacks_are_refused_by_roll_check(tiny_model, tmp_path):
    folder = write_toy(tmp_path / "toy", tiny_model)
    keys = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_target=[q_proj, w1]")
    ((key, sentence, _),) = option_problems(load_config(folder, "toy", keys))
    assert key == f"{MODEL}.lora_target"
    assert "has no linear layer 'w1' that can be adapted; expected all-linear or some of q_proj" in sentence
    assert not has_model_options(load_config(folder, "toy"))
