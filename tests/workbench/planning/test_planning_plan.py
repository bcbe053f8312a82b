"""Places, phases and the verdict: numbers worked by hand, roles that share devices or don't, changes that help."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from planned import config_of, merged, model_folder, plan_of, rlvr_job, sft_job, write_job
from published_cases import LLAMA_2_70B, LLAMA_3_8B, LLAMA_7B

from roll.cli.__main__ import main
from roll.configs.schema.key_values import changed
from roll.workbench.planning.changes import Change, make_fit, remedies
from roll.workbench.planning.machines import DEVICES, GIB, MIB, local_machines, named, parse_machines
from roll.workbench.planning.plan import plan_memory
from roll.workbench.planning.plan_report import as_json, as_text, bar

ROOT = Path(__file__).parents[2]
FSDP2 = {"strategy_name": "fsdp2_train"}


def sizes(use, role):
    """what -> bytes of a role in a phase."""
    found = {}
    for owner, item in use.items:
        if owner == role:
            found[item.what] = found.get(item.what, 0) + item.nbytes
    return found


def use_of(place, role, phase):
    """The worst moment of a phase of a role."""
    return next(use for use in place.uses if (use.role, use.phase) == (role, phase))


def test_sharded_states_by_hand(tmp_path):
    # Every tensor of Llama 3 8B has rows that 8 divides: 4 bytes of weights and 8 of moments for each eighth.
    model = model_folder(tmp_path / "model", LLAMA_3_8B)
    plan = plan_of(tmp_path, sft_job(model, ranks=8, length=512, strategy="fsdp2_train", options={}), "h100:8")
    held = sizes(use_of(plan.devices[0], "actor_train", "train"), "actor_train")
    assert held["weights"] == 8_030_261_248 // 8 * 4
    tensors = 2 + 1 + 32 * 9
    assert held["optimizer"] >= 8_030_261_248 // 8 * 8 + 4 * tensors
    start = use_of(plan.devices[0], "actor_train", "start")
    # Its part, and for a moment the embedding, the head and the last norm whole.
    ends = 2 * 128_256 * 4096 + 4096
    assert sizes(start, "actor_train")["weights"] == 8_030_261_248 // 8 * 4 + ends * 4


def test_key_value_cache_by_hand(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_3_8B)
    job = rlvr_job(model, slots=1, actor_infer={"strategy_args": {"strategy_name": "hf_infer"}})
    job["actor_infer"]["strategy_args"].pop("strategy_config")
    plan = plan_of(tmp_path, job, "h100:1")
    cache = sizes(use_of(plan.devices[0], "actor_infer", "generate"), "actor_infer")["KV cache"]
    # 128 responses of 2047 positions in blocks of 64; keys and values of 8 heads of 128 in 32 layers, in bf16.
    assert cache == 128 * 2048 * 2 * 32 * 8 * 128 * 2


def test_an_engine_fills_its_share(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_3_8B)
    plan = plan_of(tmp_path, rlvr_job(model, slots=4), "h100:4")
    held = sizes(use_of(plan.devices[0], "actor_infer", "generate"), "actor_infer")
    share = int(0.5 * DEVICES["h100"].mib * MIB)
    assert held["weights"] + held["KV cache"] + held["activations"] == share
    assert held["weights"] == 8_030_261_248 * 2


def test_roles_that_share_devices_take_turns_and_others_do_not(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    together = plan_of(tmp_path, rlvr_job(model, slots=8), "h100:8")
    assert len(together.devices) == 1
    use = use_of(together.devices[0], "actor_infer", "generate")
    assert set(sizes(use, "actor_train")) == {"process"}
    sync = use_of(together.devices[0], "actor_train", "sync")
    assert "weights" in sizes(sync, "actor_infer")
    assert "KV cache" not in sizes(sync, "actor_infer")
    apart = {"actor_train": {"device_mapping": [0, 1, 2, 3], "training_args": {"gradient_accumulation_steps": 16}},
             "actor_infer": {"device_mapping": [4, 5, 6, 7]}}  # fmt: skip
    separate = plan_of(tmp_path, rlvr_job(model, slots=8, **apart), "h100:8")
    assert [place.name for place in separate.devices] == ["devices 0-3", "devices 4-7"]
    trainer, engine = separate.devices
    assert {use.role for use in trainer.uses} == {"actor_train"}
    assert "KV cache" in sizes(use_of(engine, "actor_infer", "sync"), "actor_infer")
    # Without an accelerator nothing is given back.
    host = plan_of(tmp_path, rlvr_job(model, slots=8), "cpu:64").hosts[0]
    assert {"weights", "optimizer"} <= set(sizes(use_of(host, "actor_infer", "generate"), "actor_train"))


def test_an_engine_in_the_trainers_process_computes_with_its_weights_from_the_first_sync_on(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    job = rlvr_job(model, slots=1)
    job["actor_infer"] = {**job["actor_infer"], "strategy_args": {"strategy_name": "hf_infer"}}
    weights = 6_738_415_616 * 4
    cases = {
        "inline fp32 fp32": {"start": weights},
        "inline fp32 bf16": {"generate": weights // 2},
        "inline bf16 fp32": {"generate": weights},
        "ray fp32 fp32": {"generate": weights},
    }
    for case, expected in cases.items():
        executor, computed, dtype = case.split()
        job["actor_train"]["model_args"], job["actor_infer"]["model_args"] = {"dtype": computed}, {"dtype": dtype}
        host = plan_of(tmp_path, {**job, "executor": executor}, "cpu:512").hosts[0]
        of_engine = {
            use.phase: sizes(use, "actor_infer").get("weights", 0) for use in host.uses if use.role == "actor_infer"
        }
        assert {phase: of_engine.get(phase) for phase in expected} == expected
        in_training = sizes(use_of(host, "actor_train", "train"), "actor_infer").get("weights", 0)
        assert in_training == (0 if case == "inline fp32 fp32" else of_engine["generate"])
        assert (of_engine["generate"] == 0) is (case == "inline fp32 fp32")


def test_a_reference_shares_the_devices_of_the_trainer(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    job = rlvr_job(model, slots=8, use_kl_loss=True, reference={"model_args": {"dtype": "bf16"},
                   "device_mapping": list(range(8))})  # fmt: skip
    plan = plan_of(tmp_path, job, "h100:8")
    use = use_of(plan.devices[0], "reference", "score")
    assert sizes(use, "actor_train").keys() == {"process"}
    assert sizes(use, "reference")["weights"] == 6_738_415_616 * 2 // 8


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"actor_train": {"model_args": {"disable_gradient_checkpointing": True}}}, {}),
        ({}, {"actor_train": {"model_args": {"activation_offload": True}}}),
        ({"actor_train": {"model_args": {"recompute_granularity": "selective"}}}, {}),
        (
            {"actor_train": {"model_args": {"disable_gradient_checkpointing": True}}},
            {"actor_train": {"model_args": {"recompute_granularity": "selective"}}},
        ),
        ({"response_length": 7168}, {}),
        ({"actor_train": {"training_args": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}}}, {}),
        ({}, {"actor_train": {"strategy_args": FSDP2 | {"strategy_config": {"offload_policy": True}}}}),
        ({"actor_train": {"strategy_args": FSDP2 | {"strategy_config": {"fsdp_size": 2}}}}, {}),
        ({"actor_train": {"strategy_args": FSDP2 | {"strategy_config": {"shard_between_micro_batches": False}}}}, {}),
        ({}, {"actor_train": {"model_args": {"lora_rank": 16}}}),
        ({}, {"actor_train": {"strategy_args": FSDP2 | {"strategy_config": {"optimizer_offload": True}}}}),
        ({}, {"actor_train": {"training_args": {"optimizer": "muon"}}}),
    ],
)
def test_what_takes_more_and_what_takes_less(tmp_path, more, less):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    peaks = []
    for changes in (more, less):
        plan = plan_of(tmp_path, rlvr_job(model, slots=8, **changes), "h100:8")
        peaks.append(use_of(plan.devices[0], "actor_train", "train").nbytes)
    assert peaks[0] > peaks[1]


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_model_parallel_size": 4, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2},
        {"context_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True},
    ],
)
def test_megatron_layouts_have_a_plan_and_hold_all_weights_once(tmp_path, options):
    model = model_folder(tmp_path / "model", LLAMA_2_70B)
    job = sft_job(model, ranks=8, length=2048, strategy="megatron_train", options=options)
    plan = plan_of(tmp_path, job, "h200:8")
    assert plan.models["actor_train"].count() == 68_976_648_192
    copies = 8 // (options.get("tensor_model_parallel_size", 1) * options.get("pipeline_model_parallel_size", 1))
    worst = max(sizes(use_of(p, "actor_train", "train"), "actor_train")["weights"] for p in plan.devices)
    assert worst * 8 / copies > 68_976_648_192 * 2


def test_the_verdict_names_a_change_that_makes_it_fit(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    training = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    job = rlvr_job(model, slots=8, response_length=7168, actor_train={"training_args": training})
    config, machines = config_of(tmp_path, job), parse_machines("a100-40:8")
    plan = plan_memory(config, machines)
    assert not plan.fits
    found = remedies(config, machines, lambda keys: True)
    assert found
    for change in found:
        assert plan_memory(changed(config, change.keys), machines).fits
    text = as_text(plan, found)
    assert f"doesn't fit by {plan.missing / GIB:.1f} GiB" in text
    assert f"change this: {found[0]}" in text


def test_several_changes_together_make_a_large_model_fit(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_3_8B)
    job = sft_job(model, ranks=4, length=4096, strategy="deepspeed_train", options={"zero_optimization": {"stage": 1}})
    config, machines = config_of(tmp_path, job), parse_machines("rtx4090:4")
    assert not remedies(config, machines, lambda keys: True)
    together = make_fit(config, machines, lambda keys: True)
    # ZeRO 1 and 2 keep all weights on each device, 16 GB in bf16, and there is no room for the rest beside them.
    assert together.keys["actor_train.strategy_args.strategy_config.zero_optimization.stage"] == 3
    assert plan_memory(changed(config, together.keys), machines).fits


def test_keys_are_changed_in_sections_and_in_mappings(tmp_path):
    job = sft_job(model_folder(tmp_path / "m", LLAMA_7B), ranks=2, length=8, strategy="deepspeed_train", options={})
    config = config_of(tmp_path, job)
    keys = {"actor_train.strategy_args.strategy_config.zero_optimization.offload_optimizer": {"device": "cpu"},
            "actor_train.infer_batch_size": 3}  # fmt: skip
    other = changed(config, keys)
    assert other.actor_train.strategy_args.strategy_config.offloads("offload_optimizer")
    assert other.actor_train.infer_batch_size == 3
    assert dataclasses.replace(other, actor_train=config.actor_train) == config
    assert str(Change(keys, 0)).startswith(
        "actor_train.strategy_args.strategy_config.zero_optimization.offload_optimizer"
    )


def test_weights_that_wait_on_the_host_are_there_when_they_are_used(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    options = {"param_offload": True, "optimizer_offload": True}
    job = sft_job(model, ranks=8, length=512, strategy="fsdp2_train", options=options)
    plan = plan_of(tmp_path, job, "h100:8,cpu:512")
    train, score = (use_of(plan.devices[0], "actor_train", phase) for phase in ("train", "score"))
    assert sizes(train, "actor_train")["weights"] == 6_738_415_616 * 4 // 8
    assert "optimizer" not in sizes(score, "actor_train")
    assert {item.what for _, item in train.items if item.lasting} == {"process"}
    host = use_of(plan.hosts[0], "actor_train", "train")
    assert host.lasting > 6_738_415_616 * 12


def test_a_teacher_behind_a_service_takes_nothing(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    job = rlvr_job(model, slots=8)
    service = {"endpoint": "http://localhost:8000/v1", "model": "teacher"}
    named_model = {"model_name_or_path": str(model)}
    teacher = {"model_args": named_model, "strategy_args": {"strategy_name": "endpoint", "strategy_config": service}}
    with_teacher = plan_of(tmp_path, {**job, "teacher": teacher}, "h100:8")
    assert as_json(with_teacher)["devices"] == as_json(plan_of(tmp_path, job, "h100:8"))["devices"]


# --- machines ---------------------------------------------------------------------------------------------------------


def test_the_tower_of_a_picture_model_is_named_and_not_counted(tmp_path):
    tree = {"model_type": "qwen3_5_text", **{key: LLAMA_7B[key] for key in LLAMA_7B if key != "model_type"}}
    folders = {
        "text": model_folder(tmp_path / "text", tree),
        "pictures": model_folder(
            tmp_path / "pictures", {"model_type": "qwen3_5", "text_config": tree, "vision_config": {"depth": 27}}
        ),
    }
    plans = {name: plan_of(tmp_path, rlvr_job(folder, slots=8), "h100:8") for name, folder in folders.items()}
    note = f"{folders['pictures']}: its tower for pictures isn't counted; the language model is loaded alone"
    assert note in plans["pictures"].notes and note not in plans["text"].notes
    assert plans["pictures"].hosts == plans["text"].hosts
    assert plans["pictures"].devices == plans["text"].devices


def test_devices_are_parsed():
    machines = parse_machines("h100:8,cpu:1024")
    assert (machines.device, machines.count, machines.host_bytes) == ("h100", 8, 1024 * GIB)
    assert parse_machines("CPU:0.5").host_bytes == GIB // 2
    assert named("NVIDIA A100-SXM4-80GB") == "a100-80"
    assert named("NVIDIA L40S") == "l40s"
    assert named("NVIDIA H100 80GB HBM3") == "h100"
    assert named("NVIDIA GeForce GTX 1080") is None
    assert local_machines(()).device is None
    assert local_machines(("NVIDIA L4",) * 2).count == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h10:8", "no device 'h10'.*did you mean 'h100'"),
        ("h100:0", "from 1 to 1024"),
        ("h100:1.5", "whole one"),
        ("cpu", "in GiB"),
        ("h100,a100-80", "one kind"),
        ("", "nothing is named"),
        ("h100 8", "isn't understood"),
    ],
)
def test_devices_that_are_none_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        parse_machines(text)


def test_accelerators_without_an_entry_are_asked_for():
    with pytest.raises(ValueError, match="--devices"):
        local_machines(("Some Chip",))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_bars_and_its_exit_code_is_the_verdict(tmp_path, capsys):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    file = str(write_job(tmp_path, rlvr_job(model, slots=8)))
    assert main(["plan", file, "--devices", "h100:8"]) == 0
    printed = capsys.readouterr().out
    assert "16 prompts x 8 responses = 128 responses per step" in printed
    assert "devices 0-7, 77.3 GiB to use" in printed
    assert "  generate [#" in printed
    assert "  train    [#" in printed
    assert "fits: devices 0-7 have" in printed
    assert main(["plan", file, "--devices", "l4:8"]) == 1
    assert "doesn't fit by" in capsys.readouterr().out
    assert main(["plan", file, "--devices", "h100:4"]) == 2
    assert "8 device slots per machine" in capsys.readouterr().err
    assert main(["plan", file, "--devices", "hal9000"]) == 2
    assert "no device 'hal9000'" in capsys.readouterr().err


def test_json_has_the_same_numbers(tmp_path, capsys):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    job = rlvr_job(model, slots=8)
    assert main(["plan", str(write_job(tmp_path, job)), "--devices", "h100:8", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    plan = plan_of(tmp_path, job, "h100:8")
    assert tree == json.loads(json.dumps(as_json(plan)))
    phases = {phase["phase"]: phase for phase in tree["devices"][0]["phases"] if phase["role"] == "actor_train"}
    assert phases["train"]["worst"] == sum(item["bytes"] for item in phases["train"]["items"])


def test_sizes_that_do_not_divide_the_model_are_refused(tmp_path, capsys):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    options = {"tensor_model_parallel_size": 3}
    job = sft_job(model, ranks=3, length=8, strategy="megatron_train", options=options)
    assert main(["plan", str(write_job(tmp_path, job)), "--devices", "h100:8"]) == 2
    assert "a divisor of the 32 attention heads" in capsys.readouterr().err


def test_suggestions_fit_and_pass_the_check(tmp_path, capsys):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    training = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    job = rlvr_job(model, slots=8, response_length=7168, actor_train={"training_args": training})
    assert main(["plan", str(write_job(tmp_path, job)), "--devices", "a100-40:8", "--suggest", "--json"]) == 1
    suggested = json.loads(capsys.readouterr().out)["suggested"]
    assert suggested
    overrides = [f"{key}={json.dumps(value)}" for key, value in suggested.items()]
    assert main(["plan", str(write_job(tmp_path, job)), "--devices", "a100-40:8", *overrides]) == 0


def test_a_plan_takes_two_seconds_and_no_torch(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_2_70B)
    file = write_job(tmp_path, merged(rlvr_job(model, slots=8), {"num_nodes": 1}))
    code = (
        "import sys, resource\n"
        "from roll.cli.__main__ import main\n"
        f"status = main(['plan', {str(file)!r}, '--devices', 'h200:8'])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, used.ru_utime + used.ru_stime, status)"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    torch, transformers, seconds, _ = done.stdout.splitlines()[-1].split()
    assert (torch, transformers) == ("False", "False")
    assert float(seconds) < 2.0, f"{seconds} s of computing, {time.monotonic() - started:.1f} s by the clock"


def test_a_bar_shows_what_lasts_and_what_is_too_much(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    plan = plan_of(tmp_path, rlvr_job(model, slots=8), "h100:8")
    use = use_of(plan.devices[0], "actor_train", "train")
    assert bar(use, 2 * use.nbytes).count(".") == 24
    assert bar(use, use.nbytes - 1).endswith("!]")


def test_only_the_trainer_passes_weights_on_and_the_engine_takes_them(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    critic = {"device_mapping": list(range(8)), "training_args": {"gradient_accumulation_steps": 16}}
    job = rlvr_job(model, slots=8, adv_estimator="gae", critic=critic)
    plan = plan_of(tmp_path, job, "h100:8")
    senders = {use.role for use in plan.devices[0].uses if use.phase == "sync"}
    assert senders == {"actor_train", "actor_infer"}
    taking = dataclasses.replace(plan.hosts[0], uses=(use_of(plan.hosts[0], "actor_infer", "sync"),))
    assert "when actor_infer takes new weights" in as_text(dataclasses.replace(plan, hosts=(taking,)))
    tuned = plan_of(tmp_path, sft_job(model, ranks=8, length=64, strategy="fsdp2_train", options={}), "h100:8")
    assert not [use for use in tuned.devices[0].uses if use.phase == "sync"]


def test_the_trainer_and_each_engine_keep_a_copy_of_what_was_sent(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    engines = {"actor_infer": {"model_args": {"dtype": "bf16"}}}
    jobs = {keys.get("delta_weight_sync", False): rlvr_job(model, slots=8, **engines, **keys)
            for keys in ({}, {"delta_weight_sync": True})}  # fmt: skip
    whole, delta = (plan_of(tmp_path, jobs[key], "h100:8").hosts[0] for key in (False, True))
    for role, phase in (("actor_infer", "generate"), ("actor_train", "sync")):
        held = sizes(use_of(delta, role, phase), "actor_infer")
        assert held.pop("weight copies") == 9 * 6_738_415_616 * 2
        assert held == sizes(use_of(whole, role, phase), "actor_infer")
    assert "weight copies" not in sizes(use_of(delta, "actor_train", "start"), "actor_infer")


def test_devices_that_differ_by_bytes_are_told_of_once(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    options = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 4}
    plan = plan_of(tmp_path, sft_job(model, ranks=8, length=64, strategy="megatron_train", options=options), "h100:8")
    assert [place.slots for place in plan.devices] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    alike = dataclasses.replace(plan.devices[0], slots=(4, 5, 7))
    text = as_text(dataclasses.replace(plan, devices=(plan.devices[0], alike)))
    assert "devices 0-5,7, " in text and "fits: devices 0-5,7 have" in text and "devices 0-3" not in text


def test_a_folder_that_is_not_made_yet_is_planned_by_its_origin(tmp_path, capsys):
    file = str(write_job(tmp_path, rlvr_job(tmp_path / "not" / "made", slots=1)))
    assert main(["plan", file, "--devices", "cpu:8"]) == 2
    assert "pretrain=ORG/NAME" in capsys.readouterr().err


def test_a_module_that_no_device_holds_whole_needs_another_backend(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_2_70B)
    shards = {stage: {"zero_optimization": {"stage": stage}} for stage in (2, 3)}
    layouts = {
        "zero2": ("deepspeed_train", shards[2]),
        "zero3": ("deepspeed_train", shards[3]),
        "fsdp2": ("fsdp2_train", {}),
    }
    verdicts = {}
    for name, (strategy, options) in layouts.items():
        job = sft_job(model, ranks=8, length=64, strategy=strategy, options=options)
        verdicts[name] = as_text(plan_of(tmp_path, job, "a100-80:8"))
    advice = "take fsdp2_train, deepspeed_train with ZeRO 3 or megatron_train"
    # 70B in bf16 are 128 GiB. An eighth of them fits at the start, but not with the 16 bytes that training takes.
    assert advice in verdicts["zero2"]
    for name in ("zero3", "fsdp2"):
        assert "when actor_train trains" in verdicts[name] and advice not in verdicts[name]
