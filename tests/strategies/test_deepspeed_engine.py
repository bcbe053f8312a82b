"""The making of a DeepSpeed engine: kernels that compute the same update, and a package that may not be there."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch
from test_deepspeed_steps import spec_of
from train_contract import make_info

from roll.strategies import build_train_strategy
from roll.strategies.deepspeed_.engine import cpu_adam


@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="DeepSpeed compiles its kernel")
def test_the_kernel_for_states_in_host_memory_computes_the_same_update():
    settings = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}
    start = [torch.randn(7, 5), torch.randn(5)]

    def run(make):
        weights = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        groups = [{"params": [w], "weight_decay": decay} for w, decay in zip(weights, (0.1, 0.0), strict=True)]
        optimizer, generator = make(groups, settings), torch.Generator().manual_seed(0)
        for _ in range(5):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        return torch.cat([weight.detach().flatten() for weight in weights])

    expected = run(lambda groups, common: torch.optim.AdamW(groups, **common))
    torch.testing.assert_close(run(cpu_adam), expected, atol=2e-6, rtol=0)


def test_a_missing_package_is_named_with_its_install_command(tiny_model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"deepspeed is not installed: pip install -e '\.\[deepspeed\]'"):
        build_train_strategy(spec_of(tiny_model, "stage 1"), make_info())


def printed(info, spec):
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        build_train_strategy(spec, info)
    return said.getvalue()


def test_building_prints_nothing(ranks, tiny_model):
    # ZeRO 1 in bf16 is the optimizer that reports memory whatever the settings.
    assert ranks.run(printed, 2, spec_of(tiny_model, "stage 1", model={"dtype": "bf16"})) == ["", ""]
