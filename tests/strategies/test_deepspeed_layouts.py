"""The layout contract on DeepSpeed: stages, ranks, families, token budgets, packing, offload, the shipped presets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from layout_contract import check_layout, check_layouts, layout_spec, my_rows, relative
from test_deepspeed_steps import STAGES, norms_of, spec_of, stages, steps_of
from train_contract import LOSS, build, weights_of

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("deepspeed_*.yaml"))
BUDGET = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 24}


# What a family brings is the modules that ZeRO 3 hooks into, and experts whose weights get no gradient.
FAMILIES = {
    "llama": list(STAGES),
    "qwen3_moe": ["stage 1", "stage 3"],
    "qwen2 and qwen3": [("qwen2", "stage 3"), ("qwen3", "stage 0")],
    "the other cells": [
        ("qwen3_moe", "stage 0"), ("qwen3_moe", "stage 2"), ("qwen2", "stage 1"), ("qwen3", "stage 3")
    ],
}  # fmt: skip


@pytest.mark.parametrize("families", FAMILIES)
def test_two_ranks_equal_a_plain_loop(ranks, model_of, families):
    pairs = [pair if isinstance(pair, tuple) else (families, pair) for pair in FAMILIES[families]]
    cases = {" ".join(pair): (model_of(pair[0]), {"zero_optimization": STAGES[pair[1]]}, {}) for pair in pairs}
    check_layouts(ranks, "deepspeed_train", 2, cases)


@stages()
def test_one_rank_equals_a_plain_loop(ranks, model_of, stage):
    check_layout(ranks, model_of("llama"), "deepspeed_train", {"zero_optimization": STAGES[stage]}, 1)


BUDGETS = [*((stage, i % 2 == 1) for i, stage in enumerate(STAGES)), ("stage 0", True), ("stage 3", False)]


def test_token_budgets_with_and_without_packing_change_no_number(ranks, model_of):
    cases = {
        f"{stage}, packed: {packed}": (
            model_of("qwen3"),
            {"zero_optimization": STAGES[stage]},
            {"worker": {**BUDGET, "use_sequence_packing": packed}},
        )
        for stage, packed in BUDGETS
    }
    check_layouts(ranks, "deepspeed_train", 2, cases)


def test_every_preset_trains_as_shipped(ranks, model_of):
    cases = {}
    for file in PRESETS:
        (name, options), *more = yaml.safe_load(file.read_text()).items()
        assert (name, more) == (file.stem, [])
        cases[name] = (model_of("llama"), options, {})
    check_layouts(ranks, "deepspeed_train", 2, cases)


def chunked_steps(info, spec):
    from roll.strategies.training import logits

    before, logits._CHUNK_ELEMENTS = logits._CHUNK_ELEMENTS, 106 * 3
    try:
        return steps_of(info, spec)
    finally:
        logits._CHUNK_ELEMENTS = before


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_may_run_the_head_on_different_numbers_of_chunks(ranks, model_of, tied):
    spec = spec_of(model_of("llama", tie_word_embeddings=tied), "stage 3")
    results, (*_, weights), _ = ranks.run(chunked_steps, 2, spec)[0]
    expected, (*_, wanted), _ = ranks.run(steps_of, 2, spec)[0]
    assert norms_of(results) == pytest.approx(norms_of(expected), rel=1e-5)
    assert max(relative(weights[name], wanted[name]) for name in wanted) < 1e-4


def held(info, spec):
    """Share of the model's numbers that this rank holds between steps."""
    strategy = build(spec, info)
    strategy.train_step(my_rows(strategy), LOSS)
    parameters = list(strategy._model.parameters())
    return sum(p.numel() for p in parameters) / sum(getattr(p, "ds_numel", p.numel()) for p in parameters)


def test_no_rank_holds_the_weights_of_stage_3_between_steps(ranks, tiny_model):
    assert ranks.run(held, 2, spec_of(tiny_model, "stage 3")) == [0.0, 0.0]
    assert ranks.run(held, 2, spec_of(tiny_model, "stage 2")) == [1.0, 1.0]


def infer(info, spec):
    strategy = build(spec, info)
    mine = my_rows(strategy)
    outputs = [strategy.forward(mine, ("logprobs", "entropy")) for _ in range(2)]
    assert torch.equal(outputs[0].logprobs, outputs[1].logprobs)
    return outputs[0].logprobs, outputs[0].entropy, weights_of(strategy)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", ["stage 2", "stage 3", "stage 3, all on the host"])  # below 3 it is a plain module
def test_roles_that_do_not_train_score_like_fsdp2(ranks, tiny_model, stage, dtype):
    changes = {"model": {"dtype": dtype}, "trains": False}
    answers = ranks.run(infer, 2, spec_of(tiny_model, stage, name="deepspeed_infer", **changes))
    logprobs, entropy, weights = ranks.run(infer, 1, layout_spec(tiny_model, "fsdp2_infer", {}, **changes))[0]
    tolerance = 1e-5 if dtype == "fp32" else 0.05
    torch.testing.assert_close(torch.cat([a[0] for a in answers]), logprobs, atol=tolerance, rtol=0)
    torch.testing.assert_close(torch.cat([a[1] for a in answers]), entropy, atol=tolerance, rtol=0)
    for name, tensor in answers[0][2].items():
        assert torch.equal(tensor, weights[name])


NAPS = [("parameters", "gradients", "optimizer"), ("optimizer", "gradients")]


def nap(info, spec):
    """Training with a nap after each step, of all parts and of some in turn."""
    strategy = build(spec, info)
    batch, results = my_rows(strategy), []
    for parts in (*NAPS, NAPS[0]):
        results.append(strategy.train_step(batch, LOSS).result())
        freed = strategy.sleep(parts)
        strategy.sleep(parts)  # twice is once
        strategy.wake(parts[:1])
        strategy.wake(parts)
        strategy.wake(parts)
    return results, weights_of(strategy), freed


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@stages()
def test_training_goes_on_after_sleep_as_if_nothing_had_been(ranks, tiny_model, stage, dtype):
    spec = spec_of(tiny_model, stage, model={"dtype": dtype})
    results, weights, freed = ranks.run(nap, 2, spec)[0]
    expected, wanted, _ = ranks.once(steps_of, 2, spec)[0]
    assert results == expected[:3]
    assert all(torch.equal(weights[name], tensor) for name, tensor in wanted[3].items())
    assert freed == 0  # the device is the host
