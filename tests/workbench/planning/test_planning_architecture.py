"""The weights that a config.json is read as are those that transformers builds."""

from __future__ import annotations

import json
import re

import pytest

from roll.configs.catalog.family_table import FAMILIES
from roll.workbench.planning.architecture import UnknownModel, architecture_of, read_architecture
from roll.workbench.planning.parameters import role_parameters

SHAPE = {
    "vocab_size": 106, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48}
VARIANTS = {
    "as it is": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "with biases": {"attention_bias": True, "mlp_bias": True},
    "experts in every other layer": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "state spaces": {
        "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "state spaces without experts": {"mamba_n_heads": 8, "num_local_experts": 0, "shared_intermediate_size": 40},
}  # fmt: skip


def names_of_transformers(family, changes, tmp_path):
    """(names without the prefixes of layers and shapes, config.json)"""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    known = FAMILIES[family].experts
    experts = {**EXPERTS, known.count[0]: 4} if known else {}
    if FAMILIES[family].decoder.state_space:
        experts |= {"mamba_n_heads": 8, "mamba_d_state": 16, "shared_intermediate_size": 48}
    config = transformers.AutoConfig.for_model(family, **{**SHAPE, **experts, **changes})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    named = [
        (re.sub(r"^(layers\.\d+\.)", "", n.removeprefix("model.")), tuple(p.shape)) for n, p in model.named_parameters()
    ]
    return named, json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.decoder])
def test_every_weight_has_its_name_shape_and_place(tmp_path, family):
    decoder, experts = FAMILIES[family].decoder, FAMILIES[family].experts
    for changes in VARIANTS.values():
        if "attention_bias" in changes and not isinstance(decoder.output_bias, str):
            continue  # the family has no such field
        if "decoder_sparse_step" in changes and (not experts or experts.every_layer):
            continue
        if "mamba_n_heads" in changes and not decoder.state_space:
            continue
        expected, tree = names_of_transformers(family, changes, tmp_path)
        planned = architecture_of(tree, "config.json", "pretrain")
        assert [(weight.name, weight.shape) for weight in planned.parameters()] == expected, changes


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.decoder])
def test_adapters_are_planned_beside_the_layers_that_get_some(tmp_path, family):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from roll.configs.schema.worker_config import ModelArgs
    from roll.strategies.hf.adapter_config import chosen_layers

    _, tree = names_of_transformers(family, {}, tmp_path)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        expected = chosen_layers(transformers.AutoModelForCausalLM.from_config(config), ())
    args = ModelArgs(lora_rank=2)
    made = role_parameters(architecture_of(tree, "config.json", "pretrain"), args, "policy", trains=True, role="r")
    assert {p.name.removesuffix(".lora_A.weight") for p in made if ".lora_A." in p.name} == set(expected)


def test_a_picture_model_is_planned_without_its_tower(tmp_path):
    text = {**SHAPE, "model_type": "qwen3_5_text", "vocab_size": 200}
    tree = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    arch = read_architecture(str(tmp_path), {"vocab_size": 150}, "pretrain")
    assert (arch.model_type, arch.tower, arch.vocab, arch.tied) == ("qwen3_5_text", True, 150, True)
    assert arch.count() == architecture_of({**text, "vocab_size": 150, "tie_word_embeddings": True}, "", "").count()


def test_numbers_of_parameters_by_hand():
    # Llama 3 8B, as its card says: 8.03 billion.
    tree = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    arch = architecture_of(tree, "config.json", "pretrain")
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert arch.count() == 2 * 128256 * 4096 + 32 * layer + 4096 == 8_030_261_248
    assert arch.count("value") == arch.count() - 128256 * 4096 + 4096


def test_adapters_freeze_the_rest_and_train_in_float32():
    from roll.configs.schema.worker_config import ModelArgs

    arch = architecture_of({**SHAPE, "model_type": "llama"}, "config.json", "pretrain")
    args = ModelArgs(dtype="bf16", lora_rank=3, lora_target=("q_proj", "down_proj"))
    made = role_parameters(arch, args, "policy", trains=True, role="actor_train")
    trained = [p for p in made if p.trains]
    # (32 + 32) x 3 of q_proj and (64 + 32) x 3 of down_proj, in 4 layers.
    assert sum(p.size for p in trained) == 4 * (64 * 3 + 96 * 3)
    assert {p.width for p in trained} == {4}
    assert {p.width for p in made if not p.trains} == {2}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({**SHAPE, "model_type": "bert"}, "model_type 'bert'"),
        ({"model_type": "llama"}, "no num_attention_heads"),
        ({**SHAPE, "model_type": "llama", "vocab_size": "many"}, "no vocab_size"),
        ({**SHAPE, "model_type": "llama", "num_hidden_layers": 0}, "no decoder"),
    ],
)
def test_what_cannot_be_planned_is_said(tree, said):
    with pytest.raises(UnknownModel, match=said):
        architecture_of(tree, "config.json", "pretrain")


def test_a_model_without_its_configuration_is_named_with_what_to_do(tmp_path):
    with pytest.raises(UnknownModel, match=r"pretrain: .*no config.json.*hf download nobody/nothing config.json"):
        read_architecture("nobody/nothing", {}, "pretrain")
    with pytest.raises(UnknownModel, match=r"pretrain: .*no config.json.*pretrain=ORG/NAME"):
        read_architecture(str(tmp_path), {}, "pretrain")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnknownModel, match="isn't JSON"):
        read_architecture(str(tmp_path), {}, "pretrain")
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "text_config": {}, "vision_config": {}}))
    with pytest.raises(UnknownModel, match="reads images"):
        read_architecture(str(tmp_path), {}, "pretrain")
