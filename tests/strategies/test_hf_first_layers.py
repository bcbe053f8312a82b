"""Models of the first layers that stand for whole ones at the start: whose weights they have, and when none does."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build_tiny_model

from roll.strategies.hf.first_layers import first_layers, small_config

ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def model_of(tmp_path, kind="llama", layers=6, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        build_tiny_model(tmp_path / kind, kind, layers=layers, **options)
    ).eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
@torch.no_grad()
def test_it_computes_what_the_first_layers_of_the_model_compute(tmp_path, kind):
    options = {"n_embd": 32, "n_layer": 6, "n_head": 4} if kind == "gpt2" else {}
    model = model_of(tmp_path, kind, **options)
    small = first_layers(model)
    assert small.config.num_hidden_layers == 2
    ids = torch.tensor([[3, 10, 17, 24]])
    states = model(ids, output_hidden_states=True).hidden_states[2]
    decoder = model.get_decoder()
    norm = decoder.ln_f if kind == "gpt2" else decoder.norm
    torch.testing.assert_close(small.get_decoder()(ids).last_hidden_state, norm(states), atol=0, rtol=0)


def test_its_weights_are_the_models_own_and_tied_as_there(tmp_path):
    model = model_of(tmp_path, vocab_size=400)
    small = first_layers(model)
    name = "layers.1.mlp.up_proj.weight"
    assert small.model.get_parameter(name).data_ptr() == model.model.get_parameter(name).data_ptr()
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert small.get_input_embeddings().num_embeddings == 256
    assert not any(parameter.requires_grad for parameter in small.parameters())
    assert model.config.num_hidden_layers == 6


def test_it_has_a_layer_of_every_kind(tmp_path):
    model = model_of(tmp_path, "gemma3_text", 5, layer_types=ALTERNATING, sliding_window=4)
    assert first_layers(model).config.layer_types == ALTERNATING[:3]
    model.config.no_rope_layers = [1, 1, 1, 0, 1]
    assert small_config(model.config).num_hidden_layers == 4


def test_models_of_which_less_is_known_are_looked_at_whole(tmp_path):
    olmo = model_of(tmp_path, "olmo")  # no engine's and trainer's tests name it
    assert first_layers(olmo) is olmo
    llama = model_of(tmp_path)
    own = type("LlamaForCausalLM", (type(llama),), {"__module__": "transformers_modules.folder.modeling"})
    llama.__class__ = own  # code of a folder's own
    assert first_layers(llama) is llama


@torch.no_grad()
def test_a_start_proves_what_it_has_to_on_few_layers(tmp_path, monkeypatch):
    from roll.configs.schema.worker_config import ModelArgs, TrainConfig
    from roll.strategies.base import EngineSettings, TrainSpec
    from roll.strategies.engines.hf import hf_infer
    from roll.strategies.hf.hf_build import build_module

    folder = str(build_tiny_model(tmp_path / "m", "llama", layers=6))
    passes: list[int] = []
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward

    def counted(self, *args, **options):
        passes.append(len(self.layers))
        return forward(self, *args, **options)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    args = ModelArgs(model_name_or_path=folder)
    worker = TrainConfig(model_args=args, use_sequence_packing=True)
    spec = TrainSpec(
        role="actor_train", kind="policy", worker=worker, seed=0, trains=True, max_sequence_length=64
    )  # fmt: skip
    module, shares = build_module(spec, torch.float32, torch.float32, torch.device("cpu"))
    assert shares
    assert module.lm.config._attn_implementation == "roll_packed"
    hf_infer.build(args, None, EngineSettings(max_running_requests=8, max_sequence_length=64, seed=0))
    assert set(passes) == {2}
