"""Folders of picture models: their language model is loaded, trained, sent and exported, and the rest stays as it is.

All models are float32 (`dtype: fp32`) and far from uniform, so that differences show.
"""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from family_contract import report_on
from safetensors.torch import load_file
from tiny_models import build_tiny_picture_model
from train_contract import LOSS, build, make_batch, make_spec, weights_of

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.hf.adapter_config import chosen_layers
from roll.strategies.hf.description import describe_model
from roll.strategies.hf.streamed import StreamedWeights
from roll.strategies.merging import Merge, merge_states
from roll.strategies.training.picture_folder import language_names
from roll.strategies.training.pretrained import load_backbone, load_causal_lm, named_tensors

IDS = torch.tensor([[7, 9, 30, 41, 12, 8, 77, 60]])


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5 tied", "qwen3_5_moe", "gemma3 tied"])
def folder(request, tmp_path_factory):
    family, _, tied = request.param.partition(" ")
    place = tmp_path_factory.mktemp("pictures") / request.param
    return build_tiny_picture_model(place, family, tie_word_embeddings=bool(tied))


def args_of(folder):
    return ModelArgs(model_name_or_path=str(folder))


def picture_model(folder):
    from transformers import AutoModelForImageTextToText

    model, loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(loaded.values()), loaded
    return model.eval()


def test_the_language_model_alone_computes_what_the_picture_model_computes_of_text(folder):
    model = load_causal_lm(args_of(folder), torch.float32)
    own = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
    assert all(name.startswith(own) for name, _ in named_tensors(model))
    with torch.no_grad():
        expected = picture_model(folder)(input_ids=IDS).logits
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=1e-5)
        hidden = load_backbone(args_of(folder), torch.float32)(input_ids=IDS).last_hidden_state
        torch.testing.assert_close(model.lm_head(hidden), expected, rtol=0, atol=1e-5)
    assert chosen_layers(model, ()) and not [name for name in chosen_layers(model, ()) if "visual" in name]


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_weights_that_come_in_by_slices_are_those_of_a_model_that_is_loaded_whole(folder, kind):
    spec = make_spec(folder, kind=kind)
    weights = StreamedWeights.open(spec, torch.float32)
    weights.fill(weights.module)
    whole = (load_causal_lm if kind == "policy" else load_backbone)(args_of(folder), torch.float32)
    streamed = dict(named_tensors(weights.module))
    assert streamed.keys() == dict(named_tensors(whole)).keys()
    assert all(torch.equal(streamed[name], tensor) for name, tensor in named_tensors(whole))


def test_all_ways_of_computing_rows_are_right(tmp_path):
    report = report_on(build_tiny_picture_model(tmp_path))
    assert set(report.ways.values()) == {"right"}, report.ways


@pytest.mark.parametrize("strategy", ["fsdp2_train", "deepspeed_train"])
def test_an_export_is_the_picture_model_again_with_what_was_trained(folder, tmp_path, strategy):
    trainer = build(make_spec(folder, strategy=strategy))
    trainer.train_step(make_batch(), LOSS)
    trained = weights_of(trainer)
    trainer.export(tmp_path)
    source, written = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    rest = {name: tensor for name, tensor in source.items() if not language_names(source).has(name)}
    assert rest
    assert all(torch.equal(written[name], tensor) for name, tensor in rest.items())
    assert written.keys() == source.keys()
    assert any(not torch.equal(written[name], source[name]) for name in source.keys() - rest.keys())
    config, before = (json.loads((where / "config.json").read_text()) for where in (tmp_path, folder))
    assert (config["model_type"], config["architectures"]) == (before["model_type"], before["architectures"])
    assert config["vision_config"] == before["vision_config"]
    assert (tmp_path / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()
    again = load_causal_lm(args_of(tmp_path), torch.float32)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in named_tensors(again))
    with torch.no_grad():
        theirs = picture_model(tmp_path)(input_ids=IDS).logits
        torch.testing.assert_close(again(input_ids=IDS).logits, theirs, rtol=0, atol=1e-5)


def test_what_rolls_export_makes_of_a_checkpoint_is_the_same_folder(folder, tmp_path):
    trainer = build(make_spec(folder))
    trainer.train_step(make_batch(), LOSS)
    trainer.export(tmp_path / "export")
    trainer.save(tmp_path / "states")
    merge_states(tmp_path / "states", tmp_path / "merged", Merge())
    ours, merged = (tmp_path / name for name in ("export", "merged"))
    assert {path.name for path in ours.iterdir()} == {path.name for path in merged.iterdir()}
    assert (ours / "config.json").read_text() == (merged / "config.json").read_text()
    first, second = (load_file(where / "model.safetensors") for where in (ours, merged))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_adapters_of_an_export_are_those_of_the_language_model_by_itself(tmp_path):
    from peft import AutoPeftModelForCausalLM

    folder = build_tiny_picture_model(tmp_path / "model")
    trainer = build(make_spec(folder, model={"lora_rank": 2}))
    for _ in range(3):
        trainer.train_step(make_batch(), LOSS)
    trainer.export(tmp_path / "out")
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "adapter").eval()
    with torch.no_grad():
        expected = picture_model(tmp_path / "out")(input_ids=IDS).logits
        torch.testing.assert_close(adapted(input_ids=IDS).logits, expected, rtol=0, atol=1e-5)
        assert (expected - picture_model(folder)(input_ids=IDS).logits).abs().max() > 1e-3


def test_a_folder_that_is_gone_when_its_model_is_exported_can_be_named_again(tmp_path):
    folder = build_tiny_picture_model(tmp_path / "model", tie_word_embeddings=True)
    trainer = build(make_spec(folder))
    trainer.save(tmp_path / "states")
    folder.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="is copied from there. Put it back, or have roll export read another folder"):
        merge_states(tmp_path / "states", tmp_path / "merged", Merge())
    merge_states(tmp_path / "states", tmp_path / "merged", Merge(base=str(tmp_path / "moved")))
    assert picture_model(tmp_path / "merged").config.model_type == "qwen3_5"


def test_engines_get_the_names_that_the_folder_has(folder):
    description = describe_model(args_of(folder))
    model = load_causal_lm(args_of(folder), torch.float32)

    async def names():
        async def stream():
            for name, tensor in named_tensors(model):
                yield name, tensor.detach()

        return {name: tuple(tensor.shape) async for name, tensor in description.checkpoint(stream())}

    source = load_file(folder / "model.safetensors")
    expected = {name: tuple(tensor.shape) for name, tensor in source.items() if language_names(source).has(name)}
    assert asyncio.run(names()) == expected


def test_a_folder_without_safetensors_is_refused_when_it_is_loaded(folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="has no safetensors files, of which an export copies"):
        load_causal_lm(args_of(tmp_path), torch.float32)
