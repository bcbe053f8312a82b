"""The padding token's embedding gets no gradient where the token is an input, as in transformers."""

from __future__ import annotations

import json

import pytest
from layout_contract import check_layout
from tiny_models import build_tiny_model
from train_contract import make_batch

TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS = {
    "one rank": (1, {}),
    "tensor 2": (2, TP2),
    "tensor 2, sequence": (2, {**TP2, "sequence_parallel": True}),
    "pipeline 2": (2, {"pipeline_model_parallel_size": 2}),
    "context 2": (2, {"context_parallel_size": 2}),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_padding_token_in_the_rows_is_trained_as_in_transformers(ranks, model_of, layout, packed):
    world, options = LAYOUTS[layout]
    padding = int(make_batch().token_ids[1])
    model = model_of("llama", pad_token_id=padding)
    check_layout(ranks, model, "megatron_train", options, world, worker={"use_sequence_packing": packed})


def test_padding_counted_from_the_end_and_with_a_separate_head(ranks, tmp_path):
    # As old configurations have it; torch counts back from the vocabulary's end.
    model = build_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=False)
    config = json.loads((model / "config.json").read_text())
    config["pad_token_id"] = int(make_batch().token_ids[1]) - config["vocab_size"]
    (model / "config.json").write_text(json.dumps(config))
    check_layout(ranks, model, "megatron_train", {}, 1)
