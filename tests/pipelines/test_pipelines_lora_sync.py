"""The whole loop on the real vLLM, which gets the base weights once and then adapters alone, and dies on the way."""

from __future__ import annotations

import importlib.util
import threading
from statistics import fmean

import pytest
from test_pipelines_vllm import kill_the_engine
from tiny_models import build_tiny_model
from toy import run_toy, write_toy

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm, which isn't installed")

ENGINE = "{strategy_name: vllm, strategy_config: {kv_cache_memory_bytes: 67108864, load_format: dummy}}"
RUN = (
    f"actor_infer.strategy_args={ENGINE}",
    "lora_sync=adapters",
    "actor_train.model_args.lora_rank=8",
    "actor_train.model_args.lora_alpha=32",
    "actor_train.training_args.learning_rate=5e-3",
    "async_generation_ratio=1",
    "policy_loss=decoupled_ppo",
    "verify_weight_sync=logprob",
    "max_steps=30",
)


def test_adapters_alone_teach_the_engine_even_after_it_was_replaced(tmp_path):
    # A head as small as a random model's can't be sharp, whatever the adapters feed it, and it is frozen here.
    model = build_tiny_model(tmp_path / "model", "llama", hidden=128, initializer_range=0.3)
    folder = write_toy(tmp_path / "run", model)
    log, killed = folder / "output" / "logs" / "metrics.jsonl", []
    killer = threading.Thread(target=kill_the_engine, args=(log, killed), daemon=True)
    killer.start()
    rows = run_toy(folder, *RUN)
    killer.join(timeout=10)
    assert killed, "no engine process was found"
    assert sum(row["rollout/engine_restarts"] for row in rows) == 1
    gigabytes = [row["sync/gigabytes"] for row in rows if "sync/gigabytes" in row]
    assert len(set(gigabytes)) == 1, "adapters alone, whatever happens"
    assert gigabytes[0] < 0.25 * (model / "model.safetensors").stat().st_size / 1e9
    rewards = [row["reward/mean"] for row in rows]
    assert fmean(rewards[-5:]) > 0.7 > fmean(rewards[:2])
