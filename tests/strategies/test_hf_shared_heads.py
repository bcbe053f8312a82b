"""Attention without copies of shared heads: the same bits as transformers' own, in prefill and decode."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build_tiny_model

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import Request, SamplingParams
from roll.strategies.engines.hf import shared_heads
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.engines.hf.shared_heads import share_heads
from roll.strategies.training.pretrained import DTYPES, load_causal_lm


def played(model):
    """Responses to prompts of several lengths, one of which comes while the others are under way."""
    engine = HfInfer(model, eos_token_ids=(), pad_token_id=0, max_running_requests=3, max_context=200)
    lengths = (70, 5, 31, 12)
    engine.submit(
        [
            Request(
                id=str(i),
                prompt_ids=tuple((7 * i + j) % 90 + 5 for j in range(length)),
                params=SamplingParams(max_new_tokens=6 + i),
                seed=i,
                order=(i, 0, 0),
                affinity="",
            )
            for i, length in enumerate(lengths)
        ]
    )
    done = engine.poll(40)
    assert len(done) == len(lengths)
    return sorted((c.id, c.token_ids, c.logprobs) for c in done)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_responses_have_the_same_bits(tmp_path, family, dtype, monkeypatch):
    options = {"sliding_window": 16} if family == "mistral" else {}
    args = ModelArgs(model_name_or_path=str(build_tiny_model(tmp_path, family, **options)))
    plain, shared = (load_causal_lm(args, DTYPES[dtype]) for _ in range(2))
    share_heads(shared)
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        seen.append(kwargs.get("enable_gqa", False))
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    expected = played(plain)
    assert not all(seen)  # only where a prefill needs no mask
    seen.clear()
    assert played(shared) == expected
    assert all(seen)


def test_a_model_without_shared_heads_or_with_another_attention_stays_as_it_is(tmp_path):
    folder = str(build_tiny_model(tmp_path / "mha", "llama", num_key_value_heads=4))
    whole = load_causal_lm(ModelArgs(model_name_or_path=folder), torch.float32)
    eager = load_causal_lm(ModelArgs(model_name_or_path=folder, attn_implementation="eager"), torch.float32)
    for model, expected in ((whole, "sdpa"), (eager, "eager")):
        share_heads(model)
        assert model.config._attn_implementation == expected


def test_with_gradients_transformers_function_is_taken(tmp_path, monkeypatch):
    model = load_causal_lm(ModelArgs(model_name_or_path=str(build_tiny_model(tmp_path))), torch.float32)
    ids = torch.arange(5, 25).reshape(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = torch.autograd.grad(model(input_ids=ids, attention_mask=mask).logits.sum(), model.parameters())
    share_heads(model)
    assert model.config._attn_implementation == shared_heads._ATTENTION
    found = torch.autograd.grad(model(input_ids=ids, attention_mask=mask).logits.sum(), model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
