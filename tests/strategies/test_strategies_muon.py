"""Muon: the paper's formula in float64, torch's own implementation, any number of ranks, checkpoints."""

from __future__ import annotations

import math

import pytest
import torch
from test_fsdp2_checkpoints import read, whole_state, write
from test_fsdp2_ranks import shard_of
from train_contract import LOSS, build, make_batch, make_info, make_spec, weights_of, with_worker

from roll.configs.schema.strategy_config import Fsdp2Config, StrategyArgs
from roll.strategies.training.muon import BUFFER, Muon, orthogonalized, update_scale

MUON = {"optimizer": "muon", "weight_decay": 0.1}


def newton_schulz(matrix, steps=5):
    """Of the paper, in float64: a polynomial of the singular values."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def test_newton_schulz_by_hand():
    # diag(3, 4) / 5 = diag(0.6, 0.8); one step: 3.4445 s - 4.775 s^3 + 2.0315 s^5 = 1.19327, 0.97649
    found = orthogonalized(torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64)), 1)
    assert found.diagonal().tolist() == pytest.approx([1.1932696, 0.9764824], abs=1e-6)
    assert found.fill_diagonal_(0).abs().max() == 0
    rotation = torch.tensor([[0.0, -2.0], [2.0, 0.0]])  # orthogonal but for its size stays so
    five = orthogonalized(rotation, 5)
    torch.testing.assert_close(five / five[1, 0], rotation / 2)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (3, 4, 6)])
def test_newton_schulz_moves_singular_values_and_nothing_else(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = orthogonalized(matrix, 5)
    each = [newton_schulz(one) for one in matrix.reshape(-1, *shape[-2:])]
    torch.testing.assert_close(found, torch.stack(each).view(shape), rtol=1e-9, atol=1e-10)
    assert not orthogonalized(torch.zeros(shape), 5).any()


def gradients(shape, count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", [(6, 3), (3, 6)])
def test_steps_are_the_papers_and_torchs_within_its_bfloat16(shape, adjust):
    start = gradients(shape, 1)[0]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine = Muon([ours], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust)
    weight, buffer = start.clone(), torch.zeros(shape, dtype=torch.float64)
    scale = 0.2 * math.sqrt(6) if adjust == "match_rms_adamw" else math.sqrt(max(1, shape[0] / shape[1]))
    for gradient in gradients(shape, 4):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        other.step()
        buffer = 0.9 * buffer + gradient  # the paper's sum; a mean is proportional to it
        weight = weight * (1 - 0.02 * 0.1) - 0.02 * scale * newton_schulz(gradient + 0.9 * buffer)
    torch.testing.assert_close(ours.detach(), weight, rtol=1e-9, atol=1e-10)
    moved = (weight - start).abs().max()
    assert (theirs.detach() - weight).abs().max() < 0.05 * moved


def test_the_scale_makes_updates_as_large_as_adamws():
    update = orthogonalized(gradients((64, 16), 1)[0], 5) * update_scale((64, 16), "match_rms_adamw")
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"takes matrices, not a parameter of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_matrices_of_decoder_layers_are_muons_and_all_else_adamws(model_of, family):
    strategy = build(make_spec(model_of(family, tie_word_embeddings=False), training=MUON))
    muon, adamw = strategy._optimizers
    names = {parameter: name for name, parameter in strategy._model.named_parameters()}
    by_muon = {names[p] for group in muon.param_groups for p in group["params"]}
    by_adamw = {names[p] for group in adamw.param_groups for p in group["params"]}
    assert by_muon == {n for n, p in strategy._model.named_parameters() if ".layers." in n and p.dim() > 1}
    assert by_muon | by_adamw == set(names.values())
    assert {n.rpartition(".layers.")[0] for n in by_adamw} >= {""}
    assert any("embed_tokens" in n for n in by_adamw)
    assert any("lm_head" in n for n in by_adamw)
    assert [group["weight_decay"] for group in strategy._groups()] == [0.1, 0.1, 0.0]
    assert strategy._decays == (True, True, False)


def steps(info, spec, count=3):
    """(weights at the end, metrics of each step)"""
    strategy = build(spec, info)
    mine = make_batch().select(shard_of(info.rank, info.world_size))
    history = [strategy.train_step(mine, LOSS).result() for _ in range(count)]
    return weights_of(strategy), history


def test_a_step_of_the_strategy_is_the_papers(tiny_model):
    spec = make_spec(tiny_model, training={**MUON, "learning_rate": 0.01}, max_grad_norm=0.0)
    strategy, name = build(spec), "model.layers.1.mlp.down_proj.weight"
    before, grads = weights_of(strategy)[name], {}
    muon = strategy._optimizers[0]
    parameter = dict(strategy._model.named_parameters())
    target = next(p for n, p in parameter.items() if n.endswith(name))
    muon.register_step_pre_hook(lambda *_: grads.update(it=target.grad.clone()))
    strategy.train_step(make_batch(), LOSS)
    scale = 0.2 * math.sqrt(max(before.shape))
    expected = before * (1 - 0.01 * 0.1) - 0.01 * scale * newton_schulz(grads["it"]).float()
    torch.testing.assert_close(weights_of(strategy)[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "world", "shards"), [("llama", 2, None), ("llama", 3, None), ("llama", 4, 2), ("qwen3_moe", 2, None)]
)
def test_several_ranks_take_the_steps_of_one(ranks, model_of, family, world, shards):
    spec = make_spec(model_of(family), training=MUON)
    weights, history = steps(make_info(), spec)
    args = StrategyArgs(strategy_name="fsdp2_train", strategy_config=Fsdp2Config(fsdp_size=shards))
    found, others = ranks.run(steps, world, with_worker(spec, strategy_args=args))[0]
    assert [h["actor/grad_norm"] for h in others] == pytest.approx([h["actor/grad_norm"] for h in history], rel=1e-4)
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(("wrote", "reads"), [(1, 1), (2, 2), (2, 1)])
def test_a_checkpoint_goes_on_bit_for_bit_and_any_world_size_reads_it(ranks, tiny_model, written, wrote, reads):
    spec = make_spec(tiny_model, training={**MUON, "lr_scheduler_type": "cosine", "warmup_steps": 2})
    folder, (saved, norms, end) = written(write, wrote, spec)
    loaded, norms_after, end_after = ranks.run(read, reads, spec, folder)[0]
    assert saved.keys() == loaded.keys()
    assert any(name.endswith(BUFFER) for name in saved)
    assert any(name.endswith("exp_avg_sq") for name in saved)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    if wrote == reads:
        assert norms_after == norms
        assert all(torch.equal(end[name], end_after[name]) for name in end)
    for name, tensor in end.items():
        torch.testing.assert_close(end_after[name], tensor, rtol=1e-3, atol=2e-5)


def test_a_checkpoint_of_adamw_is_refused(tiny_model, tmp_path):
    strategy = build(make_spec(tiny_model))
    strategy.save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="doesn't fit the model of actor_train"):
        build(make_spec(tiny_model, training=MUON)).load(tmp_path / "checkpoint")


def test_sleep_counts_muons_momentum(tiny_model):
    strategy = build(make_spec(tiny_model, training=MUON))
    resident = {id(tensor) for tensor in strategy._resident("optimizer")}
    held = {id(value) for key, value in _momenta(strategy)}
    assert held
    assert held <= resident
    assert any(name.endswith(BUFFER) for name in whole_state(strategy))


def _momenta(strategy):
    return [(p, state[BUFFER]) for p, state in strategy._optimizers[0].state.items()]


def test_frozen_layers_leave_muon_nothing(tiny_model):
    with pytest.raises(ValueError, match="no matrix of a decoder layer is trained"):
        build(make_spec(tiny_model, training=MUON, model={"freeze_module_prefix": ("model.layers.",)}))
