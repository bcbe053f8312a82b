"""liger-kernel's kernels against transformers and our own chunks; the numbers need an accelerator."""

from __future__ import annotations

import pytest
import torch
from layout_contract import check_layout
from tiny_models import build_tiny_model
from train_contract import build, make_batch, make_spec

from roll.configs.catalog.family_table import FAMILIES
from roll.strategies.hf.fused import can_fuse, fused_logprobs
from roll.strategies.training.logits import HeadRequest

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("key", ["use_liger", "use_fused_kernels"])
def test_without_an_accelerator_the_kernels_are_refused_by_key(tiny_model, key):
    with pytest.raises(ValueError, match=f"actor_train.model_args.{key} needs an accelerator, and this rank has none"):
        build(make_spec(tiny_model, model={key: True}))


def test_only_plain_heads_without_entropy_and_soft_cap_are_fused():
    head = torch.nn.Linear(4, 9)
    alone = HeadRequest()
    assert can_fuse(head, None, alone)
    assert not any(can_fuse(head, None, HeadRequest(**more)) for more in ({"entropy": True}, {"top_k": 2}))
    assert not can_fuse(head, 30.0, alone)
    assert not can_fuse(torch.nn.Sequential(head), None, alone)


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_logprobs_and_their_gradients_equal_log_softmax(temperature, bias):
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    hidden = torch.randn(60, 64, device="cuda", requires_grad=True)
    head = torch.nn.Linear(64, 500, bias=bias, device="cuda")
    targets, weights = torch.randint(500, (60,), device="cuda"), torch.randn(60, device="cuda")
    expected = (head(hidden) / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    found = fused_logprobs(hidden, head, targets, temperature)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    wanted = (hidden, *head.parameters())
    slopes = [torch.autograd.grad((weights * logprobs).sum(), wanted) for logprobs in (found, expected)]
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.liger])
@pytest.mark.parametrize("key", ["use_liger", "use_fused_kernels"])
def test_liger_kernels_train_like_a_plain_loop(ranks, tmp_path, family, key):
    pytest.importorskip("liger_kernel")
    check_layout(ranks, build_tiny_model(tmp_path / family, family), "fsdp2_train", {}, 1, model={key: True})


@pytest.mark.gpu
@NO_GPU
def test_liger_layers_of_one_role_leave_models_built_later_alone(tiny_model):
    pytest.importorskip("liger_kernel")
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    model = build(make_spec(tiny_model, model={"use_liger": True}))._model
    assert "Liger" in model.lm.model.norm.forward.__qualname__
    assert dict(vars(modeling_llama)) == before
    plain = build(make_spec(tiny_model))
    assert "Liger" not in plain._model.lm.model.norm.forward.__qualname__
    plain.forward(make_batch(), ("logprobs",))
