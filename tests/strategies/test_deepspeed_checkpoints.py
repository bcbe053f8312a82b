"""Checkpoints of DeepSpeed roles: bit for bit in the same layout, exact in any other, refused where they don't fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from layout_contract import my_rows
from test_deepspeed_steps import STAGES, spec_of, stages
from tiny_models import build_tiny_model
from train_contract import LOSS, build, make_batch, weights_of

SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 2}


def a_spec(path, stage, dtype="fp32"):
    return spec_of(path, stage, training=SCHEDULE, model={"dtype": dtype})


def save_then_go_on(info, spec, path):
    strategy = build(spec, info)
    batch = my_rows(strategy)
    for _ in range(2):
        strategy.train_step(batch, LOSS)
    strategy.save(path)
    saved, scores = weights_of(strategy), strategy.forward(batch, ("logprobs",)).logprobs
    return saved, *go_on(strategy, batch), scores


def go_on(strategy, batch):
    return [strategy.train_step(batch, LOSS).result() for _ in range(3)], weights_of(strategy)


def load_then_go_on(info, spec, path):
    """(weights as loaded, results of steps, weights after them, scores as loaded)."""
    strategy = build(spec, info)
    batch = my_rows(strategy)
    strategy.load(path)
    loaded, scores = weights_of(strategy), strategy.forward(batch, ("logprobs",)).logprobs
    return loaded, *(go_on(strategy, batch) if spec.trains else ([], loaded)), scores


def load_twice(info, spec, path):
    """(weights as loaded, results of steps, weights after them), twice: then into a role that has moved on."""
    strategy = build(spec, info)
    batch, answers = my_rows(strategy), []
    for _ in range(2):
        strategy.load(path)
        answers.append((weights_of(strategy), *go_on(strategy, batch)))
    return answers


def equal(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


@stages()
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_continues_bit_for_bit(ranks, tiny_model, written, stage, dtype):
    spec = a_spec(tiny_model, stage, dtype)
    path, (saved, results, weights, _) = written(save_then_go_on, 2, spec)
    for loaded, resumed, after in ranks.run(load_twice, 2, spec, path)[0]:
        assert equal(loaded, saved)
        assert resumed == results
        assert equal(after, weights)


OTHERS = [
    ("stage 0", 2, "stage 3", 1),
    ("stage 1", 2, "stage 2", 1),
    ("stage 2", 1, "stage 3", 2),
    ("stage 3", 2, "stage 2", 2),
    ("stage 3", 2, "stage 3", 1),
    ("stage 3", 1, "stage 0", 2),
    ("stage 3, all on the host", 2, "stage 1", 1),
    ("stage 1", 1, "stage 2, optimizer on the host", 2),
]


@pytest.mark.parametrize(("writer", "wrote", "reader", "reads"), OTHERS)
def test_another_stage_and_number_of_ranks_continue_with_exact_weights_and_moments(
    ranks, tiny_model, written, writer, wrote, reader, reads
):
    path, (saved, results, weights, _) = written(save_then_go_on, wrote, a_spec(tiny_model, writer))
    loaded, resumed, after, _ = ranks.run(load_then_go_on, reads, a_spec(tiny_model, reader), path)[0]
    assert equal(loaded, saved)
    for mine, theirs in zip(resumed, results, strict=True):
        assert mine["actor/lr"] == theirs["actor/lr"]
        assert mine["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
    for name, tensor in weights.items():
        assert float((after[name] - tensor).abs().max() / tensor.abs().max()) < 1e-4


def test_moments_are_the_very_numbers_under_another_layout(ranks, tiny_model, written, tmp_path):
    path, _ = written(save_then_go_on, 2, a_spec(tiny_model, "stage 3"))
    ranks.run(load_and_save, 1, a_spec(tiny_model, "stage 1"), path, tmp_path)
    first, second = tensors_in(path), tensors_in(tmp_path)
    assert any(name.startswith("exp_avg_sq:") for name in first)
    assert equal(first, second)


def load_and_save(info, spec, source, target):
    strategy = build(spec, info)
    strategy.load(source)
    strategy.save(target)


def tensors_in(path):
    from safetensors.torch import load_file

    return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}


def test_a_role_that_does_not_train_reads_the_weights_alone(ranks, tiny_model, written):
    path, (saved, _, _, expected) = written(save_then_go_on, 2, a_spec(tiny_model, "stage 3"))
    for stage in ("stage 2", "stage 3", "stage 3, all on the host"):  # below 3 it is a plain module
        reader = spec_of(tiny_model, stage, name="deepspeed_infer", trains=False)
        loaded, _, _, scores = ranks.run(load_then_go_on, 2, reader, path)[0]
        assert equal(loaded, saved), stage
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


def test_a_checkpoint_before_the_first_step_and_frozen_weights_come_back(ranks, tiny_model, tmp_path):
    frozen = {"freeze_module_prefix": ("model.layers.0.",)}
    for stage in STAGES:
        spec, path = spec_of(tiny_model, stage, model=frozen), tmp_path / stage
        weights = ranks.run(save_at_once, 2, spec, path)[0]
        (expected,), (loaded, _, after) = ranks.run(go_on_then_load, 1, spec, path)[0]
        assert equal(loaded, weights)
        for name, tensor in expected.items():
            torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=1e-4)


def save_at_once(info, spec, path):
    strategy = build(spec, info)
    strategy.save(path)
    return weights_of(strategy)


def go_on_then_load(info, spec, path):
    """Weights after steps; then of the checkpoint: (weights as loaded, results of steps, weights after them)."""
    strategy, batch = build(spec, info), make_batch()
    fresh = go_on(strategy, batch)[1:]
    strategy.load(path)
    return fresh, (weights_of(strategy), *go_on(strategy, batch))


def refusals(info, asked):
    """What each role says that is asked to load a folder."""
    return [refusal(build(spec, info), path) for spec, path in asked]


def refusal(strategy, path):
    try:
        strategy.load(path)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("stage", ["stage 0", "stage 3"])
def test_what_does_not_fit_is_refused_by_role_and_path(ranks, tiny_model, tmp_path, stage):
    path, spec = tmp_path / "checkpoint", spec_of(tiny_model, stage)
    ranks.run(save_at_once, 1, spec, path)
    wider = spec_of(build_tiny_model(tmp_path / "wide", hidden=48), stage)
    deeper = spec_of(build_tiny_model(tmp_path / "deep", layers=3), stage)
    critic = spec_of(tiny_model, stage, kind="value")

    torn, unread = (shutil.copytree(path, tmp_path / name) for name in ("torn", "unread"))
    next(torn.glob("*.safetensors")).write_bytes(b"torn")
    (unread / "index.json").write_text("{")
    asked = {
        "has shape (106, 32), expected (106, 48)": (wider, path),
        "it has no 'lm.model.layers.2.": (deeper, path),
        "tensors differ": (critic, path),
        "holds no checkpoint of actor_train that": (spec, tmp_path),
        "can't be read": (spec, torn),
        "holds no checkpoint": (spec, unread),
    }
    said = ranks.run(refusals, 1, list(asked.values()))[0]
    for text, (words, (_, where)) in zip(said, asked.items(), strict=True):
        assert words in text
        assert "actor_train" in text
        assert str(where) in text


def test_large_models_are_written_in_files_of_bounded_size(ranks, tiny_model, tmp_path):
    ranks.run(save_in_pieces, 2, spec_of(tiny_model, "stage 3"), tmp_path / "checkpoint")
    files = list((tmp_path / "checkpoint").glob("*.safetensors"))
    assert len(files) > 4
    assert max(file.stat().st_size for file in files) < 40_000
    index = json.loads((tmp_path / "checkpoint" / "index.json").read_text())
    assert set(index["files"].values()) == {file.name for file in files}


def save_in_pieces(info, spec, path):
    from roll.strategies.deepspeed import deepspeed_files as files

    strategy, limit = build(spec, info), files._FILE_BYTES
    strategy.train_step(my_rows(strategy), LOSS)
    files._FILE_BYTES = 20_000
    try:
        strategy.save(path)
    finally:
        files._FILE_BYTES = limit


def export(info, spec, path):
    strategy = build(spec, info)
    strategy.train_step(my_rows(strategy), LOSS)
    strategy.export(path)
    return weights_of(strategy)


@stages()
def test_an_export_loads_in_transformers_with_the_trained_weights(ranks, tiny_model, tmp_path, stage):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = ranks.run(export, 2, spec_of(tiny_model, stage, model={"dtype": "bf16"}), tmp_path / "hf")[0]
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).named_parameters())
    assert equal(loaded, weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template
