"""Which of torch's AdamW steps where, and that its state survives offloading and is where the kernel reads it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from train_contract import LOSS, build, make_batch, make_info, make_spec

from roll.strategies.training.optim import MOMENTS, adamw_kernels, begin_moments
from roll.strategies.training.state_offload import Shelf

HOST, ACCELERATOR = torch.device("cpu"), torch.device("cuda")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (5,), (3, 2, 2))]


def stepped(kernels: dict[str, bool], *, offloaded: bool = False) -> list[torch.Tensor]:
    trained = parameters()
    adamw = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1, **kernels)
    begin_moments(adamw)
    for step in range(4):
        for parameter in trained:
            parameter.grad = torch.sin(parameter.detach() + step)
        if offloaded:
            states = [value for state in adamw.state.values() for value in state.values()]
            shelf = Shelf()
            assert shelf.store(states, HOST) == sum(value.nbytes for value in states) or step == 0
            assert not any(value.untyped_storage().nbytes() for value in states)
            shelf.restore()
        adamw.step()
    return [parameter.detach() for parameter in trained]


def test_the_fused_kernel_steps_on_an_accelerator_and_on_the_host():
    for device in (ACCELERATOR, HOST):
        assert adamw_kernels(device) == {"foreach": False, "fused": True}
    assert adamw_kernels(torch.device("meta")) == {"foreach": False, "fused": False}


def test_on_an_accelerator_moments_and_the_count_of_steps_are_where_the_weights_are():
    with FakeTensorMode():
        weights = [nn.Parameter(torch.empty(4, 4, device="cuda")), nn.Parameter(torch.empty(4, device="cuda"))]
        adamw = torch.optim.AdamW(weights, **adamw_kernels(weights[0].device))
        begin_moments(adamw)
        assert {value.device.type for state in adamw.state.values() for value in state.values()} == {"cuda"}
        assert all(set(state) == {"step", *MOMENTS} for state in adamw.state.values())


@pytest.mark.parametrize("offloaded", [False, True])
def test_the_fused_kernel_steps_as_the_plain_one_from_the_states_it_is_given(offloaded):
    plain = stepped({"foreach": False, "fused": False})
    for fused, expected in zip(stepped(adamw_kernels(ACCELERATOR), offloaded=offloaded), plain, strict=True):
        torch.testing.assert_close(fused, expected, rtol=1e-6, atol=1e-7)


def test_a_trainer_on_the_host_takes_the_fused_one(tiny_model):
    strategy = build(make_spec(tiny_model), make_info())
    (adamw,) = strategy._optimizers
    assert {(group["foreach"], group["fused"]) for group in adamw.param_groups} == {(False, True)}
    strategy.train_step(make_batch(), LOSS)
    assert all(state["step"] == 1 for state in adamw.state.values())
