"""Which files a model's weights are read from, and what is said of damaged ones."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from roll.strategies.training.safetensor_files import StoredTensors, safetensors_files

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def test_a_single_file_counts_before_an_index_as_in_transformers(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "old.safetensors"}}))
    save_file({"w": torch.zeros(2)}, tmp_path / "old.safetensors")
    assert safetensors_files(str(tmp_path)) == [tmp_path / "old.safetensors"]
    save_file({"w": torch.ones(2)}, tmp_path / SINGLE)
    assert StoredTensors(safetensors_files(str(tmp_path))).read("w").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"w": {}}}'])
def test_an_index_that_is_none_is_named(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=rf"{INDEX} isn't the index of a model's files \(.*get the model again"):
        safetensors_files(str(tmp_path))


def test_a_torn_file_is_named(tmp_path):
    save_file({"w": torch.ones(100)}, tmp_path / SINGLE)
    for kept in (300, 4, 0):
        (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:kept])
        with pytest.raises(ValueError, match=rf"{SINGLE} is no whole safetensors file .*get the model again"):
            StoredTensors([tmp_path / SINGLE])
