"""LoRA keys: where they may stand, what they need, and who is the reference then."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest
from refused import check_refused, refusals

from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.rules.roles_rules import training_rules
from roll.configs.rules.validate import warnings_of
from roll.workbench.planning.architecture import UnknownModel
from roll.workbench.planning.role_states import states_of

ACTOR = "actor_train.model_args"
RANK = f"{ACTOR}.lora_rank=4"
MEGATRON = ("actor_train.strategy_args={strategy_name: megatron_train}",)
REWARD = "rewards.words={name: reward_model}"
KL = "use_kl_loss=true"

SYNC = "lora_sync=adapters"
ENGINE = "actor_infer.strategy_args"
VLLM = (f"{ENGINE}.strategy_name=vllm", f"+{ENGINE}.strategy_config={{sleep_level: 1}}")

REFUSED = [
    # id, overrides, fragments of the one violation's text, and its path unless it is the last override's key
    ("the engine", [RANK, "actor_infer.model_args.lora_rank=4"], ["merged weights", "remove it"]),
    ("the reference", [KL, "reference.model_args.lora_target=q_proj"],
     ["doesn't train", "adapters off is the reference"]),
    ("a reward model", [REWARD, "reward_model.model_args={model_name_or_path: model, lora_rank: 4}"],
     ["doesn't train", "merge the adapters"], "reward_model.model_args.lora_rank"),
    ("alpha without adapters", [f"{ACTOR}.lora_alpha=8"], ["lora_rank is 0", "lora_rank=16"]),
    ("targets without adapters", [f"{ACTOR}.lora_target=q_proj"], ["lora_rank is 0"]),
    ("dropout without adapters", [f"{ACTOR}.lora_dropout=0.1"], ["lora_rank is 0"]),
    ("frozen prefixes", [RANK, f"{ACTOR}.freeze_module_prefix=model.embed"],
     ["freeze the whole base model", "lora_target"]),
    ("all layers and some", [RANK, f"{ACTOR}.lora_target=[all-linear, q_proj]"], ["alone"]),
    ("a negative rank", [f"{ACTOR}.lora_rank=-1"], [">= 0"]),
    ("dropout of everything", [RANK, f"{ACTOR}.lora_dropout=1.0"], ["< 1"]),
    ("adapters without LoRA", [SYNC, *VLLM], ["there are no adapters to send", "lora_rank=16"], "lora_sync"),
    ("adapters for an engine without", [RANK, SYNC], ["hf_infer, which takes", "strategy_name=vllm"]),
    ("adapters and no base", [RANK, SYNC, *VLLM, f"{ENGINE}.strategy_config.sleep_level=2"],
     ["gives up the base weights", "sleep_level=1"]),
    ("adapters without room", [f"{ACTOR}.lora_rank=513", SYNC, *VLLM], ["at most 512"], f"{ACTOR}.lora_rank"),
    ("changes of adapters", [RANK, SYNC, *VLLM, "weight_transport=file", "delta_weight_sync=true"],
     ["acts only with lora_sync merged"]),
    ("a way unknown", [RANK, "lora_sync=both"], ["merged"]),
    ("a KL with neither", [KL], ["use_kl_loss is on"], "reference"),
]  # fmt: skip


@refusals(REFUSED)
def test_a_lora_key_that_cannot_act_is_refused(job, overrides, path, fragments):
    check_refused(job, overrides, path, fragments)


def test_megatron_takes_adapters_but_drops_nothing(job):
    assert load_config(job, "job", [RANK, *MEGATRON]).actor_train.model_args.uses_lora
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", [RANK, *MEGATRON, f"{ACTOR}.lora_dropout=0.1"])
    assert [violation.path for violation in caught.value.violations] == [f"{ACTOR}.lora_dropout"]
    assert "not with megatron_train: its ranks and recomputed layers would drop" in str(caught.value)


def test_layers_of_transformer_engine_take_no_adapters(job):
    config = load_config(job, "job", [RANK, *MEGATRON])
    options = dataclasses.replace(
        config.actor_train.strategy_args.strategy_config, transformer_impl="transformer_engine"
    )
    args = dataclasses.replace(config.actor_train.strategy_args, strategy_config=options)
    worker = dataclasses.replace(config.actor_train, strategy_args=args)
    (violation,) = training_rules("actor_train", worker)
    assert violation.path.endswith("transformer_impl") and "norms inside" in str(violation)
    plain = dataclasses.replace(worker.model_args, lora_rank=0)
    assert not list(training_rules("actor_train", dataclasses.replace(worker, model_args=plain)))


def test_adapters_on_megatron_are_not_planned_and_the_plan_says_so(job):
    worker = load_config(job, "job", [RANK, *MEGATRON]).actor_train
    with pytest.raises(UnknownModel, match=r"actor_train\.model_args\.lora_rank: adapters on Megatron aren't planned"):
        states_of(None, worker, role="actor_train", kind="policy", trains=True, rank=0, l2=False)


def test_with_adapters_a_kl_needs_no_reference_role(job):
    config = load_config(job, "job", [RANK, KL])
    assert config.reference_is_actor
    assert "reference" not in config.roles


def test_engines_get_merged_weights_unless_asked_otherwise(job):
    assert load_config(job, "job", [RANK]).lora_sync == "merged"
    assert load_config(job, "job", [RANK, SYNC, *VLLM]).lora_sync == "adapters"


def test_a_reference_section_stays_in_charge(job):
    config = load_config(job, "job", [RANK, KL, "reference={}"])
    assert not config.reference_is_actor
    assert "reference" in config.roles


def test_without_a_kl_nobody_is_the_reference(job):
    assert not load_config(job, "job", [RANK]).reference_is_actor


def test_adapters_to_start_from_are_not_part_of_the_reference_and_a_warning_says_so(job):
    (job / "adapter").mkdir()
    (job / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    path = f"{ACTOR}.adapter_name_or_path=adapter"
    expected = "without the adapters that training starts from"
    assert any(expected in warning for warning in warnings_of(load_config(job, "job", [path, KL])))
    assert not any(expected in warning for warning in warnings_of(load_config(job, "job", [path])))
    check_prerequisites(load_config(job, "job", [path]))


def test_a_folder_without_adapters_is_refused_before_a_model_is_loaded(job):
    with pytest.raises(ConfigError, match=r"adapter_config\.json, as peft writes it"):
        check_prerequisites(load_config(job, "job", [f"{ACTOR}.adapter_name_or_path=model"]))


def test_without_peft_the_error_says_how_to_install_it(job, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else found(name, *a))
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(load_config(job, "job", [RANK]))
    assert "peft is not installed" in str(caught.value)
    assert "pip install -e '.[lora]'" in str(caught.value)
    check_prerequisites(load_config(job, "job", []))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora .DoRA.*merge_and_unload"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "lora_only"}, "bias: lora_only"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: pissa_niter_4"),
        ({"peft_type": "LOHA"}, "holds LOHA adapters, expected LORA"),
        ([], "holds a list; expected an object"),
    ],
)
def test_a_folder_of_more_than_plain_lora_is_refused_before_a_model_is_loaded(job, fields, message):
    (job / "adapter").mkdir()
    config = {"peft_type": "LORA", **fields} if isinstance(fields, dict) else fields
    (job / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    loaded = load_config(job, "job", [f"{ACTOR}.adapter_name_or_path=adapter"])
    with pytest.raises(ConfigError, match=f"{ACTOR}.adapter_name_or_path: (.|\n)*{message}"):
        check_prerequisites(loaded)


def test_whole_tensors_beside_the_factors_are_refused_before_a_model_is_loaded(job):
    (job / "adapter").mkdir()
    (job / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    prefix = "base_model.model.model."
    header = json.dumps({"__metadata__": {}, f"{prefix}q.lora_A.weight": {}, f"{prefix}embed_tokens.weight": {}})
    data = len(header).to_bytes(8, "little") + header.encode()
    loaded = load_config(job, "job", [f"{ACTOR}.adapter_name_or_path=adapter"])
    file = job / "adapter" / "adapter_model.safetensors"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"holds 1 tensors besides the factors.*embed_tokens\.weight"):
        check_prerequisites(loaded)
    file.write_bytes(data[:20])
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors can't be read: it is cut off"):
        check_prerequisites(loaded)
