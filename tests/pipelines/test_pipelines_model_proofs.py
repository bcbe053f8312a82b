"""`roll check` refuses, by a small model of its configuration, what the start of a run would refuse of a whole one."""

from __future__ import annotations

import json

import pytest
from model_job import model_job

from roll.pipelines.run.model_proofs import proof_problems

LARGE = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
HYBRID = {
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
}  # fmt: skip
PACKED, SHARED = "actor_train.use_sequence_packing", "actor_train.use_prefix_sharing"
SAMPLER, TRAINER = (f"{role}.strategy_args.strategy_name" for role in ("actor_infer", "actor_train"))


def problems(tmp_path, kind, changes=(), refused=(), **options):
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **{**LARGE, **options})
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    return {key: sentence for key, sentence, _ in proof_problems(model_job(tmp_path, changes), refused)}


@pytest.mark.parametrize("kind", ["olmo2", "glm4", "stablelm", "seed_oss"])
def test_a_large_model_that_can_be_run_is_accepted(tmp_path, kind):
    assert problems(tmp_path, kind) == {}


def test_a_large_hybrid_is_accepted_packed(tmp_path):
    assert problems(tmp_path, "qwen3_next", [f"{PACKED}=true"], **HYBRID) == {}


@pytest.mark.parametrize(
    ("kind", "changes", "options", "key", "words"),
    [
        ("stablelm", [f"{PACKED}=true"], {}, PACKED, "isn't told where rows end"),
        ("stablelm", [f"{SHARED}=true"], {}, SHARED, "computes something else"),
        ("minimax", [f"{PACKED}=true"], {}, PACKED, "a row depends on those beside it"),
        ("recurrent_gemma", [], {"head_dim": None}, TRAINER, "that isn't supported"),
    ],
)
def test_a_way_that_is_closed_is_refused_under_its_key(tmp_path, kind, changes, options, key, words):
    assert words in problems(tmp_path, kind, changes, ["actor_infer"], **options)[key]


def test_a_rotation_that_the_start_refuses_is_refused_with_the_length_that_can_be_trained(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "short_mscale": 1.1,
            "long_mscale": 1.3, "original_max_position_embeddings": 12}  # fmt: skip
    options = {"num_local_experts": 16, "rope_parameters": rope, "original_max_position_embeddings": 12}
    found = problems(tmp_path, "phimoe", **options)
    assert found.keys() == {SAMPLER, TRAINER}
    assert all("write sequence_length: 12" in sentence for sentence in found.values())
    assert problems(tmp_path, "phimoe", ["response_length=4"], **options) == {}


def test_tested_types_and_refused_roles_are_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("roll.strategies.small_proofs._small_model", lambda *_: pytest.fail("it was built"))
    assert problems(tmp_path, "llama") == {}
    assert problems(tmp_path, "olmo2", refused=["actor_train", "actor_infer"]) == {}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "olmo2"
