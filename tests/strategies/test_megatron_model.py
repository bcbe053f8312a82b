"""Megatron models score tokens as transformers does, in every layout, and refuse what they can't express."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from layout_contract import CP2, EP2, PP2, SP, TP2, VP2, layout_spec
from megatron_cases import MODELS, build_case, expected_scores, joined, play_models
from train_contract import build, make_info

pytest.importorskip("megatron.core")

from roll.configs.rules import megatron_fields
from roll.configs.rules.megatron_fields import refused_fields
from roll.configs.schema.megatron_config import MegatronConfig
from roll.strategies.megatron.mapping import HfTensor, MappedParameter, Segment
from roll.strategies.megatron.megatron_architecture import architecture
from roll.strategies.megatron.megatron_build import transformer_config
from roll.strategies.megatron.megatron_weights import Held, _fill

SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe")
DENSE = tuple(name for name in MODELS if name not in SPARSE)
LAYOUTS = {
    "one rank": (1, {}, MODELS),
    "tp 2": (2, TP2, DENSE),
    "tp 2 with split activations": (2, {**TP2, **SP}, MODELS),
    "tp 4, more than key-value heads": (4, {"tensor_model_parallel_size": 4}, ("llama", "qwen2", "qwen3")),
    "pp 2": (2, PP2, MODELS),
    "pp 2 interleaved": (2, VP2, MODELS),
    "tp 2, pp 2": (4, {**TP2, **PP2, **SP}, ("llama", "qwen2", "qwen2_moe")),
    "cp 2": (2, CP2, MODELS),
    "cp 2, tp 2": (4, {**CP2, **TP2, **SP}, ("mistral", "mixtral")),
    "ep 2": (2, EP2, SPARSE),
    "ep 2 by gathering": (2, {**EP2, "moe_token_dispatcher_type": "allgather"}, SPARSE),
    "ep 2, tp 2, whole experts": (2, {**TP2, **EP2, "expert_tensor_parallel_size": 1, **SP}, SPARSE),
    "ep 2, pp 2": (4, {**EP2, **PP2}, ("qwen2_moe",)),
}


@pytest.fixture(scope="session")
def case_of(tmp_path_factory):
    """Folder of a tiny model of `MODELS`, and what transformers says about it."""
    made = {}

    def get(name):
        if name not in made:
            path = build_case(tmp_path_factory.mktemp("cases") / "model", name)
            made[name] = (path, expected_scores(path))
        return made[name]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_weights_are_those_of_transformers(ranks, case_of, layout):
    from transformers import AutoModelForCausalLM

    world, options, names = LAYOUTS[layout]
    cases = [case_of(name) for name in names]
    by_rank = ranks.run(play_models, world, [path for path, _ in cases], options)
    for name, (path, expected), results in zip(names, cases, zip(*by_rank, strict=True), strict=True):
        for packed in (False, True):
            for mine, theirs in zip(joined(results, packed), expected, strict=True):
                assert (mine - theirs).abs().max() <= 1e-5, f"{name}, packed={packed}"
        theirs = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
        for weights, _ in results:
            assert weights.keys() == theirs.keys(), name
            assert all(torch.equal(weights[key], theirs[key]) for key in theirs), name


# --- what a configuration may say ------------------------------------------------------------------------------------

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def hf_config(family, **options):
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**SHAPE, **options})


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("gpt2", {}, "'gpt2'; it knows llama, qwen2, qwen3, mistral, mixtral, qwen2_moe, qwen3_moe"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act = 'gelu', expected silu"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters",
        ),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads = 3, expected a divisor"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "norm_topk_prob"),
    ],
)
def test_what_megatron_cannot_build_is_refused_by_field(family, options, named):
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        architecture(hf_config(family, **options))


def test_windows_and_sparse_layers_follow_the_configuration():
    assert architecture(hf_config("mistral", sliding_window=8)).windows == (8,) * 4
    assert architecture(hf_config("mistral", sliding_window=None)).windows == (None,) * 4
    alternating = hf_config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert architecture(alternating).windows == (None, None, 8, 8)
    assert architecture(hf_config("qwen2_moe", decoder_sparse_step=2)).sparse == (False, True, False, True)
    assert architecture(hf_config("qwen3_moe", mlp_only_layers=[1])).sparse == (True, False, True, True)


def config_for(family="llama", *, recompute=False, model=None, **options):
    arch = architecture(hf_config(family, **(model or {})))
    return transformer_config(arch, MegatronConfig(**options), dtype=torch.float32, trains=True, recompute=recompute)


@pytest.mark.parametrize(
    ("family", "model", "options", "message"),
    [
        ("llama", {"intermediate_size": 66}, {"tensor_model_parallel_size": 4}, "= 4 doesn't divide the 66 columns"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 66},
            {"tensor_model_parallel_size": 4},
            "= 4 doesn't divide the 66 columns of the shared expert",
        ),
        ("qwen3_moe", {}, {"recompute_modules": ("mlp",)}, "every layer of the model has experts"),
    ],
)
def test_sizes_and_recomputation_must_fit_the_layers(family, model, options, message):
    with pytest.raises(ValueError, match=message):
        config_for(family, model=model, **options)


def test_a_model_that_was_not_there_to_be_checked_is_checked_when_it_is_loaded(model_of):
    # The rules themselves: tests/configs/test_configs_layouts.py.
    spec = layout_spec(model_of("llama", layers=4), "megatron_train", {"pipeline_model_parallel_size": 3})
    with pytest.raises(ValueError, match="stages that share the 4 layers of .* evenly"):
        build(spec, make_info(0, 3))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("moe_z_loss_coef", 0.1, "did you mean 'moe_z_loss_coeff'.*isn't among the fields that are handed on"),
        ("attention_output_gate", True, "another model than the one in the folder"),
        ("moe_router_score_function", "sigmoid", "another model"),
        ("moe_router_topk_scaling_factor", 2.5, "another model"),
        ("activation_func_clamp_value", 7.0, "another model"),
        ("glu_linear_offset", 1.0, "another model"),
        ("softmax_scale", 0.5, "another model"),
        ("moe_router_enable_expert_bias", True, "another model"),
        ("moe_input_jitter_eps", 0.1, "log-probs depend on chance"),
        ("moe_router_force_load_balancing", True, "log-probs depend on chance"),
        ("moe_expert_capacity_factor", 1.0, "which tokens share a micro-batch"),
        ("barrier_with_L1_time", False, "isn't among the fields that are handed on.*: account_for_embedding"),
        ("linear_num_key_heads", 4, "isn't among the fields"),
        ("moe_z_loss_coeff", "much", "expected a number >= 0"),
        ("moe_z_loss_coeff", True, "expected a number >= 0"),
        ("num_layers_in_first_pipeline_stage", 0, "expected a whole number >= 1"),
        ("account_for_loss_in_pipeline_split", 1, "expected true or false"),
        ("pipeline_model_parallel_layout", 4, "expected text or a list"),
        ("num_layers", 3, "already set"),
        ("moe_router_topk", 1, "already set"),
        ("variable_seq_lengths", False, "already set"),
        ("window_size", [4, 0], "no effect"),
        ("transformer_impl", "transformer_engine", "already set"),
        ("init_method_std", 0.1, "no effect, because every weight is loaded"),
        ("persist_layer_norm", True, "no effect, because norms follow"),
        ("cross_entropy_loss_fusion", True, "no effect, because log-probs"),
        ("inference_sampling_seed", 3, "no effect, because responses"),
        ("mtp_num_layers", 1, "no effect, because layers of multi-token prediction"),
        ("moe_enable_routing_replay", True, "no effect: with router_replay: true"),
        ("tp_comm_overlap", True, "isn't among the fields"),
        ("bias_dropout_fusion", True, "needs an accelerator"),
        ("fp8", "hybrid", "isn't among the fields"),
        ("cpu_offloading", True, "isn't among the fields"),
    ],
)
def test_additional_fields_that_would_not_act_are_refused(name, value, message):
    if message == "needs an accelerator" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=f"additional_configs.{name}: .*{message}"):
        config_for("mixtral", additional_configs={name: value})


def test_every_field_that_is_named_is_one_of_megatrons_and_most_are_refused():
    from megatron.core.transformer import TransformerConfig

    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    named = [name for names in megatron_fields._REFUSED.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) | set(megatron_fields._KINDS) <= fields
    assert set(refused_fields(dict.fromkeys(fields))) == fields  # null is no value of any of them


def test_what_megatron_refuses_is_said_of_the_fields_that_were_added():
    uneven = {"num_layers_in_first_pipeline_stage": 1, "pipeline_model_parallel_layout": "Ett|ttL"}
    with pytest.raises(ValueError, match="additional_configs: Megatron refuses num_layers_in_first_pipeline_stage, pi"):
        config_for(pipeline_model_parallel_size=2, additional_configs=uneven)


def test_a_parameter_that_is_larger_than_the_folders_tensors_is_refused():
    # Rows 0 to 3 come from the folder; a gate in the same parameter would have eight rows.
    entry = MappedParameter(
        parameters=("linear.weight",), tensors=(HfTensor("q.weight", (4, 2)),), segments=(Segment(0, 0, 4),), dim=0
    )
    held = Held(entry, None, torch.nn.Parameter(torch.zeros(8, 2)), torch.zeros(8, 2))
    with pytest.raises(ValueError, match=r"linear.weight has shape \(8, 2\), and the folder's model fills \(4, 2\)"):
        _fill(held, mock.Mock(), 0, 1)


def test_additional_fields_of_experts_are_refused_for_a_dense_model():
    with pytest.raises(ValueError, match="additional_configs.moe_z_loss_coeff: .*no experts"):
        config_for("llama", additional_configs={"moe_z_loss_coeff": 0.1})


def test_the_first_layers_of_a_stage_may_be_recomputed():
    assert config_for(recompute_method="block", recompute_granularity="full", recompute_num_layers=3)


def test_additional_fields_reach_megatron():
    assert config_for("mixtral", additional_configs={"moe_z_loss_coeff": 0.1}).moe_z_loss_coeff == 0.1
    uneven = {"num_layers_in_first_pipeline_stage": 1}
    assert config_for(pipeline_model_parallel_size=2, additional_configs=uneven).num_layers == 4


@pytest.mark.parametrize(
    ("options", "wanted", "expected"),
    [
        ({}, False, (None, None, None, ["core_attn"])),
        ({}, True, ("full", "uniform", 1, ["core_attn"])),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
            True,
            ("full", "block", 2, ["core_attn"]),
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
            True,
            ("selective", None, None, ["layernorm"]),
        ),
        ({"moe_layer_recompute": True}, True, ("selective", None, None, ["moe"])),
    ],
)
def test_recomputation(options, wanted, expected):
    config = config_for("mixtral", recompute=wanted, **options)
    assert expected == (
        config.recompute_granularity,
        config.recompute_method,
        config.recompute_num_layers,
        config.recompute_modules,
    )


@pytest.mark.parametrize(
    ("family", "model", "pre_softmax"),
    [
        ("mixtral", {}, False),
        ("qwen2_moe", {"norm_topk_prob": False}, True),
        ("qwen3_moe", {"norm_topk_prob": True}, False),
    ],
)
def test_the_router_normalises_as_the_family_does(family, model, pre_softmax):
    config = config_for(family, model=model, moe_aux_loss_coeff=0.5, moe_router_dtype="fp32")
    assert config.moe_router_pre_softmax is pre_softmax
    assert (config.moe_aux_loss_coeff, config.moe_router_load_balancing_type) == (0.5, "aux_loss")
    assert config.moe_router_dtype == "fp32"
    assert config.moe_layer_freq == [1, 1, 1, 1]
