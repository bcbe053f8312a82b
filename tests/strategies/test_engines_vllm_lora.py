"""The real vLLM with adapters apart from the weights: one engine, whose log-probs are transformers' and peft's."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
from engine_contract import EngineUnderTest
from safetensors.torch import load_file
from tiny_models import build_tiny_model

from roll.configs.schema.engine_config import VllmConfig
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import EngineSettings
from roll.strategies.engines.vllm.vllm_adapters import AdapterFiles
from roll.strategies.engines.vllm.vllm_engine import build
from roll.strategies.training.pretrained import named_tensors

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm, which isn't installed")
RANK = 4


class WithAdapters(EngineUnderTest):
    """The reference model is the base with peft's adapters; a version is a state of both."""

    def __post_init__(self):
        super().__post_init__()
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=RANK, lora_alpha=8, target_modules="all-linear", rank_pattern={"o_proj": 2}, task_type="CAUSAL_LM"
        )
        self.base = {name: tensor.detach().clone() for name, tensor in named_tensors(self.model)}
        self.model = get_peft_model(self.model, config)
        self.layers = {
            name: module for name, module in self.model.base_model.model.named_modules() if hasattr(module, "lora_A")
        }
        self.weights = {}

    def remember(self):
        state = self.model.state_dict() if hasattr(self, "layers") else {}
        self.weights[self.engine.version] = {n: t.detach().clone() for n, t in state.items()}

    def adapters(self):
        """What a trainer sends: B is scaled."""
        for name, layer in self.layers.items():
            yield f"base_model.model.{name}.lora_A.weight", layer.lora_A["default"].weight.detach().clone()
            b = layer.lora_B["default"].weight.detach() * layer.scaling["default"]
            yield f"base_model.model.{name}.lora_B.weight", b

    def update(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        self.engine.update_adapters(self.engine.version + 1, self.adapters())
        self.remember()


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    path = build_tiny_model(tmp_path_factory.mktemp("lora") / "model", "qwen2", hidden=128)
    engine = build(
        ModelArgs(model_name_or_path=str(path), lora_rank=RANK),
        VllmConfig(load_format="dummy", engine_args={"kv_cache_memory_bytes": 64 << 20}),
        EngineSettings(max_running_requests=16, max_sequence_length=256, seed=0, update_buffer_bytes=100_000),
    )
    try:
        yield WithAdapters(engine, path, max_context=256)
    finally:
        engine.close()


@needs_vllm
def test_an_engine_with_adapters_from_its_base_weights_to_a_wrong_update(tested, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine, prompt = tested.engine, range(10, 30)

    engine.update_weights(7, tested.base.items())
    with pytest.raises(RuntimeError, match="adapters are missing"):
        engine.submit([tested.request("too early", prompt)])

    for seed in (1, 2):
        tested.update(seed)
        # The same prompt again: keys and values of the last version would be in the prefix cache.
        request = tested.request(f"version {seed}", prompt, seed="same", max_new_tokens=12)
        completion = tested.run([request])[request.id]
        assert set(completion.versions) == {7 + seed}
        tested.check(request, completion)
        with tested.model.disable_adapter():  # the adapters do matter
            table = tested.model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0].log_softmax(-1)
        base = table[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (base - torch.tensor(completion.logprobs)).abs().max() > 0.05

    # Looking for a text makes its tokens come one by one.
    running = tested.request("on its way", prompt, max_new_tokens=150, stop_strings=("never said",))
    engine.submit([running])
    end = time.monotonic() + 60
    while len(engine._streams.responses[running.id].tokens) < 5:
        assert time.monotonic() < end
        time.sleep(0.005)
    tested.update(3)
    completion = tested.collect(1)[running.id]
    assert len(completion.token_ids) == 150
    assert set(completion.versions) == {9, 10}
    tested.check(running, completion)

    assert os.listdir(tmp_path) == []
    held = engine._loop.call(engine._backend._engine.list_loras(), "to list adapters")
    assert len(set(held)) == 1

    half = dict(list(tested.adapters())[:-2])
    with pytest.raises(ValueError, match="2 adapter tensors are missing"):
        engine.update_adapters(11, half.items())


def pair(layer, rank=2, size=6):
    start = f"base_model.model.{layer}"
    return {f"{start}.lora_A.weight": torch.randn(rank, size), f"{start}.lora_B.weight": torch.randn(size, rank)}


def test_a_folder_of_adapters_is_one_that_peft_reads(tmp_path):
    from peft import LoraConfig

    sent = {**pair("layers.0.q_proj", rank=4), **pair("layers.1.q_proj", rank=2)}
    AdapterFiles(max_rank=4).write(tmp_path, sent)
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert written.keys() == sent.keys()
    assert all(torch.equal(written[name], sent[name]) for name in sent)
    config = LoraConfig.from_pretrained(str(tmp_path))
    assert (config.r, config.lora_alpha) == (4, 4)
    assert config.rank_pattern == config.alpha_pattern == {"layers.1.q_proj": 2}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["bias"] == "none"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "brought none"),
        (pair("q", rank=8), "rank 8, the engine was started for 4"),
        (dict(list(pair("q").items())[:1]), "no half of a pair"),
        ({"q.weight": torch.ones(2, 2)}, "no half of a pair"),
    ],
)
def test_adapters_that_cannot_be_loaded_are_refused(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        AdapterFiles(max_rank=4).write(tmp_path, tensors)


def test_every_update_has_the_layers_of_the_first(tmp_path: Path):
    files = AdapterFiles(max_rank=4)
    files.write(tmp_path, pair("q"))
    for other in (pair("k"), pair("q", rank=1), {**pair("q"), **pair("k")}):
        with pytest.raises(ValueError, match="missing, unknown or of another shape"):
            files.write(tmp_path, other)
    files.write(tmp_path, pair("q"))
