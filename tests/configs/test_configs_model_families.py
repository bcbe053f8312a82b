"""`roll check` refuses models that an engine or a trainer would refuse, from their config.json alone."""

from __future__ import annotations

import json

import pytest
from model_job import model_job

from roll.configs.checks import model_families
from roll.configs.checks.machine_checks import Machine
from roll.configs.checks.model_families import family_checks, family_problems
from roll.configs.checks.vllm_models import cpu_head_sizes, head_obstacle
from roll.configs.errors import problem
from roll.configs.rules.rotations_rules import rotation_obstacle

SHAPE = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "is_decoder": True, "is_encoder_decoder": False, "vocab_size": 120,
}  # fmt: skip
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
CHUNKED = {"layer_types": ["chunked_attention"] * 2}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def found_for(tmp_path, tree, engine="hf_infer", changes=(), machine=None):
    (tmp_path / "config.json").write_text(json.dumps(tree))
    config = model_job(tmp_path, changes, engine=engine)
    found = [*family_checks(config, machine or Machine()), *(problem(*each) for each in family_problems(config))]
    return {violation.path: str(violation) for violation in found}


def tree_of(kind, **options):
    from transformers import AutoConfig

    return json.loads(AutoConfig.for_model(kind, **options).to_json_string(use_diff=False))


SAMPLER, TRAINER = (f"{role}.strategy_args.strategy_name" for role in ("actor_infer", "actor_train"))
RECOMPUTES = "actor_train.model_args.disable_gradient_checkpointing"


@pytest.mark.parametrize(
    ("kind", "options", "refused"),
    [
        ("codegen", {"n_embd": 32, "n_layer": 2, "n_head": 4}, {}),
        ("nemotron", {}, {}),
        ("olmoe", {"num_experts": 4}, {}),
        ("starcoder2", {}, {}),
        ("qwen3_next", {**EXPERTS, **LINEAR}, {}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, {}),
        ("granitemoehybrid", MAMBA, {}),
        ("granitemoehybrid", {**MAMBA, "time_step_limit": [0.001, 0.1]}, {SAMPLER: "between 0.001 and 0.1, and"}),
        ("llama4_text", CHUNKED, {SAMPLER: "type chunked_attention", TRAINER: "its decoder"}),
        ("mbart", BART, {SAMPLER: "counts positions itself"}),
        ("bloom", {"n_layer": 2, "n_head": 4, "max_position_embeddings": None}, {SAMPLER: "states no context length"}),
        ("gemma4_text", {"num_kv_shared_layers": 1, "vocab_size_per_layer_input": 120}, {SAMPLER: "of their own"}),
        ("modernbert-decoder", {}, {TRAINER: "can't be told apart"}),
        ("bert", {"is_decoder": True}, {TRAINER: "more than an output head"}),
        ("jetmoe", {"num_local_experts": 2}, {RECOMPUTES: "disable_gradient_checkpointing=true"}),
    ],
)
def test_families_are_refused_for_what_their_modules_lack_and_no_others(tmp_path, kind, options, refused):
    found = found_for(tmp_path, tree_of(kind, **{**SHAPE, **options}))
    assert found.keys() == refused.keys(), found
    for path, words in refused.items():
        assert words in found[path]


def test_the_way_out_of_layers_that_hf_infer_cannot_run_is_named(tmp_path):
    tree = tree_of("granitemoehybrid", **SHAPE, **MAMBA, time_step_limit=[0.001, 0.1])
    assert "sample with vllm or sglang" in found_for(tmp_path, tree)[SAMPLER]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_tested_families_are_not_built(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("roll.configs.checks.model_families._built", lambda file: pytest.fail("it was built"))
    assert found_for(tmp_path, {**SHAPE, "model_type": kind}) == {}


@pytest.mark.skipif(not cpu_head_sizes(), reason="vLLM isn't installed here, or shows no sizes")
def test_heads_that_vllms_attention_on_a_cpu_cannot_take_are_refused_where_there_is_no_accelerator(tmp_path):
    assert {32, 64, 128} <= set(cpu_head_sizes())
    tree = {**SHAPE, "model_type": "qwen2"}
    found = found_for(tmp_path, tree, "vllm")
    assert "and those of this model have 8" in found[SAMPLER]
    assert found_for(tmp_path, tree, "vllm", machine=Machine(accelerators=("NVIDIA H200",))) == {}
    several = ("num_nodes=2", "executor=ray")  # this machine may be the only one without
    assert found_for(tmp_path, tree, "vllm", several) == {}
    assert head_obstacle({**tree, "head_dim": 48})
    assert not head_obstacle({**tree, "head_dim": 64})


@pytest.mark.parametrize(
    ("engine", "tree", "longest", "max_model_len", "words"),
    [
        ("sglang", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 12}, 13, None, "pass 12 tokens"),
        ("sglang", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 12}, 12, None, ""),
        ("vllm", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 12}}, 12, None, ""),
        ("vllm", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 12}}, 13, None, ""),
        ("vllm", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 12}}, 12, 64, "above 12"),
        ("hf_infer", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 12}}, 64, None, ""),
        ("sglang", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8, None, "of type dynamic"),
        ("sglang", {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, 8, None, ""),
        ("vllm", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8, None, ""),
        ("sglang", {"rope_parameters": {"full_attention": {**LONGROPE, "original_max_position_embeddings": 4}}}, 8,
         None, "pass 4 tokens"),
    ],
)  # fmt: skip
def test_engines_that_choose_rotations_otherwise_than_the_trainer_are_refused(
    engine, tree, longest, max_model_len, words
):
    why = rotation_obstacle(engine, tree, longest, max_model_len)
    assert bool(why) == bool(words)
    assert words in why


def test_check_refuses_a_longrope_model_on_sglang_beyond_its_original_length(tmp_path):
    tree = {**SHAPE, "model_type": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 12}
    assert "type longrope" in found_for(tmp_path, tree, "sglang")[SAMPLER]
    assert found_for(tmp_path, tree, "sglang", ["response_length=4"]) == {}


def test_sdpa_is_refused_for_a_model_that_caps_the_logits_of_its_attention(tmp_path):
    key = "actor_train.model_args.attn_implementation"
    tree = {**SHAPE, "model_type": "gemma2", "attn_logit_softcapping": 50.0}
    assert "which sdpa leaves out" in found_for(tmp_path, tree, changes=[f"{key}=sdpa"])[key]
    assert found_for(tmp_path, tree) == {}
    assert found_for(tmp_path, {**tree, "attn_logit_softcapping": None}, changes=[f"{key}=sdpa"]) == {}


@pytest.mark.parametrize("key", ["ulysses_size", "ring_attention_size"])
def test_layers_with_a_state_are_refused_to_ranks_that_share_rows(tmp_path, key):
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    tree = tree_of("granitemoehybrid", **{**SHAPE, **MAMBA, **kinds})
    path, ranks = f"actor_train.model_args.{key}", ("executor=ray", "num_gpus_per_node=2", "actor_train.world_size=2")
    changes = (f"{path}=2", *ranks)
    found = found_for(tmp_path, tree, changes=changes)
    assert "linear_attention carry a state through a row and need it whole" in found[path]
    assert path not in found_for(tmp_path, tree_of("granite", **SHAPE), changes=changes)
    assert path in found_for(tmp_path, tree_of("qwen3_next", **SHAPE, **EXPERTS, **LINEAR), changes=changes)


@pytest.mark.parametrize("limit", [3.0, "ab", [1], [0.0, {"a": 1}]])
def test_bounds_of_time_steps_that_are_no_pair_of_numbers_end_nothing(limit):
    assert model_families._clamped("a model", limit) == ""
