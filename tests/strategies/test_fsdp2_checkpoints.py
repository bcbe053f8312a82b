"""Checkpoints of FSDP2: any world size reads what any other wrote, weights and optimizer exactly."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from layout_contract import shard_of
from tiny_models import build_tiny_model
from train_contract import LOSSES, build, make_batch, make_info, make_spec, weights_of

from roll.configs.schema.strategy_config import Fsdp2Config, StrategyArgs

FROZEN = ("model.layers.0.self_attn.", "model.embed_tokens")


def whole_state(strategy):
    """Weights (the value head too) and moments, unsharded, by name."""
    state = {}
    for name, parameter in strategy._model.named_parameters():
        state[name] = strategy._full(parameter).detach().clone()
        kept = (optimizer.state.get(parameter, {}) for optimizer in strategy._optimizers)
        for key, value in (item for one in kept for item in one.items()):
            state[f"{name}.{key}"] = strategy._full(value).detach().clone()
    return state


def advance(strategy, info, kind, count):
    mine = make_batch().select(shard_of(info.rank, info.world_size))
    key = "critic" if kind == "value" else "actor"
    return [strategy.train_step(mine, LOSSES[kind]).result().get(f"{key}/grad_norm") for _ in range(count)]


def write(info, spec, folder, before=2, after=2):
    """Train, save, train on: (state at the checkpoint, norms after it, state at the end)."""
    strategy = build(spec, info)
    advance(strategy, info, spec.kind, before)
    saved = whole_state(strategy)
    strategy.save(folder)
    return saved, advance(strategy, info, spec.kind, after), whole_state(strategy)


def read(info, spec, folder, after=2):
    """Load and train on: what `write` returns."""
    strategy = build(spec, info)
    strategy.load(folder)
    loaded = whole_state(strategy)
    return loaded, advance(strategy, info, spec.kind, after), whole_state(strategy)


def a_spec(path, kind):
    frozen = FROZEN if kind == "policy" else tuple(name.removeprefix("model.") for name in FROZEN)
    training = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "learning_rate": 1e-3}
    return make_spec(path, kind=kind, model={"freeze_module_prefix": frozen}, training=training, max_grad_norm=0.5)


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize(("wrote", "reads"), [(2, 1), (2, 4), (1, 2), (2, 2), (4, 2)])
def test_any_world_size_reads_the_same_weights_and_moments_and_goes_on(ranks, tiny_model, written, kind, wrote, reads):
    spec = a_spec(tiny_model, kind)
    folder, (saved, norms, end) = written(write, wrote, spec)
    loaded, norms_after, end_after = ranks.run(read, reads, spec, folder)[0]
    assert saved.keys() == loaded.keys()
    assert any(name.endswith("exp_avg_sq") for name in saved)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    if wrote == reads:
        assert norms_after == norms
        assert all(torch.equal(end[name], end_after[name]) for name in end)
    assert norms_after == pytest.approx(norms, rel=1e-4)
    for name, tensor in end.items():
        torch.testing.assert_close(end_after[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("wrote", "reads"), [({}, {"fsdp_size": 2}), ({"fsdp_size": 2}, {})])
def test_a_run_goes_on_with_a_copy_of_the_weights_in_each_half_of_its_ranks(ranks, tiny_model, written, wrote, reads):
    def spec_of(options):
        spec = a_spec(tiny_model, "policy")
        if not options:
            return spec
        args = StrategyArgs(strategy_name="fsdp2_train", strategy_config=Fsdp2Config(**options))
        return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, strategy_args=args))

    folder, (saved, norms, end) = written(write, 4, spec_of(wrote))
    loaded, norms_after, end_after = ranks.run(read, 4, spec_of(reads), folder)[0]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert norms_after == pytest.approx(norms, rel=1e-4)
    for name, tensor in end.items():
        torch.testing.assert_close(end_after[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_before_the_first_step_is_no_step(tiny_model, tmp_path):
    spec, info = a_spec(tiny_model, "policy"), make_info()
    _, norms, end = write(info, spec, tmp_path / "checkpoint", before=0)
    undisturbed = build(spec)
    assert advance(undisturbed, info, "policy", 2) == norms
    _, norms_after, end_after = read(info, spec, tmp_path / "checkpoint")
    assert norms_after == norms
    for name, tensor in whole_state(undisturbed).items():
        assert torch.equal(end[name], tensor)
        assert torch.equal(end_after[name], tensor)


OTHERS = {
    "narrower": ({"hidden": 16}, "Size mismatch"),
    "deeper": ({"layers": 3}, r"only the model has .*layers\.2\."),
    "shallower": ({"layers": 1}, r"only the checkpoint has .*layers\.1\."),
}


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """The checkpoint of one rank after a step."""
    folder = tmp_path_factory.mktemp("written") / "checkpoint"
    strategy = build(make_spec(tiny_model))
    strategy.train_step(make_batch(), LOSSES["policy"])
    strategy.save(folder)
    return folder


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path, other):
    shape, message = OTHERS[other]
    strategy = build(make_spec(build_tiny_model(tmp_path / "model", **shape)))
    with pytest.raises(ValueError, match=f"doesn't fit the model of actor_train.*{message}"):
        strategy.load(folder)


def load_refused(info, spec, folder):
    try:
        build(spec, info).load(folder)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_every_rank_hears_that_a_checkpoint_does_not_fit(ranks, folder, tmp_path):
    spec = make_spec(build_tiny_model(tmp_path / "model", hidden=16))
    answers = ranks.run(load_refused, 2, spec, folder)
    assert all("doesn't fit the model of actor_train" in answer and "Size mismatch" in answer for answer in answers)


def test_a_checkpoint_that_was_not_finished_is_refused(tiny_model, folder, tmp_path):
    half = shutil.copytree(folder, tmp_path / "half")
    (half / "state" / ".metadata").unlink()  # torch writes it last
    with pytest.raises(ValueError, match=r"holds no checkpoint of fsdp2: it has no state/\.metadata"):
        build(make_spec(tiny_model)).load(half)


def test_a_role_without_an_optimizer_reads_the_weights_alone(tiny_model, folder, tmp_path):
    spec = dataclasses.replace(make_spec(tiny_model, strategy="fsdp2_infer"), trains=False)
    reader = build(spec)
    before = weights_of(reader)
    reader.load(folder)
    after = weights_of(reader)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    trained = build(make_spec(tiny_model))
    trained.load(folder)
    assert all(torch.equal(after[name], tensor) for name, tensor in weights_of(trained).items())
