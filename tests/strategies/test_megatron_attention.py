"""Rotation, norm and rows of Megatron's attention against transformers and against numbers worked by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from device_syncs import OperatorCounts
from megatron_cases import build_part
from train_contract import make_batch

from roll.configs.schema.megatron_config import MegatronConfig
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out

pytest.importorskip("megatron.core")

from roll.strategies.megatron.megatron_attention import RMSNorm, Rotary, rotate

ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    },
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("longest", [12, 90])
@pytest.mark.parametrize("kind", ROPES)
def test_rotations_of_every_type_are_those_of_transformers(kind, longest):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": kind, "rope_theta": 500.0, **ROPES[kind]},
    )
    positions = torch.stack([torch.arange(longest), torch.arange(longest) % 7])
    heads = torch.randn(longest, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = Rotary(config, 8).tables(positions, heads.dtype, slice(2, longest))
    mine = rotate(heads[2:], cos, sin)
    theirs = heads.permute(1, 2, 0, 3)
    theirs, _ = apply_rotary_pos_emb(theirs, theirs, *LlamaRotaryEmbedding(config)(theirs, positions))
    assert torch.equal(mine, theirs.permute(2, 0, 1, 3)[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_transformers_and_is_marked_for_split_activations(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=True, use_cpu_initialization=True)
    mine, theirs = RMSNorm(config, 16, eps=1e-5), LlamaRMSNorm(16, eps=1e-5).to(dtype)
    weight = torch.randn(16, generator=torch.Generator().manual_seed(0)).to(dtype)
    mine.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(mine(hidden), theirs(hidden))
    assert mine.weight.sequence_parallel


def counted(info, path, options, layout, recompute):
    """Operators of a pass through a model and back."""
    from roll.strategies.megatron.platform import cpu_platform

    with cpu_platform():
        (chunk,) = build_part(info, path, MegatronConfig(**options), trains=True, recompute=recompute)
        with OperatorCounts() as counts:
            torch.autograd.backward(chunk(layout, layout.positions, HeadRequest()).logprobs.sum())
    assert chunk.decoder.layers[0].self_attention.linear_qkv.weight.grad is not None
    return counts.calls, counts.syncs


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_layer_waits_for_the_device_or_makes_rotations_of_its_own(ranks, model_of, packed, recompute):
    layout = lay_out(make_batch(), torch.device("cpu"), packed=packed)
    ((calls, syncs),) = ranks.run(counted, 1, model_of("llama", layers=4), {}, layout, recompute)
    assert syncs == {}
    assert calls["cos"] == calls["sin"] == 1
