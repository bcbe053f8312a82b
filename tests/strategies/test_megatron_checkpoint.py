"""Checkpoints of Megatron: written under one layout, read under any other, weights and moments exactly."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from layout_contract import EP2, PLAIN, PP2, SP, TP2, VP2, layout_spec, my_rows
from train_contract import LOSSES, build, weights_of

from roll.configs.schema.strategy_config import STRATEGIES, StrategyArgs


def advance(strategy, spec, steps):
    """Metrics of the steps as far as this rank knows them."""
    mine = my_rows(strategy)
    return [strategy.train_step(mine, LOSSES[spec.kind]).result() for _ in range(steps)]


def write(info, spec, folder):
    """Two steps, a checkpoint, two more steps: (weights at the checkpoint, metrics, weights after them)."""
    strategy = build(spec, info)
    advance(strategy, spec, 2)
    strategy.save(folder)
    return weights_of(strategy), advance(strategy, spec, 2), weights_of(strategy)


def resume(info, spec, folder):
    """The same from the checkpoint on."""
    strategy = build(spec, info)
    strategy.load(folder)
    return weights_of(strategy), advance(strategy, spec, 2), weights_of(strategy)


def a_spec(path, options, **changes):
    training = {"lr_scheduler_type": "linear", "weight_decay": 0.1}
    return layout_spec(path, "megatron_train", options, training=training, **changes)


def check_resumed(wrote, read, role="actor"):
    """The same weights at once, the same learning rate, gradient and weights afterwards."""
    for name, tensor in wrote[0].items():
        assert torch.equal(read[0][name], tensor), name
    for mine, theirs in zip(read[1], wrote[1], strict=True):
        assert mine[f"{role}/lr"] == theirs[f"{role}/lr"]
        assert mine[f"{role}/grad_norm"] == pytest.approx(theirs[f"{role}/grad_norm"], rel=1e-5)
    for name, tensor in wrote[2].items():
        torch.testing.assert_close(read[2][name], tensor, rtol=1e-4, atol=2e-5)


LAYOUTS = {
    "one rank": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, TP2),
    "pipeline 2": (2, PP2),
    "interleaved": (2, VP2),
    "tensor 2 x pipeline 2": (4, {**TP2, **PP2}),
    "tensor 2 x data 2": (4, TP2),
    "tensor 2, whole optimizer": (2, {**TP2, **PLAIN}),
    "data 2, whole optimizer": (2, PLAIN),
}


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ("one rank", "one rank"),
        ("one rank", "tensor 2 x pipeline 2"),
        ("data 2", "one rank"),
        ("data 2", "pipeline 2"),
        ("tensor 2", "data 2"),
        ("tensor 2", "interleaved"),
        ("interleaved", "tensor 2 x data 2"),
        ("tensor 2 x pipeline 2", "data 2"),
        ("tensor 2 x data 2", "one rank"),
        ("tensor 2, whole optimizer", "data 2, whole optimizer"),
        ("data 2, whole optimizer", "data 2"),
        ("tensor 2 x data 2", "tensor 2, whole optimizer"),
    ],
)
def test_any_layout_goes_on_where_another_stopped(ranks, model_of, written, wrote, reads):
    path = model_of("llama", layers=4)
    (world, options), (other_world, others) = LAYOUTS[wrote], LAYOUTS[reads]
    folder, before = written(write, world, a_spec(path, options))
    check_resumed(before, ranks.run(resume, other_world, a_spec(path, others), folder)[0])


@pytest.mark.parametrize(
    ("world", "options", "other_world", "others"),
    [(2, EP2, 1, {}), (1, {}, 2, EP2), (2, EP2, 2, {**TP2, **SP}), (2, {**EP2, **PLAIN}, 2, PLAIN)],
)
def test_experts_move_between_ranks(ranks, model_of, written, world, options, other_world, others):
    path = model_of("qwen3_moe")
    folder, before = written(write, world, a_spec(path, options))
    check_resumed(before, ranks.run(resume, other_world, a_spec(path, others), folder)[0])


def test_a_critic_resumes_with_its_head(ranks, model_of, tmp_path):
    path = model_of("llama", layers=4)
    before = ranks.run(write, 2, a_spec(path, TP2, kind="value"), tmp_path / "saved")[0]
    after = ranks.run(resume, 2, a_spec(path, PP2, kind="value"), tmp_path / "saved")[0]
    check_resumed(before, after, role="critic")


def test_bfloat16_weights_resume_with_their_float32_masters(ranks, model_of, tmp_path):
    path, model = model_of("llama", layers=4), {"dtype": "bf16"}
    before = ranks.run(write, 2, a_spec(path, {}, model=model), tmp_path / "saved")[0]
    after = ranks.run(resume, 2, a_spec(path, {}, model=model), tmp_path / "saved")[0]
    assert all(torch.equal(after[2][name], tensor) for name, tensor in before[2].items())


def read_only(info, spec, folder):
    strategy = build(spec, info)
    strategy.load(folder)
    return weights_of(strategy)


def as_infer(spec, options):
    args = StrategyArgs(strategy_name="megatron_infer", strategy_config=STRATEGIES["megatron_infer"](**options))
    return dataclasses.replace(spec, trains=False, worker=dataclasses.replace(spec.worker, strategy_args=args))


def test_without_an_optimizer_only_the_weights_are_read(ranks, model_of, written):
    path = model_of("llama", layers=4)
    folder, (saved, *_) = written(write, 2, a_spec(path, TP2))
    read = ranks.run(read_only, 2, as_infer(a_spec(path, {}), PP2), folder)[0]
    assert all(torch.equal(read[name], tensor) for name, tensor in saved.items())


def refused(info, spec, folder):
    try:
        resume(info, spec, folder)
    except ValueError as error:
        return str(error)
    return None


def test_what_does_not_fit_says_which_role_and_folder(ranks, model_of, tmp_path):
    folder = tmp_path / "saved"
    spec = a_spec(model_of("llama"), {})
    assert f"actor_train: {folder}" in ranks.run(refused, 1, spec, folder)[0]
    ranks.run(write, 1, spec, folder)
    for other in ({"hidden": 64}, {"layers": 4}):
        message = ranks.run(refused, 1, a_spec(model_of("llama", **other), {}), folder)[0]
        assert message is not None and f"actor_train: {folder}" in message, other
    shutil.rmtree(folder / "state")
    assert f"{folder}" in ranks.run(refused, 1, spec, folder)[0]


def test_the_schedule_is_saved_as_by_the_other_backends(model_of, written):
    folder, _ = written(write, 1, a_spec(model_of("llama", layers=4), {}))
    assert json.loads((folder / "schedule.json").read_text()) == {"optimizer_steps": 2, "updates": 2}
