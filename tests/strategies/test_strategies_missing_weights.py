"""A model folder without some of its weights is refused: transformers would draw them at random, with a warning."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_model

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.training.pretrained import load_backbone, load_causal_lm

NORM = "model.layers.0.input_layernorm.weight"


def without(folder, *names, **config):
    """The folder without these tensors, and with changes of its config.json."""
    file, about = folder / "model.safetensors", folder / "config.json"
    weights = load_file(file)
    save_file({name: tensor for name, tensor in weights.items() if name not in names}, file, {"format": "pt"})
    about.write_text(json.dumps({**json.loads(about.read_text()), **config}))
    return ModelArgs(model_name_or_path=str(folder))


@pytest.mark.parametrize("load", [load_causal_lm, load_backbone])
def test_missing_weights_are_named(tmp_path, load):
    args = without(build_tiny_model(tmp_path / "model"), NORM)
    with pytest.raises(ValueError, match="lacks weights of its own: .*layers.0.input_layernorm.weight"):
        load(args, torch.float32)


def test_a_head_that_is_not_the_embeddings_own_must_be_there(tmp_path):
    args = without(build_tiny_model(tmp_path / "model"), "lm_head.weight", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks weights of its own: lm_head.weight\. They would be random"):
        load_causal_lm(args, torch.float32)


def test_a_head_tied_to_the_embeddings_is_not_missed(tmp_path):
    args = without(build_tiny_model(tmp_path / "model"), "lm_head.weight", tie_word_embeddings=True)
    model = load_causal_lm(args, torch.float32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_backbone_needs_no_head(tmp_path):
    args = without(build_tiny_model(tmp_path / "model"), "lm_head.weight", tie_word_embeddings=False)
    load_backbone(args, torch.float32)
