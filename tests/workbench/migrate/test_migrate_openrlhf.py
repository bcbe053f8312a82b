"""Moving in from OpenRLHF 0.11.2: its launch scripts, every flag of its four parsers, and what they train here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.configs.parsing.loader import read_tree
from roll.workbench.migrate.hints import foreign_hint
from roll.workbench.migrate.openrlhf_flags import SCRIPTS, kinds_of
from roll.workbench.migrate.overrides import at
from roll.workbench.migrate.report import MigrationReport
from roll.workbench.migrate.table import patterns, systems
from roll.workbench.migrate.translate import migrate

PPO = (
    "--actor.model_name_or_path a/b --reward.model_name_or_path r/m --data.prompt_dataset d.jsonl "
    "--data.input_key prompt --data.max_len 1024 --rollout.max_new_tokens 512 --vllm.num_engines 8 "
    "--train.colocate_all "
)
OFFLINE = "--model.model_name_or_path a/b --data.dataset d.jsonl --data.apply_chat_template "


def migrated(
    tmp_path: Path, text: str, system: str | None = None, name: str = "run.sh"
) -> tuple[MigrationReport, dict[str, Any]]:
    (tmp_path / name).write_text(text, "utf-8")
    report, tree = migrate(tmp_path / name, system)
    assert tree is not None and report.system == "OpenRLHF"
    return report, tree


def ppo(tmp_path: Path, flags: str) -> tuple[MigrationReport, dict[str, Any]]:
    return migrated(tmp_path, f"python3 -m openrlhf.cli.train_ppo_ray {PPO} {flags}\n")


def asked(report: MigrationReport) -> dict[str, tuple[str, ...]]:
    return {use.key: use.ours for use in report.of("absent")}


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_of_the_parsers_has_a_row(script: str):
    assert len(kinds_of(script)) > 70
    assert not [flag for flag in kinds_of(script) if patterns("openrlhf").find(flag.split(".")) is None]


def test_every_row_is_a_flag_of_today_or_says_that_it_isnt():
    flags = {flag for script in SCRIPTS for flag in kinds_of(script)}
    *today, before = systems()["openrlhf"].groups.items()
    assert not [row.key for _, rows in today for row in rows if row.key not in flags]
    assert "before 0.10" in before[0] and not [row.key for row in before[1] if row.now and row.now not in flags]


def test_keys_of_openrlhf_in_a_configuration_are_answered_with_ours():
    zero = "actor_train.strategy_args.strategy_config.zero_optimization.stage"
    assert zero in foreign_hint("ds.zero_stage") and zero in foreign_hint("zero_stage")
    assert "write adv_estimator" in foreign_hint("algo.advantage.estimator")
    assert "write adv_estimator" in foreign_hint("advantage_estimator")
    assert "write target_kl" in foreign_hint("algo.kl.target")
    assert "num_return_sequences_in_group" in foreign_hint("n_samples_per_prompt")


# --- launch scripts --------------------------------------------------------------------------------------------------

ARRAYS = """#!/bin/bash
MODEL=Qwen/Qwen2.5-7B   # a comment
ARGS=(
   --data.input_key prompt
   # --reward.model_name_or_path other
   --rollout.n_samples_per_prompt=4

   --reward.clip_range -10 10
)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/openrlhf"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path ${MODEL} --reward.model_name_or_path r/m \\
   ${ARGS[@]} --train.colocate_all \\
   --data.prompt_dataset "d.jsonl" --vllm.num_engines $((2 * 4)) --actor.adam.lr 5e-7 2>&1 | tee log
"""
DOCUMENT = """set -x
LR=5e-6
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --data.dataset Open-Orca/OpenOrca \\
   --data.input_key question --data.output_key response \\
   --model.model_name_or_path a/b --adam.lr $LR \\
   --ckpt.load_enable
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --num_gpus 2 --module $training_commands
fi
"""
NESTED = """srun bash -c "pip install x && ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\
    --actor.model_name_or_path a/b --reward.model_name_or_path r/m --data.prompt_dataset d.jsonl" &>> log
"""


def test_variables_and_arrays_of_a_script_are_filled_in_and_nothing_is_run(tmp_path: Path):
    report, tree = migrated(tmp_path, ARRAYS)
    assert (report.pipeline, tree["pretrain"], tree["num_return_sequences_in_group"]) == ("rlvr", "Qwen/Qwen2.5-7B", 4)
    assert tree["actor_train"]["training_args"]["learning_rate"] == 5e-7
    assert tree["actor_train"]["data_args"]["prompt"] == "prompt" and tree["reward_clip"] == 10.0
    assert tree["actor_infer"]["device_mapping"] == "0-7"
    assert not [line for line in report.decisions if "flag" in line]


def test_a_here_document_that_read_puts_into_a_variable_is_read(tmp_path: Path):
    report, tree = migrated(tmp_path, DOCUMENT)
    assert (report.pipeline, tree["resume_from_checkpoint"], tree["num_gpus_per_node"]) == ("sft", "auto", 2)
    args = tree["actor_train"]
    assert args["data_args"]["response"] == "response" and args["training_args"]["learning_rate"] == 5e-6
    # The parser's own template, which counts where the chat template is off.
    assert args["data_args"]["template"] == "User: {prompt}\nAssistant: "
    # 128 rows, its default, of 8 a pass on 2 devices: 128 / (8 x 2) = 8.
    assert args["training_args"]["per_device_train_batch_size"] == 8
    assert args["training_args"]["gradient_accumulation_steps"] == 8


def test_a_command_in_the_text_of_bash_c_is_read(tmp_path: Path):
    assert migrated(tmp_path, NESTED)[1]["pretrain"] == "a/b"


def test_escapes_in_a_quoted_text_are_those_of_bash(tmp_path: Path):
    text = f"deepspeed --module openrlhf.cli.train_sft {OFFLINE.replace('--data.apply_chat_template', '')}"
    tree = migrated(tmp_path, text + " --data.output_key a --data.input_template $'Q: {}\\nA: '")[1]
    assert tree["actor_train"]["data_args"]["template"] == "Q: {prompt}\nA: "
    tree = migrated(tmp_path, text + " --data.output_key a --data.input_template Q:")[1]  # without {} there is none
    assert tree["actor_train"]["data_args"]["template"] == "plain"


def test_what_a_script_says_besides_known_flags_is_named(tmp_path: Path):
    report, tree = ppo(
        tmp_path,
        "--actor.adam.ler 1 --ref.offload $MORE left --rollout.temp 0.7 --critic.adam.lr $LR \\\n # gone \\\n --a",
    )
    assert "did you mean actor.adam.lr?" in report.of("absent")[0].note and tree["exp_name"] == "???"
    said = " ".join(report.decisions)
    assert "$MORE" in said and "left belongs to no flag" in said and "--a isn't part of the command" in said
    assert tree["actor_infer"]["generating_args"]["temperature"] == 0.7 and "short for --rollout.temperature" in said
    assert tree["critic"]["training_args"]["learning_rate"] == "???" and "$LR" in report.of("unexpanded")[0].note
    assert tree["critic"]["training_args"]["adam_beta2"] == 0.95


def test_a_script_that_this_release_doesnt_have_is_refused(tmp_path: Path):
    (tmp_path / "run.sh").write_text("deepspeed --module openrlhf.cli.train_kto --dataset x", "utf-8")
    with pytest.raises(ValueError, match="0.11.2 has no train_kto; it has train_sft, train_dpo"):
        migrate(tmp_path / "run.sh")


def test_names_from_before_are_those_of_today(tmp_path: Path):
    report, tree = migrated(
        tmp_path,
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain a/b --reward_pretrain r/m --prompt_data d.jsonl "
        "--input_key q --prompt_max_len 512 --generate_max_len 1024 --actor_learning_rate 5e-7 --l2 0.1 --zero_stage 3 "
        "--advantage_estimator rloo --init_kl_coef 0 --n_samples_per_prompt 8 --vllm_num_engines 2 "
        "--adam_betas 0.9 0.99 --micro_train_batch_size 2 --apply_chat_template "
        "--colocate_all_models --use_wandb secret-token",
    )
    args = tree["actor_train"]["training_args"]
    assert (args["learning_rate"], args["weight_decay"], args["adam_beta2"]) == (5e-7, 0.1, 0.99)
    assert (tree["prompt_length"], tree["response_length"], tree["adv_estimator"]) == (512, 1024, "rloo")
    assert tree["actor_train"]["strategy_args"]["strategy_config"]["zero_optimization"] == {"stage": 3}
    assert tree["num_return_sequences_in_group"] == 8 and tree["track_with"] == ["stdout", "wandb"]
    assert not asked(report)
    assert "--l2 is actor.adam.weight_decay and critic.adam.weight_decay" in " ".join(
        report.decisions)  # fmt: skip
    assert "secret-token" not in report.text() + report.json()


def test_a_yaml_file_of_flags_is_read_like_a_script(tmp_path: Path):
    text = (
        "actor: {model_name_or_path: a/b, adam.lr: 3.0e-6}\nrollout.batch_size: 64\ndata: {prompt_dataset: d.jsonl}\n"
    )
    for system in (None, "openrlhf"):
        report, tree = migrated(tmp_path, text, system, "flags.yaml")
        assert (report.pipeline, tree["rollout_batch_size"]) == ("rlvr", 64)
        assert tree["actor_train"]["training_args"]["learning_rate"] == 3e-6
    dpo = "pretrain: a/b\nbeta: 0.3\ndataset: d.jsonl\nref_pretrain: c/d\n"
    report, tree = migrated(tmp_path, dpo, "openrlhf", "flags.yaml")
    assert (report.pipeline, tree["beta"], at(tree, "reference.model_args.model_name_or_path")) == ("dpo", 0.3, "c/d")


@pytest.mark.parametrize("value", ["[3]", "many", "{a: 1}"])
def test_a_value_that_the_parser_refuses_is_asked_for(tmp_path: Path, value: str):
    text = f"train.batch_size: {value}\nmodel: {{model_name_or_path: a/b}}\ndata: {{dataset: [d.jsonl, e.jsonl]}}\n"
    report, tree = migrated(tmp_path, text, "openrlhf", "flags.yaml")
    assert tree["actor_train"]["data_args"]["file_name"] == ["d.jsonl", "e.jsonl"]
    if value != "{a: 1}":
        assert tree["actor_train"]["training_args"]["gradient_accumulation_steps"] == "???"
    assert [use.key.startswith("train.batch_size") for use in report.of("absent")] == [True]


def test_odd_values_end_in_a_report_and_never_in_a_traceback(tmp_path: Path):
    odd = ("x", "-1", "0", "1.5", "$X", "a b c", "", "'[1'", "nan", "99999999999999999999")
    flags = [flag for flag in kinds_of("train_ppo_ray") if patterns("openrlhf").find(flag.split("."))]
    for number, value in enumerate(odd):
        text = " ".join(f"--{flag} {value}" for flag in flags[number::3])
        report, _ = migrated(tmp_path, f"python3 -m openrlhf.cli.train_ppo_ray {text}\n")
        named = {use.key for use in report.uses}
        assert not [flag for flag in flags[number::3] if flag not in named]


# --- what is trained -------------------------------------------------------------------------------------------------


def test_ppo_with_a_reward_model_passes_check_and_has_the_parsers_defaults(tmp_path: Path):
    report, tree = ppo(tmp_path, "--algo.kl.target 0.1 --data.apply_chat_template")
    assert not report.missing and not read_tree(tree, "").violations and not asked(report)
    actor, critic = tree["actor_train"], tree["critic"]
    for role in (actor, critic):
        args = role["training_args"]
        assert (args["adam_beta2"], args["lr_scheduler_type"], args["warmup_ratio"], args["min_lr_ratio"]) == (
            0.95, "cosine", 0.03, 0.1)  # fmt: skip
        # 128 responses, its default, of 1 a pass on 8 devices.
        assert args["gradient_accumulation_steps"] == 16
        assert role["strategy_args"]["strategy_config"] == {
            "zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "bf16"}}  # fmt: skip
        assert role["model_args"]["dtype"] == "bf16" and role["model_args"]["disable_gradient_checkpointing"]
    assert (
        critic["training_args"]["learning_rate"] == 9e-6 and "learning_rate" not in actor["training_args"]
    )  # 1e-6 is ours
    assert (
        critic["model_args"]["model_name_or_path"] == "r/m" == tree["reward_model"]["model_args"]["model_name_or_path"]
    )
    assert (tree["adv_estimator"], tree["whiten_advantages"], tree["lambd"], tree["value_clip"]) == (
        "gae",
        True,
        1,
        0.5,
    )
    assert (tree["add_token_level_kl"], tree["init_kl_coef"], tree["kl_penalty"]) == (True, 0.01, "k1")
    assert (tree["target_kl"], tree["reward_clip"], tree["rollout_batch_size"]) == (0.1, 10.0, 1024)
    # A prompt may have what 512 new tokens leave of 1024.
    assert (tree["prompt_length"], tree["response_length"], tree["truncation"]) == (512, 512, "left")


IN_LOSS = "--algo.kl.use_loss --algo.kl.estimator k2 --rollout.n_samples_per_prompt 4"


@pytest.mark.parametrize(
    ("estimator", "more", "expected"),
    [
        ("reinforce", "--algo.advantage.gamma 0.9", {"adv_estimator": "reinforce", "whiten_advantages": True,
                                                     "gamma": 0.9}),
        ("flash_reinforce", "", {"adv_estimator": "reinforce", "reward_norm": "batch", "reward_shift": True,
                                 "reward_clip": 10.0}),
        ("reinforce_baseline", IN_LOSS, {"adv_estimator": "reinforce", "reward_norm": "group", "reward_shift": True,
                                         "whiten_advantages": True, "reward_clip": 10.0}),
        ("group_norm", IN_LOSS, {"adv_estimator": "grpo", "adv_estimator_args": {"eps": 1e-9}, "advantage_clip": 10.0}),
        ("dr_grpo", IN_LOSS, {"adv_estimator": "dr_grpo", "advantage_clip": 10.0}),
        ("rloo", IN_LOSS, {"adv_estimator": "rloo", "advantage_clip": 10.0}),
        # With the KL in the reward of each token the baseline leaves it out, as there.
        ("group_norm", "--rollout.n_samples_per_prompt 4", {"adv_estimator": "reinforce", "reward_norm": "group"}),
        ("dr_grpo", "--rollout.n_samples_per_prompt 4",
         {"adv_estimator": "reinforce", "reward_norm": "group", "reward_shift": True, "reward_clip": 10.0}),
        # r - mean of the other 3 = 4/3 (r - mean of 4).
        ("rloo", "--rollout.n_samples_per_prompt 4",
         {"adv_estimator": "reinforce", "reward_norm": "group", "reward_shift": True, "rewards.all.weight": 4 / 3}),
    ],
)  # fmt: skip
def test_advantage_estimators(tmp_path: Path, estimator: str, more: str, expected: dict[str, Any]):
    report, tree = ppo(tmp_path, f"--algo.advantage.estimator {estimator} {more} --data.apply_chat_template")
    assert {place: at(tree, place) for place in expected} == expected
    assert not report.missing and "critic" not in tree and not read_tree(tree, "").violations
    normed = {"reward_norm", "reward_shift", "whiten_advantages", "lambd", "value_clip"} - expected.keys()
    assert not normed & tree.keys()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"add_token_level_kl": True, "kl_penalty": "k1", "init_kl_coef": 0.01, "use_kl_loss": None}),
        ("--algo.kl.use_loss --algo.kl.estimator k3", {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.01,
                                                       "kl_loss_ratio": False, "add_token_level_kl": None}),
        ("--algo.kl.use_loss --algo.kl.unbiased_gradient", {"use_kl_loss": True, "kl_loss_type": "k1",
                                                            "kl_loss_ratio": True, "decoupled_ppo_cap": 10.0}),
        ("--algo.kl.init_coef 0 --algo.kl.use_loss",
         {"use_kl_loss": None, "add_token_level_kl": None, "reference": None}),
        # Its gradient is that of the log-prob: nothing here has it.
        ("--algo.kl.use_loss", {"use_kl_loss": True, "kl_loss_type": "???"}),
        ("--algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.target 0.1", {"target_kl": "???"}),
    ],
)  # fmt: skip
def test_the_kl_is_in_the_reward_or_in_the_loss(tmp_path: Path, flags: str, expected: dict[str, Any]):
    tree = ppo(tmp_path, flags)[1]
    assert {key: tree.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("token --algo.advantage.is_correction_mode clip",
         {"level": "token", "importance_upper": 5.0, "importance_lower": 0.5}),
        ("token --algo.advantage.is_correction_threshold 2",
         {"level": "token", "importance_upper": 2.0,
                                                              "rejection": "icepop", "ratio_low": None,
          "ratio_high": 2.0}),
        ("token --algo.advantage.is_correction_gating tv --algo.advantage.is_correction_threshold 0.2",
         {"level": "token", "importance_upper": 1e9, "rejection": "icepop", "difference_low": -0.2,
          "difference_high": 0.2}),
        ("seq", {"level": "???"}),
        ("off", None),
    ],
)  # fmt: skip
def test_corrections_between_engine_and_trainer(tmp_path: Path, flags: str, expected: dict[str, Any] | None):
    report, tree = ppo(tmp_path, f"--algo.advantage.is_correction_level {flags}")
    assert tree.get("train_infer_correction") == expected
    assert len(report.missing) == (flags == "seq")


def test_sampling_that_nothing_corrects_for_stays_uncorrected(tmp_path: Path):
    _, tree = ppo(tmp_path, "--rollout.top_p 0.9")
    assert tree["train_infer_correction"] == {"importance_upper": None, "ratio_high": 1e9}
    assert tree["actor_infer"]["generating_args"]["top_p"] == 0.9
    _, tree = ppo(tmp_path, "--train.async_enable --train.async_queue_size 2")
    assert (tree["async_generation_ratio"], tree["partial_rollout"]) == (2, "restart")
    assert tree["train_infer_correction"] == {"importance_upper": None, "ratio_high": 1e9}
    assert tree["actor_infer"]["device_mapping"] == "8-15" and not read_tree(tree, "").violations


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        ("--reward.remote_url reward.py", "rewards.all.name"),
        ("--reward.remote_url http://localhost:5000/get_reward", "rewards.all.name"),
        ("--train.agent_func_path agent.py", "rewards.all.rollout"),
        ("--data.max_samples 1000", "actor_train.data_args.file_name"),
        ("--data.prompt_probs 0.5,0.5", "actor_train.data_args.file_name"),
        ("--reward.clip_range 0 1", "reward_clip"),
        ("--reward.stop_properly_penalty_coef 0.5", "overlong_shaping"),
        ("--reward.normalize_enable", "reward_norm"),
        ("--train.enable_ema", "export_dir"),
        ("--ds.load_in_4bit", "actor_train.model_args.lora_rank"),
        ("--ds.param_dtype fp16", "actor_train.model_args.dtype"),
        ("--actor.optim muon", "actor_train.training_args.optimizer"),
        ("--actor.aux_loss_coef 0.01", "actor_train.strategy_args.strategy_name"),
        ("--actor.max_norm 0.5", "max_grad_norm"),
        ("--actor.lr_scheduler warmup_stable_decay", "actor_train.training_args.lr_scheduler_type"),
        ("--actor.policy_loss_type gspo", "policy_loss"),
        ("--actor.loss_agg_mode seq-mean-token-mean", "loss_agg_mode"),
        ("--algo.advantage.no_std_norm", "whiten_advantages"),
        ("--rollout.vllm_generate_batch_size 2048", "rollout_batch_size"),
        ("--critic.freezing_steps 3", "critic_warmup"),
        ("--train.batch_size 100 --train.micro_batch_size 3", "actor_train.training_args.gradient_accumulation_steps"),
    ],
)
def test_what_nothing_here_does_is_asked_for(tmp_path: Path, flags: str, place: str):
    report, tree = ppo(tmp_path, flags)
    assert at(tree, place) == "???", tree
    assert [line for line in report.missing if line.startswith(place)]
    assert any(place in ours for ours in asked(report).values()) or report.filled


def test_a_length_that_only_the_sum_bounds_is_asked_for(tmp_path: Path):
    report, tree = migrated(
        tmp_path, "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a/b --data.max_len 4096"
    )
    assert tree["response_length"] == "???" and asked(report)["data.max_len"] == ("response_length",)


def test_devices_are_shared_as_the_flags_say(tmp_path: Path):
    flags = (
        "--actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 --critic.num_gpus_per_node 2 "
        "--reward.num_gpus_per_node 2 --vllm.num_engines 2 --vllm.tensor_parallel_size 2 "
        "--train.colocate_critic_reward --ds.ring_attn_size 2"
    )
    text = f"python3 -m openrlhf.cli.train_ppo_ray {PPO.replace('--train.colocate_all', '')} {flags}"
    _, tree = migrated(tmp_path, text)
    slots = {
        role: tree[role]["device_mapping"]
        for role in ("actor_train", "reference", "critic", "reward_model", "actor_infer")
    }
    assert slots == {
        "actor_train": "0-3",
        "reference": "4-7",
        "critic": "8-9",
        "reward_model": "8-9",
        "actor_infer": "10-13",
    }
    assert (tree["num_nodes"], tree["num_gpus_per_node"]) == (2, 8)
    # 4 devices in rings of 2 are 2 data-parallel ranks: 128 / 2; the critic's 2 devices are 1.
    assert tree["actor_train"]["training_args"]["gradient_accumulation_steps"] == 64
    assert tree["critic"]["training_args"]["gradient_accumulation_steps"] == 128


def offline(tmp_path: Path, script: str, flags: str) -> tuple[MigrationReport, dict[str, Any]]:
    return migrated(tmp_path, f"torchrun --nproc_per_node=4 -m openrlhf.cli.{script} {OFFLINE} {flags}\n")


def test_fine_tuning_on_conversations(tmp_path: Path):
    report, tree = offline(tmp_path, "train_sft", "--data.input_key messages --data.multiturn --ds.lora.rank 32 "
                                     "--lr_scheduler linear --eval.dataset e.jsonl "
                                                  "--logger.wandb.run_name a/b")  # fmt: skip
    assert not report.missing and not read_tree(tree, "").violations
    assert (tree["train_on"], tree["num_train_epochs"], tree["sequence_length"], tree["exp_name"]) == (
        "all",
        2,
        2048,
        "a_b",
    )
    actor = tree["actor_train"]
    assert actor["data_args"] == {"file_name": ["d.jsonl"], "messages": "messages", "template": "native"}
    assert tree["validation"]["data_args"] == {"file_name": ["e.jsonl"], "messages": "messages", "template": "native"}
    assert {key: actor["model_args"][key] for key in ("lora_rank", "lora_alpha", "lora_target")} == {
        "lora_rank": 32, "lora_alpha": 16, "lora_target": "all-linear"}  # fmt: skip
    # min_lr_ratio is the cosine's alone; 128 rows / (8 a pass x 4 devices) = 4.
    assert actor["training_args"] == {"learning_rate": 5e-6, "adam_beta2": 0.95, "lr_scheduler_type": "linear",
        "warmup_ratio": 0.03, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}  # fmt: skip
    assert [use.key for use in report.of("quiet")] == ["eval.steps"] or "eval.steps" not in report.text()


def test_preferences(tmp_path: Path):
    report, tree = offline(
        tmp_path, "train_dpo", "--model.beta 0.2 --model.label_smoothing 0.1 --train.micro_batch_size 2"
    )
    assert not report.missing and not read_tree(tree, "").violations
    assert (tree["beta"], tree["label_smoothing"], tree["sequence_length"]) == (0.2, 0.1, 512)
    # 2 pairs a pass are 4 sequences: 128 / (2 x 4 devices) = 16 passes.
    args = tree["actor_train"]["training_args"]
    assert (args["per_device_train_batch_size"], args["gradient_accumulation_steps"], args["learning_rate"]) == (
        4,
        16,
        1e-5,
    )
    assert tree["reference"]["strategy_args"] == {"strategy_name": "deepspeed_infer"}
    for flags in ("--model.ipo_enable", "--model.nll_loss_coef 0.2"):
        assert offline(tmp_path, "train_dpo", flags)[1]["loss_type"] == "???"


def test_reward_models(tmp_path: Path):
    report, tree = offline(tmp_path, "train_rm", "--model.margin_loss_enable --lr_scheduler constant")
    assert not report.missing and not read_tree(tree, "").violations
    args = tree["actor_train"]["training_args"]
    # transformers' constant has no warm-up.
    assert "warmup_ratio" not in args and args["learning_rate"] == 9e-6
    assert tree["actor_train"]["data_args"]["margin"] == "margin" and "loss_type" not in tree
    # log(1 + exp(rejected - chosen)) is -log sigmoid(chosen - rejected), and its class reads no margin.
    tree = offline(tmp_path, "train_rm", "--model.loss_type logexp --model.margin_loss_enable")[1]
    assert (
        tree.get("loss_type", "bradley_terry") == "bradley_terry" and "margin" not in tree["actor_train"]["data_args"]
    )


# --- scripts as they are met -----------------------------------------------------------------------------------------


def test_a_second_reward_model_is_asked_for(tmp_path: Path):
    report, tree = ppo(tmp_path, "--reward.model_name_or_path r/one,r/two")
    assert at(tree, "reward_model.model_args.model_name_or_path") == "???"
    assert "reward.model_name_or_path" in asked(report) and at(tree, "critic.model_args.model_name_or_path") == "r/one"


def test_switches_of_earlier_releases_that_change_nothing_ask_for_nothing(tmp_path: Path):
    report, tree = ppo(tmp_path, "--flash_attn --bf16")
    assert not asked(report) and at(tree, "actor_train.model_args.attn_implementation") == "fa2"


def test_what_the_script_does_say_isnt_called_missing(tmp_path: Path):
    report, tree = ppo(tmp_path, "--reward.remote_url f.py --data.prompt_dataset json@/d")
    assert (at(tree, "rewards.all.name"), at(tree, "actor_train.data_args.file_name")) == ("???", "???")
    assert not [line for line in report.missing if "doesn't say" in line]
    report, _ = migrated(tmp_path, "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a/b\n")
    assert [line.partition(":")[0] for line in report.missing if "doesn't say" in line] == [
        "actor_train.data_args.file_name", "rewards.all.name"]  # fmt: skip


def test_validations_once_per_epoch_are_said(tmp_path: Path):
    report, tree = offline(tmp_path, "train_sft", "--eval.dataset e.jsonl --data.input_key messages")
    assert "eval_steps" not in tree and "once per epoch" in " ".join(report.decisions)


def test_pairs_of_plain_texts_with_the_prompt_in_them_ask_for_the_prompt(tmp_path: Path):
    plain = OFFLINE.replace("--data.apply_chat_template", "")
    for more, prompt in (("", "???"), ("--data.prompt_key q", "q")):
        text = f"deepspeed --module openrlhf.cli.train_dpo {plain} {more}\n"
        assert at(migrated(tmp_path, text)[1], "actor_train.data_args.prompt") == prompt


def test_a_critic_begins_there_with_the_head_of_its_reward_model(tmp_path: Path):
    report, _ = ppo(tmp_path, "")
    assert [line for line in report.decisions if "head" in line] == [
        "critic: the head for values starts at 0, in OpenRLHF as r/m has it, where it has one"]  # fmt: skip
    report, _ = ppo(tmp_path, "--critic.model_name_or_path a/b")
    assert "critic: the head for values starts at 0, in OpenRLHF at random" in report.decisions
