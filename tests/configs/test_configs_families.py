"""The table of model families: what a record says is what transformers has, and what each backend makes of it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll.configs.catalog.family_table import FAMILIES, Decoder, Family, family_of
from roll.configs.checks.engine_arguments import package_folder
from roll.configs.checks.model_file_checks import media_checks
from roll.configs.rules.layout_rules import shape_rules
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.model_shape import shape_of
from roll.utils.importing import load_object
from roll.workbench.planning.architecture import architecture_of

PLANNED = [name for name, family in FAMILIES.items() if family.decoder]
MEGATRON = [name for name, family in FAMILIES.items() if family.megatron]
SIZES = {
    "vocab_size": 106, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
OF_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48}
TESTS = Path(__file__).parents[1]


def sizes_of(name, **more):
    """Entries of a small model's config.json that have no default."""
    experts = FAMILIES[name].experts
    decoder = FAMILIES[name].decoder
    states = {"mamba_n_heads": 8} if decoder is not None and decoder.state_space else {}
    return {**SIZES, **({experts.count[0]: 6, **OF_EXPERTS} if experts else {}), **states, **more}


def config_of(name, **more):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(name, **sizes_of(name, **more))


def test_the_table_loads_nothing():
    code = (
        "import sys; from roll.configs.catalog import family_table; sys.exit('torch' in sys.modules or "
        "'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("model_type", ["bert", "", None, 3, ["llama"]])
def test_of_a_family_without_a_record_nothing_is_known(model_type):
    assert family_of(model_type) == Family()


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_models_of_every_record_as_language_models(name):
    pytest.importorskip("torch")
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert name in CONFIG_MAPPING_NAMES
    if FAMILIES[name].pictures is None:
        assert name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    else:
        assert name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


@pytest.mark.parametrize("name", PLANNED)
def test_a_record_names_fields_that_the_configuration_has(name):
    config = pytest.importorskip("transformers").AutoConfig.for_model(name)
    decoder, experts = FAMILIES[name].decoder, FAMILIES[name].experts
    named = {decoder.qkv_bias, decoder.output_bias, decoder.mlp_bias, *decoder.defaults}
    if experts:
        named |= {experts.count[0], experts.width, experts.shared_width, experts.normalised}
        assert hasattr(config, "decoder_sparse_step") != experts.every_layer
    assert [field for field in named if isinstance(field, str) and not hasattr(config, field)] == []
    by_layer, by_model = getattr(config, "layer_types", None), hasattr(config, "sliding_window")
    assert decoder.window == ("layer_types" if by_layer else "sliding_window" if by_model else None)
    assert decoder.softcap == bool(getattr(config, "final_logit_softcapping", None))


@pytest.mark.parametrize("name", PLANNED)
def test_a_config_json_of_sizes_alone_means_what_it_means_to_transformers(name):
    # The names and shapes of all weights: tests/workbench/planning/test_planning_architecture.py.
    bare = architecture_of({"model_type": name, **sizes_of(name)}, "config.json", "pretrain")
    full = architecture_of(config_of(name).to_dict(), "config.json", "pretrain")
    assert replace(bare, positions=None) == replace(full, positions=None)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rules_let_megatron_have_the_families_that_it_builds_and_no_others(name):
    worker = SimpleNamespace(
        model_args=None, strategy_args=SimpleNamespace(strategy_config=MegatronConfig(), strategy_name="megatron_train")
    )
    refused = [
        str(violation)
        for violation in shape_rules("actor_train", worker, "a model", shape_of({"model_type": name}))
        if violation.path.endswith("strategy_name")
    ]
    assert len(refused) == (not FAMILIES[name].megatron)
    assert all(f"megatron_* knows {', '.join(MEGATRON)}; " in message for message in refused)


@pytest.mark.parametrize("name", FAMILIES)
def test_megatron_reads_of_a_configuration_what_the_planner_reads(name):
    pytest.importorskip("torch")
    from roll.strategies.megatron.megatron_architecture import architecture

    if not FAMILIES[name].megatron:
        with pytest.raises(ValueError, match=f"models of type '{name}'.*; it knows {', '.join(MEGATRON)}"):
            architecture(SimpleNamespace(model_type=name))
        return
    config = config_of(name)
    built, planned = architecture(config), architecture_of(config.to_dict(), "config.json", "pretrain")
    for field in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab",
        "tied",
        "qkv_bias",
        "sparse",
        "experts",
    ):
        assert getattr(built, field) == getattr(planned, field), field
    assert built.ffn == planned.intermediate
    assert (built.expert_ffn, built.shared_ffn) == (planned.expert_width, planned.shared_width)
    assert built.qk_norm == (FAMILIES[name].decoder.qk_norm is not None)


@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_layers_have_all_that_a_record_says(name):
    # roll/strategies/megatron/mapping.py: two norms a layer, norms of single heads, separate matrices, plain logits.
    decoder, plain = FAMILIES[name].decoder, Decoder()
    assert (decoder.norms, decoder.fused, decoder.softcap) == (plain.norms, False, False)
    assert decoder.qk_norm in (None, "head")
    assert True not in (decoder.output_bias, decoder.mlp_bias)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.decode_step])
def test_decode_steps_are_a_class_of_hf_infer(name):
    # Their numbers: tests/strategies/test_hf_decode_step.py.
    pytest.importorskip("torch")
    steps = load_object(FAMILIES[name].decode_step)
    assert inspect.isclass(steps)
    assert list(inspect.signature(steps).parameters) == ["model"]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.liger])
def test_liger_has_kernels_for_the_families_that_use_them(name):
    # Their numbers, on an accelerator: tests/strategies/test_hf_fused.py.
    monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    assert name in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.vllm_copying_loader])
def test_vllm_has_the_class_that_copies(name):
    folder = package_folder("vllm")
    if folder is None:
        pytest.skip("vLLM isn't installed here")
    registry = (folder / "model_executor" / "models" / "registry.py").read_text("utf-8")
    assert f'"{FAMILIES[name].vllm_copying_loader}"' in registry


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tower_is_accepted_in_the_families_that_train_on_text_and_no_others(name, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{name}", "vision_config": {{"depth": 1}}}}')
    assert bool(list(media_checks("pretrain", str(tmp_path)))) == (
        not FAMILIES[name].trained_as_text and FAMILIES[name].pictures is None
    )


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.trained_as_text])
def test_families_that_train_on_text_have_a_tower(name):
    config = pytest.importorskip("transformers").AutoConfig.for_model(name)
    assert {"vision_config", "audio_config"} & config.sub_configs.keys()


def test_a_family_that_is_called_tested_is_named_in_the_tests_of_engines_and_trainers():
    sources = "".join(path.read_text("utf-8") for path in (TESTS / "strategies").glob("*.py"))
    assert [name for name, family in FAMILIES.items() if family.tested and f'"{name}"' not in sources] == []


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.models])
def test_sizes_of_models_are_entries_that_their_configuration_has(name):
    # The number of weights of each: tests/workbench/planning/test_planning_known_models.py.
    config = pytest.importorskip("transformers").AutoConfig.for_model(name)
    for model, sizes in FAMILIES[name].models.items():
        assert [key for key in sizes if key != "head_dim" and not hasattr(config, key)] == [], model
