"""Mixtures of experts on the real vLLM: after each of three weight updates it computes what transformers does.

An engine of its own for each, of twenty seconds and more; the full tier has one (test_engines_vllm.py).
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from engine_contract import EngineUnderTest
from tiny_models import build_tiny_model

from roll.configs.schema.engine_config import VllmConfig
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import EngineSettings
from roll.strategies.engines.vllm.vllm_engine import build

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm, which isn't installed")

_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "mixtral": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "qwen3_moe": {"moe_intermediate_size": 48},  # padded to 64
    "qwen2_moe": {"mlp_only_layers": [0]},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _ROUTED,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},  # its loader writes by itself
}


@pytest.mark.parametrize("family", FAMILIES)
def test_three_weight_updates_leave_the_engine_with_the_trainers_log_probs(tmp_path, family):
    path = build_tiny_model(tmp_path / family, family, hidden=128, tie_word_embeddings=False, **FAMILIES[family])
    options = VllmConfig(block_size=32, engine_args={"kv_cache_memory_bytes": 64 << 20})
    settings = EngineSettings(max_running_requests=16, max_sequence_length=128, seed=0, update_buffer_bytes=1 << 20)
    engine = build(ModelArgs(model_name_or_path=str(path)), options, settings)
    try:
        t = EngineUnderTest(engine, path, max_context=128, loads_in_place=False)
        for number in range(4):
            if number:
                t.update(number)
            request = t.request(f"r{number}", [9, 8, 7, 20, 30, 12], max_new_tokens=24)
            completion = t.run([request])[request.id]
            table = t.logprob_tables(request, completion)
            theirs = table.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert (theirs - torch.tensor(completion.logprobs)).abs().max() < 1e-4, f"after {number} updates"
    finally:
        engine.close()
