"""Weights that an engine in the trainer's process may compute with: how they lie doesn't depend on whether it does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from layout_contract import layout_spec
from torch import nn
from train_contract import LOSS, build, make_batch

from roll.strategies.hf.hf_build import hf_module
from roll.strategies.training.optim import MOMENTS
from roll.strategies.training.pretrained import DTYPES


def spec_of(model_of, family="qwen2", **changes):
    return layout_spec(model_of(family, vocab_size=107), "fsdp2_train", {}, **changes)


def matrices(strategy) -> dict[str, nn.Parameter]:
    """The weights of linear layers that are no embedding."""
    model = hf_module(strategy._model)
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    named = ((name, module.weight) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {f"{name}.weight": weight for name, weight in named if id(weight) not in embedded}


def lie_by_input(tensors) -> set[bool]:
    return {tensor.t().is_contiguous() and not tensor.is_contiguous() for tensor in tensors}


def moments(strategy) -> list[torch.Tensor]:
    states = [state for optimizer in strategy._optimizers for state in optimizer.state.items()]
    ours = set(map(id, matrices(strategy).values()))
    return [state[name] for parameter, state in states if id(parameter) in ours for name in MOMENTS]


def test_weights_and_all_that_lies_like_them_lie_by_input_from_the_start_to_after_a_checkpoint(model_of, tmp_path):
    spec = spec_of(model_of)
    strategy = build(spec)
    assert lie_by_input(matrices(strategy).values()) == {True}
    strategy.train_step(make_batch(), LOSS)
    strategy.save(tmp_path)
    again = build(spec)
    again.load(tmp_path)
    for each in (strategy, again):
        each.train_step(make_batch(), LOSS)
        assert lie_by_input([*matrices(each).values(), *moments(each)]) == {True}
        assert moments(each)
    expected = dict(strategy.named_weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.named_weights())


def test_a_reference_lies_as_the_policy(model_of):
    spec = spec_of(model_of)
    assert lie_by_input(matrices(build(dataclasses.replace(spec, trains=False))).values()) == {True}


def test_what_is_lent_is_what_is_trained_and_nothing_is_laid_out_for_it(model_of):
    strategy = build(spec_of(model_of))
    before = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in strategy.named_weights()}
    lent = strategy.lend_weights(torch.float32)
    assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in lent.items()} == before
    strategy.train_step(make_batch(), LOSS)
    assert all(torch.equal(lent[name], tensor) for name, tensor in strategy.named_weights())


CASES = {
    "an engine in bf16": ({}, "bf16"),
    "a trainer that computes in bf16": ({"model": {"dtype": "bf16"}}, "fp32"),
    "adapters": ({"model": {"lora_rank": 4, "lora_alpha": 8.0, "lora_target": ("q_proj",)}}, "fp32"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_from_the_engines_is_not_lent(model_of, case):
    changes, dtype = CASES[case]
    assert build(spec_of(model_of, **changes)).lend_weights(DTYPES[dtype]) == {}


def test_weights_that_compute_in_bf16_lie_by_output(model_of):
    strategy = build(spec_of(model_of, model={"dtype": "bf16"}))
    assert lie_by_input(matrices(strategy).values()) == {False}
