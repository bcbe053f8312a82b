"""Tensors for engines have the names, shapes and numbers of the file that `save_pretrained` writes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tiny_families import tiny_family

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.hf.checkpoint_names import CheckpointNames, WayBack
from roll.strategies.hf.description import describe_model
from roll.strategies.training.pretrained import named_tensors


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "kind",
    [
        "llama",  # the same in memory and in files
        "gpt_neox",  # another name of the head
        "granitemoe",  # other names of stacks
        "deepseek_v3",  # matrices of experts apart
        "mixtral",  # and called otherwise
        "nemotron_h",  # every name
        "hrm_text",  # several matrices of the module make one of the file
        "ernie4_5_moe",
    ],
)
def test_every_tensor_is_as_it_is_saved(tmp_path, kind):
    folder = tiny_family(tmp_path / kind, kind)
    model = loaded(folder)
    described = describe_model(ModelArgs(model_name_or_path=str(folder)))  # without weights, as an engine has it
    way_back = WayBack(described.names)
    made = [part for name, tensor in named_tensors(model) for part in way_back.convert(name, tensor.detach())]
    saved = load_file(folder / "model.safetensors")
    assert sorted(name for name, _ in made) == sorted(saved)
    assert [name for name, tensor in made if not torch.equal(tensor, saved[name])] == []


def test_stacked_matrices_are_taken_apart_without_a_copy_and_in_the_order_in_which_they_lie(tmp_path):
    model = loaded(tiny_family(tmp_path / "m", "qwen3_moe"))
    names, name = CheckpointNames(model), "model.layers.1.mlp.experts.gate_up_proj"
    stack = model.get_parameter(name)
    start = stack.data_ptr()
    parts = list(WayBack(names).convert(name, stack.detach()))
    folder = "model.layers.1.mlp.experts."
    assert [part for part, _ in parts[:3]] == [f"{folder}0.gate_proj.weight", f"{folder}0.up_proj.weight",
                                               f"{folder}1.gate_proj.weight"]  # fmt: skip
    places = [(part.data_ptr() - start) // part.element_size() for _, part in parts]
    assert places == [i * 16 * 32 for i in range(8)]
    assert names.stored(name, stack) == [(part, (16, 32)) for part, _ in parts]


def test_the_model_itself_keeps_its_own_conversions(tmp_path):
    model = loaded(tiny_family(tmp_path / "m", "gpt_neox"))
    before = model._weight_conversions
    CheckpointNames(model)
    assert model._weight_conversions is before


def test_a_tensor_that_is_stored_as_a_part_of_another_one_is_not_read_row_by_row(tmp_path):
    names = CheckpointNames(loaded(tiny_family(tmp_path / "m", "hrm_text")))
    name = "model.H_module.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match=f"its files have other numbers than {name}"):
        names.stored(name, torch.empty(32, 32))
