"""`dtype: auto`: which machines compute in which type, and what plans and checks say about it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import yaml

from roll.cli.__main__ import main
from roll.configs.checks.dtype_choice import auto_roles, choose_dtype, with_dtypes
from roll.configs.checks.machine_checks import Machine, machine_warnings
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.utils.processor import AMD, Processor, this_processor
from roll.workbench.planning.machines import parse_machines, planned_dtype

AUTO = ["++actor_train.model_args.dtype=auto", "++actor_infer.model_args.dtype=auto"]
INTEL = "GenuineIntel"


def x86(*features, maker=AMD):
    return Machine(cores=2, processor=Processor(maker, frozenset({"avx2", "avx512f", *features})))


NEITHER = "the processor of a has neither avx512_bf16 nor amx_bf16"
TABLE = {
    "an old x86": (x86(), "fp32", NEITHER),
    "another processor, or an unknown one": (Machine(), "fp32", NEITHER),
    "Zen 4": (x86("avx512_bf16"), "bf16", "the processor of a has avx512_bf16"),
    "Sapphire Rapids": (x86("avx512_bf16", "amx_bf16", maker=INTEL), "bf16", "the processor of a has amx_bf16"),
    "Sapphire Rapids without AMX, as under some hypervisors": (
        x86("avx512_bf16", maker=INTEL),
        "fp32",
        "the processor of a has avx512_bf16 without amx_bf16, which is slower than fp32 unless AMD made it",
    ),
    "Ampere": (Machine(accelerators=("NVIDIA A100", "NVIDIA A100")), "bf16", "the accelerators of a compute in it"),
    "a driver that doesn't tell": (Machine(accelerators=("",)), "bf16", "the accelerators of a compute in it"),
    "AMD": (Machine(amd=True), "bf16", "the accelerators of a compute in it"),
    "Volta beside Ampere, in a host that has it": (
        replace(x86("avx512_bf16"), accelerators=("NVIDIA A100", "Tesla V100")),
        "fp32",
        "Tesla V100 of a has no bf16 arithmetic",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_machine_by_its_features(name):
    machine, dtype, reason = TABLE[name]
    choice = choose_dtype({"a": machine})
    assert (choice.dtype, choice.reason) == (dtype, reason)


def test_unequal_machines_take_what_all_of_them_have():
    new, old = x86("avx512_bf16"), x86()
    assert choose_dtype({"10.0.0.1": new, "10.0.0.2": new}).dtype == "bf16"
    choice = choose_dtype({"10.0.0.1": new, "10.0.0.2": old, "10.0.0.3": new})
    assert choice.dtype == "fp32"
    assert choice.reason == "the processor of 10.0.0.2 has neither avx512_bf16 nor amx_bf16"


def test_the_kernel_lists_what_torch_finds():
    features, found = this_processor().features, torch.cpu.get_capabilities()
    known = ("avx2", "avx512_bf16", "amx_bf16")
    assert {name: name in features for name in known} == {name: bool(found.get(name)) for name in known}
    assert ("avx512_bf16" in features) is torch.cpu._is_avx512_bf16_supported()


def test_the_first_core_speaks_for_all(tmp_path):
    file = tmp_path / "cpuinfo"
    assert this_processor(file) == Processor()
    core = "processor\t: {}\nvendor_id\t: GenuineIntel\nflags\t\t: fpu avx2\nbugs\t\t: avx512f\n\n"
    file.write_text(core.format(0) + core.format(1))
    assert this_processor(file) == Processor(INTEL, frozenset({"fpu", "avx2"}))


def test_only_roles_with_auto_get_the_type_however_deep_they_are(job):
    teacher = "++teachers.maths={tags: [algebra], model_args: {model_name_or_path: model, dtype: auto}}"
    config = load_config(".", "job", [AUTO[0], teacher], check=False)
    assert auto_roles(config) == ("actor_train", "teachers.maths")
    settled = with_dtypes(config, dict.fromkeys(auto_roles(config), "bf16"))
    assert {role: worker.model_args.dtype for role, worker in settled.sections.items()} == {
        "actor_train": "bf16", "actor_infer": "fp32", "teachers.maths": "bf16",
    }  # fmt: skip
    assert auto_roles(settled) == ()


def test_bf16_that_is_slow_here_is_warned_of(job):
    config = load_config(".", "job", ["++actor_train.model_args.dtype=bf16"])
    (warning,) = machine_warnings(config, x86())
    assert warning.startswith("model_args.dtype: bf16 of actor_train is slower than fp32 on this processor, which has")
    assert not [*machine_warnings(config, x86("avx512_bf16"))]
    (warning,) = machine_warnings(config, x86("avx512_bf16", maker=INTEL))
    assert "slower than fp32 on this processor, which has avx512_bf16 without amx_bf16" in warning
    assert not [*machine_warnings(config, Machine(cores=2))]  # nobody knows
    assert not [*machine_warnings(load_config(".", "job", AUTO), x86())]


def test_deepspeeds_json_leaves_the_type_open_too(job):
    tree = yaml.safe_load((job / "job.yaml").read_text())
    for enabled in ("auto", True, False):
        options = {"bf16": {"enabled": enabled}, "fp16": {"enabled": False}}
        tree["actor_train"]["strategy_args"] = {"strategy_name": "deepspeed_train", "strategy_config": options}
        (job / "job.yaml").write_text(yaml.safe_dump(tree))
        if enabled == "auto":
            load_config(".", "job", AUTO)
            continue
        with pytest.raises(ConfigError, match=r"bf16.enabled: got .*, expected auto, because actor_train.model_args.d"):
            load_config(".", "job", AUTO)


@pytest.mark.parametrize(
    ("devices", "dtype", "reason"),
    [
        ("h100:8", "bf16", "the accelerators of --devices compute in it"),
        ("mi300x:8", "bf16", "the accelerators of --devices compute in it"),
        ("v100-16:8", "fp32", "V100-16 of --devices has no bf16 arithmetic"),
        ("t4", "fp32", "T4 of --devices has no bf16 arithmetic"),
        ("cpu:64", "fp32", "--devices doesn't say what the processor has"),
    ],
)
def test_plans_for_other_machines_choose_as_a_run_there_would(devices, dtype, reason):
    choice = planned_dtype(parse_machines(devices))
    assert (choice.dtype, choice.reason) == (dtype, reason)


def test_the_plan_says_what_it_has_chosen_and_counts_bytes_of_that_type(job, capsys):
    shape = {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    (job / "model" / "config.json").write_text(json.dumps(shape))
    printed = {}
    for dtype, devices in (("auto", "h100"), ("bf16", "h100"), ("auto", "v100-16"), ("fp32", "v100-16")):
        settings = [f"++{role}.model_args.dtype={dtype}" for role in ("actor_train", "actor_infer")]
        assert main(["plan", "job.yaml", *settings, "--devices", f"{devices}:1", "--json"]) == 0
        tree = yaml.safe_load(capsys.readouterr().out)
        printed[dtype, devices] = tree.pop("notes"), tree
    assert printed["auto", "h100"][1] == printed["bf16", "h100"][1]
    assert printed["auto", "v100-16"][1] == printed["fp32", "v100-16"][1] != printed["auto", "h100"][1]
    first, *others = printed["auto", "h100"][0]
    assert first == "dtype: auto is bf16 for actor_train, actor_infer: the accelerators of --devices compute in it"
    assert others == printed["bf16", "h100"][0]
