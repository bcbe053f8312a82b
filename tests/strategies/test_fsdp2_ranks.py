"""FSDP2 on several ranks: layouts, types of weights and sums, frozen parameters, what stays sharded."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from layout_contract import FSDP, STEPS, check_layout, check_layouts, layout_spec, play, relative, run_layout, shard_of
from torch.utils._python_dispatch import TorchDispatchMode
from train_contract import LOSS, build, make_batch, make_spec, token_mean_loss, weights_of

from roll.configs.schema.strategy_config import Fsdp2Config, StrategyArgs
from roll.strategies.base import LossFn

ROW_BY_ROW = {"training": {"per_device_train_batch_size": 1}}
ON_FOUR = {
    "two copies of two shards": {"fsdp_size": 2},
    "two copies of two shards, gathered once": {"fsdp_size": 2, "reshard_after_forward": False},
    "four shards": {},
    "four copies": {"fsdp_size": 1},
    "two copies of two shards, whole between micro-batches": {"fsdp_size": 2, "shard_between_micro_batches": False},
}


def test_two_shards_that_are_gathered_once_give_the_numbers_of_a_plain_loop(ranks, tiny_model):
    check_layout(ranks, tiny_model, "fsdp2_train", {"reshard_after_forward": False}, 2, **ROW_BY_ROW)


def test_four_ranks_give_the_numbers_of_a_plain_loop(ranks, tiny_model):
    cases = {name: (tiny_model, options, ROW_BY_ROW) for name, options in ON_FOUR.items()}
    check_layouts(ranks, "fsdp2_train", 4, cases)


@pytest.mark.parametrize("world", [1, 2])
def test_every_family_gives_the_numbers_of_a_plain_loop(ranks, model_of, world):
    layouts = {name: options for name, (size, options) in FSDP.items() if size == world}
    cases = {
        f"{family} {name}": (model_of(family), options, {})
        for family in ("llama", "qwen2", "qwen3", "qwen3_moe")
        for name, options in layouts.items()
    }
    check_layouts(ranks, "fsdp2_train", world, cases)


def chunked_play(*args):
    from roll.strategies.training import logits

    logits._CHUNK_ELEMENTS = 106 * 3  # in a copy of the pool's process
    return play(*args)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_on_many_chunks_gives_the_numbers_of_a_plain_loop(ranks, model_of, tied):
    path = model_of("llama", tie_word_embeddings=tied)
    check_layout(ranks, path, "fsdp2_train", {}, 2, play=chunked_play)
    check_layout(ranks, path, "fsdp2_train", {}, 1, play=chunked_play)


def fsdp_spec(path, *, model=None, worker=None, kind="policy", training=None, options=None):
    spec = make_spec(path, model=model, worker=worker, kind=kind, training=training, max_grad_norm=0.5)
    args = StrategyArgs(strategy_name="fsdp2_train", strategy_config=Fsdp2Config(**(options or {})))
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, strategy_args=args))


def steps(info, spec, count):
    """(weights before, after, metrics of each step, types of the parameters that the optimizer steps)"""
    strategy, batch = build(spec, info), make_batch()
    mine = batch.select(shard_of(info.rank, info.world_size))
    before = weights_of(strategy)
    history = [strategy.train_step(mine, LOSS).result() for _ in range(count)]
    types = {p.dtype for group in strategy._groups() for p in group["params"]}
    return before, weights_of(strategy), history, types


def test_updates_below_the_resolution_of_bf16_are_kept_in_float32_weights(ranks, tiny_model):
    spec = fsdp_spec(tiny_model, model={"dtype": "bf16"}, training={"learning_rate": 1e-7})
    before, after, _, types = ranks.run(steps, 2, spec, 3)[0]
    assert types == {torch.float32}
    name = "model.layers.0.mlp.up_proj.weight"
    assert after[name].dtype == torch.float32
    moved = (after[name] - before[name]).abs()
    assert 1e-7 < float(moved.median()) < 4e-7  # three AdamW steps of about the learning rate
    assert (after[name].bfloat16() == before[name].bfloat16()).float().mean() > 0.95  # bf16 weights would have stayed


def test_bf16_stays_close_to_fp32_whichever_type_gradients_are_summed_in(ranks, tiny_model):
    exact = run_layout(ranks, layout_spec(tiny_model, "fsdp2_train", {}), 2)
    runs = {
        reduce: run_layout(
            ranks, layout_spec(tiny_model, "fsdp2_train", {"param_dtype": "bf16", "reduce_dtype": reduce}), 2
        )
        for reduce in ("fp32", "bf16")
    }
    for run in runs.values():
        assert 0 < float((run.logprobs - exact.logprobs).abs().max()) < 0.02
        assert run.norms == pytest.approx(exact.norms, rel=0.02)
        assert len(run.losses) == STEPS
        assert run.losses == pytest.approx(exact.losses, abs=0.02)
        assert max(relative(run.weights[n], exact.weights[n]) for n in exact.weights) < 0.2
    assert runs["fp32"].norms != runs["bf16"].norms


@pytest.mark.parametrize(("world", "options"), [(2, {}), (4, {"fsdp_size": 2})])
def test_frozen_and_trained_parameters_share_a_layer(ranks, tiny_model, world, options):
    frozen = ("model.layers.0.self_attn.", "model.embed_tokens", "model.layers.1.mlp.up_proj")
    spec = fsdp_spec(tiny_model, model={"freeze_module_prefix": frozen}, options=options)
    _, expected, alone, _ = ranks.run(steps, 1, spec, 3)[0]
    before, after, history, _ = ranks.run(steps, world, spec, 3)[0]
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {name for name in before if name.startswith(frozen)}
    assert [h["actor/grad_norm"] for h in history] == pytest.approx([h["actor/grad_norm"] for h in alone], rel=1e-4)
    assert max(relative(after[name], expected[name]) for name in expected) < 1e-4


def what_is_resident(info, spec):
    """(bytes of this rank's weights, layers still gathered after a forward pass, bytes of gradients per micro-batch)"""
    strategy, batch = build(spec, info), make_batch()
    mine = batch.select(shard_of(info.rank, info.world_size))
    weights = sum(p.to_local().nbytes for p in strategy._module.parameters())
    strategy.forward(mine, ("logprobs",))
    layer = strategy._module.lm.model.layers[0]
    gathered = not any(hasattr(p, "to_local") for p in layer.parameters())
    assert gathered == (not hasattr(strategy._module.lm.get_input_embeddings().weight, "to_local"))
    gradients = []
    trained = [p for group in strategy._groups() for p in group["params"]]

    def watching(outputs, micro, sizes):
        gradients.append(sum(p.grad.to_local().nbytes for p in trained if p.grad is not None))
        return token_mean_loss(outputs, micro, sizes)

    strategy.train_step(mine, LossFn(compute=watching, needs=("logprobs",)))
    return weights, gathered, gradients


@pytest.mark.parametrize(("options", "shards"), [({}, 2), ({"fsdp_size": 1}, 1), ({"reshard_after_forward": False}, 2)])
def test_weights_and_gradients_between_micro_batches_are_sharded_as_asked(ranks, tiny_model, options, shards):
    spec = fsdp_spec(tiny_model, options=options, training={"per_device_train_batch_size": 1})
    total = sum(t.nbytes for t in weights_of(build(make_spec(tiny_model))).values())
    weights, gathered, gradients = ranks.run(what_is_resident, 2, spec)[0]
    assert weights == pytest.approx(total / shards, rel=0.02)
    assert gathered == (options.get("reshard_after_forward") is False)
    assert gradients[0] == 0
    if shards > 1:
        assert gradients[1:] == [weights] * 4  # one rank has five rows: every pass leaves its share and no more


class Collectives(TorchDispatchMode):
    """Counts what ranks ask each other for."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if str(operator).startswith("c10d."):
            self.counts[str(operator).split(".")[1]] += 1
        return operator(*args, **(kwargs or {}))


def collectives(info, spec):
    """(all-gathers and reduce-scatters of the passes of an optimizer step, the gradients that they leave)"""
    strategy, batch = build(spec, info), make_batch()
    seen = []

    def instead_of_the_step(lr):
        seen.append((asked.counts["_allgather_base_"], asked.counts["_reduce_scatter_base_"]))
        seen.append({name: p.grad.full_tensor() for name, p in strategy._module.named_parameters()})
        return 0.0, True

    strategy._apply = instead_of_the_step
    with Collectives() as asked:
        strategy.train_step(batch.select(shard_of(info.rank, info.world_size)), LOSS)
    return seen


def test_weights_and_gradients_that_stay_whole_between_micro_batches_travel_once_per_step(ranks, tiny_model):
    def run(**options):
        spec = fsdp_spec(tiny_model, options=options, training={"per_device_train_batch_size": 1})
        return ranks.run(collectives, 4, spec)[0]

    # Two layers and the rest are sharded apart. One rank has 3 of the 6 rows, so there are 3 micro-batches; the rest
    # stays gathered from each forward to its backward pass.
    counts, gradients = run()
    assert counts == (3 * (2 * 2 + 1), 3 * 3)
    for options, expected in (
        ({"shard_between_micro_batches": False}, (3 + 3 * 2, 3)),
        ({"shard_between_micro_batches": False, "reshard_after_forward": False}, (3, 3)),
    ):
        counts, found = run(**options)
        assert counts == expected
        for name, gradient in gradients.items():
            assert relative(found[name], gradient) < 1e-6


def test_offloading_shards_is_refused_where_there_is_no_accelerator(tiny_model):
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ValueError, match="offload_policy needs an accelerator, and this rank has none"):
        build(fsdp_spec(tiny_model, options={"offload_policy": True}))
