"""Files of TRL 1.16.0: what its trainers take by default, and keys that mean something else here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.configs.parsing.loader import read_tree
from roll.workbench.migrate.overrides import at
from roll.workbench.migrate.report import MigrationReport
from roll.workbench.migrate.translate import migrate

ROWS = "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\ndataset_name: rows.jsonl\n"
GRPO = f"{ROWS}num_generations: 8\nreward_funcs: [rewards.right]\n"
LAST = f"{ROWS}completion_only_loss: true\n"
ARGS, MODEL, DATA = (f"actor_train.{name}_args" for name in ("training", "model", "data"))


def trl(folder: Path, text: str) -> tuple[MigrationReport, dict[str, Any]]:
    (folder / "job.yaml").write_text(text, "utf-8")
    report, tree = migrate(folder / "job.yaml", "trl")
    assert tree is not None
    return report, tree


def asked(tree: Any, path: str = "") -> set[str]:
    """Places where the new file asks."""
    if isinstance(tree, dict):
        return {place for key, below in tree.items() for place in asked(below, f"{path}.{key}" if path else key)}
    return {path} if tree == "???" else set()


def check(tree: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare places of the new file; null is one that isn't written."""
    assert {place: at(tree, place) for place in expected} == expected


# Epochs, rates and lengths where the file leaves them out


@pytest.mark.parametrize(
    ("text", "pipeline", "rate", "epochs"),
    [
        (f"{ROWS}max_length: 2048\ncompletion_only_loss: true\n", "sft", 2e-5, 3),
        (f"{ROWS}max_length: 2048\ncenter_rewards_coefficient: 0.01\n", "reward_model", 1e-4, 3),
        (f"{ROWS}beta: 0.1\nloss_type: ipo\n", "dpo", None, 3),
        (f"{ROWS}undesirable_weight: 1.33\n", "dpo", None, 3),
        (GRPO, "rlvr", None, 3),
        (f"{ROWS}reward_clip_range: [-1, 1]\nreward_funcs: r.f\n", "rlvr", None, 3),
        (f"{ROWS}teacher_model_name_or_path: a/b\n", "distill", None, 3),
        (f"{LAST}learning_rate: 3.0e-5\nnum_train_epochs: 1\n", "sft", 3e-5, 1),
        # TRL: a positive max_steps overrides the epochs.
        (f"{LAST}max_steps: 7\nnum_train_epochs: 2\n", "sft", 2e-5, None),
    ],
)
def test_epochs_and_rates_are_those_of_the_trainer(text: str, pipeline: str, rate, epochs, tmp_path: Path):
    _, tree = trl(tmp_path, text)
    # null: 1e-6, the default here too
    check(tree, {"pipeline": pipeline, f"{ARGS}.learning_rate": rate, "num_train_epochs": epochs})
    assert not asked(tree)
    assert read_tree(tree, "").sound


def test_passes_that_arent_whole_are_asked_for(tmp_path: Path):
    _, tree = trl(tmp_path, f"{LAST}num_train_epochs: 0.5\n")
    assert asked(tree) == {"num_train_epochs"}


def test_responses_have_512_tokens_and_engines_a_third_of_the_memory(tmp_path: Path):
    _, tree = trl(tmp_path, f"{GRPO}use_vllm: true\n")
    check(tree, {"response_length": 512, "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": 0.3})


# Adapters


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", {"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target": ["q_proj", "v_proj"]}),
        ("lora_r: 8\nlora_alpha: 16\nlora_dropout: 0.1\nlora_target_modules: [k_proj]\n",
         {"lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.1, "lora_target": ["k_proj"]}),
        ("lora_target_modules: all-linear\n", {"lora_target": "all-linear"}),
        # rsLoRA: 32 / sqrt(16) = 8 = 128 / 16
        ("use_rslora: true\n", {"lora_rank": 16, "lora_alpha": 128}),
    ],
)  # fmt: skip
def test_adapters_are_pefts(keys: str, expected: dict[str, Any], tmp_path: Path):
    _, tree = trl(tmp_path, f"{LAST}use_peft: true\n{keys}")
    check(tree, {f"{MODEL}.{key}": value for key, value in expected.items()})
    assert not asked(tree)


def test_trainers_that_disable_dropout_disable_that_of_adapters(tmp_path: Path):
    _, tree = trl(tmp_path, f"{ROWS}use_peft: true\nundesirable_weight: 1.0\n")  # KTO: disable_dropout is true
    check(tree, {f"{MODEL}.lora_dropout": None, f"{MODEL}.lora_alpha": 32})
    _, tree = trl(tmp_path, f"{ROWS}use_peft: true\nundesirable_weight: 1.0\ndisable_dropout: false\n")
    check(tree, {f"{MODEL}.lora_dropout": 0.05})


def test_without_use_peft_there_are_no_adapters(tmp_path: Path):
    _, tree = trl(tmp_path, f"{LAST}lora_r: 8\n")
    assert not [key for key in tree["actor_train"]["model_args"] if key.startswith("lora")]


def test_layers_that_peft_chooses_by_family_are_asked_for_where_the_family_is_unknown(tmp_path: Path):
    _, tree = trl(tmp_path, "model_name_or_path: out/mine\ndataset_name: a.jsonl\ncompletion_only_loss: true\n"
                            "use_peft: true\n")  # fmt: skip
    assert asked(tree) == {f"{MODEL}.lora_target"}


# Which tokens are learnt


@pytest.mark.parametrize(
    ("keys", "train_on"),
    [
        ("assistant_only_loss: true", "all"), ("completion_only_loss: true", "last"),
        ("completion_only_loss: true\nassistant_only_loss: false", "last"),
        ("assistant_only_loss: false", "???"), ("completion_only_loss: false", "???"), ("max_length: 512", "???"),
        ("packing: false", "???"), ("dataset_text_field: body", "???"),
    ],
)  # fmt: skip
def test_all_tokens_are_never_learnt_so_the_file_asks(keys: str, train_on: str | None, tmp_path: Path):
    report, tree = trl(tmp_path, f"{ROWS}loss_type: nll\n{keys}\n")
    check(tree, {"pipeline": "sft", "train_on": train_on})
    assert any("train_on" in line for line in report.missing) is (train_on == "???")
    assert "messages" not in tree["actor_train"]["data_args"], "columns are those of the data"


def test_what_changes_the_training_of_rows_and_has_no_counterpart_is_asked_for(tmp_path: Path):
    asks = {
        "packing: true": f"{ARGS}.per_device_train_batch_size", "loss_type: dft": "exp_name",
        "eos_token: <|im_end|>": f"{DATA}.template", "chat_template_path: my.jinja": f"{DATA}.template",
        "truncation_mode: keep_end": "truncation", "neftune_noise_alpha: 5": f"{ARGS}.learning_rate",
        "label_smoothing_factor: 0.1": f"{ARGS}.learning_rate", "max_length: null": "sequence_length",
        "dataset_kwargs: {skip_prepare_dataset: true}": f"{DATA}.file_name", "model_revision: v2": "pretrain",
        "train_sampling_strategy: group_by_length": f"{DATA}.shuffle", "dataset_streaming: true": f"{DATA}.shuffle",
        "optim: adafactor": f"{ARGS}.optimizer", "lr_scheduler_type: greedy": f"{ARGS}.lr_scheduler_type",
        "save_strategy: epoch": "save_steps", "dataloader_drop_last: true": "num_train_epochs",
        "router_aux_loss_coef: 0.01": f"{ARGS}.learning_rate", "use_dora: true": f"{MODEL}.lora_target",
        "datasets: [{path: a/b, fraction: 0.5}]": f"{DATA}.file_name",
        "average_tokens_across_devices: false": f"{ARGS}.per_device_train_batch_size",
        "lora_modules_to_save: [embed_tokens]": f"{MODEL}.lora_target", "load_in_4bit: true": f"{MODEL}.dtype",
        "max_prompt_length: 64": "exp_name", "resume_from_checkpoint: out/checkpoint-5": "resume_from_checkpoint",
        "lora_target_parameters: [mlp.experts.down_proj]": f"{MODEL}.lora_target",
        "packing_strategy: wrapped": "actor_train.use_sequence_packing",
    }  # fmt: skip
    report, tree = trl(tmp_path, LAST + "\n".join(asks))
    assert "<|im_end|>" in report.text() and "(not shown)" not in report.text(), "tokens of texts are no secrets"
    assert {use.key: use.ours[-1] for use in report.of("absent")} == {key.split(":")[0]: asks[key] for key in asks}
    assert asked(tree) == set(asks.values())
    asks = {"optim: paged_adamw_8bit": f"{ARGS}.optimizer", "save_steps: 0.1": "save_steps"}
    assert asked(trl(tmp_path, LAST + "\n".join(asks))[1]) == set(asks.values())


def test_what_changes_no_number_is_dropped_with_its_reason(tmp_path: Path):
    report, tree = trl(tmp_path, LAST + "pad_token: <pad>\ntruncation_mode: keep_start\npadding_free: true\n"
                       "optim: adamw_torch\nlogging_steps: 0.1\neval_strategy: epoch\npad_to_multiple_of: 64\n"
                       "model_init_kwargs: {use_cache: false, device_map: auto}\nloss_type: nll\n")  # fmt: skip
    assert not asked(tree) and tree["actor_train"]["use_sequence_packing"]
    assert not any("sequence_length" in use.note for use in report.uses)


# Policies


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("loss_type: cispo\nepsilon_high: 5.0", {"policy_loss": "cispo", "cispo_epsilon_high": 4.0,
                                                 "pg_clip_high": None, "loss_agg_mode": "token-mean"}),
        # TRL: the largest weight is epsilon_high, else epsilon, 0.2; cispo here goes from 1 up.
        ("loss_type: cispo", {"policy_loss": "tis", "tis_upper_bound": 0.2}),
        ("loss_type: cispo\nepsilon: 0.1\nepsilon_high: 0.9", {"policy_loss": "tis", "tis_upper_bound": 0.9}),
        ("loss_type: sapo\nsapo_temperature_pos: 2.0\nsapo_temperature_neg: 3.0",
         {"policy_loss": "sapo", "sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0,
          "loss_agg_mode": "seq-mean-token-mean"}),
        ("loss_type: grpo\nepsilon: 0.1\nepsilon_high: 0.3",
         {"pg_clip": 0.1, "pg_clip_high": 0.3, "loss_agg_mode": "seq-mean-token-mean"}),
        ("loss_type: dr_grpo\nscale_rewards: false",
         {"loss_agg_mode": "seq-mean-token-sum-norm", "adv_estimator": "dr_grpo"}),
        ("loss_type: luspo\nimportance_sampling_level: sequence",
         {"loss_agg_mode": "seq-mean-token-sum", "policy_loss": "gspo"}),
        ("delta: 4.0", {"dual_clip_loss": True, "dual_clip_c": 4.0}),
        ("scale_rewards: batch", {"adv_estimator": "dr_grpo", "reward_norm": "batch", "reward_scale": True}),
        ("scale_rewards: group", {"adv_estimator_args": {"eps": 1e-4}}),
        # null is how the shell's `--scale_rewards none` is read
        ("scale_rewards: null", {"adv_estimator": "dr_grpo", "adv_estimator_args": None}),
        ("env: {OMP_NUM_THREADS: 4}\nshuffle_dataset: null",
         {"system_envs": {"OMP_NUM_THREADS": "4"}, "actor_train.data_args.shuffle": False}),
        ("multi_objective_aggregation: normalize_then_sum",
         {"adv_estimator": "gdpo", "adv_estimator_args": {"eps": 1e-4}}),
        ("entropy_coef: 0.01", {"entropy_loss_coef": 0.01}), ("off_policy_mask_threshold: 0.5",
                                                              {"policy_loss_args": {"sequence_mask": 0.5}}),
        ("beta: 0.04", {"use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_ratio": None}),
        ("beta: 0.04\nuse_bias_correction_kl: false", {"kl_loss_ratio": False}),
        ("mask_truncated_completions: true\nnum_iterations: 2\nshuffle_dataset: false",
         {"max_len_mask": True, "ppo_epochs": 2, "actor_train.data_args.shuffle": False}),
        ("chat_template_kwargs: {enable_thinking: false}", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("router_aux_loss_coef: 0\nlog_unique_prompts: true\ndata_seed: 7", {"seed": None}),
    ],
)  # fmt: skip
def test_policies_of_grpo(keys: str, expected: dict[str, Any], tmp_path: Path):
    report, tree = trl(tmp_path, f"{GRPO}{keys}\n")
    check(tree, expected)
    assert not asked(tree) and not report.of("absent")
    assert read_tree(tree, "").sound


def test_what_changes_a_policy_and_has_no_counterpart_is_asked_for(tmp_path: Path):
    top_p = "actor_infer.generating_args.top_p"
    asks = {
        "loss_type: sapo": "policy_loss", "importance_sampling_level: sequence": "policy_loss", "min_p: 0.1": top_p,
        "entropy_coef: 0.01": "entropy_loss_coef", "generation_kwargs: {min_tokens: 4}": top_p,
        "sync_ref_model: true": "reference.model_args.model_name_or_path",
        "cast_lm_head_to_fp32: true": f"{MODEL}.dtype",
        "use_bias_correction_kl: true": "kl_loss_ratio", "off_policy_mask_threshold: 0.1": "policy_loss",
        "max_tool_calling_iterations: 3": "tool_use.max_turns",
        "vllm_importance_sampling_clip_max: 0.5": "train_infer_correction.importance_upper",
    }  # fmt: skip
    report, tree = trl(tmp_path, f"{GRPO}beta: 0.1\nuse_vllm: true\n" + "\n".join(asks))
    assert asked(tree) == set(asks.values())
    assert {use.key.split(".")[0] for use in report.of("absent")} == {key.split(":")[0] for key in asks}
    asks = {"loss_type: vespo": "policy_loss", "use_adaptive_entropy: true": "entropy_loss_coef"}
    assert asked(trl(tmp_path, GRPO + "\n".join(asks))[1]) == set(asks.values())
    asks = {"delta: 1.1": "dual_clip_c", "top_entropy_quantile: 0.2": "policy_loss", "scale_rewards: std":
            "adv_estimator", "max_completion_length: null": "response_length"}  # fmt: skip
    assert asked(trl(tmp_path, GRPO + "\n".join(asks))[1]) == set(asks.values())
    assert asked(trl(tmp_path, f"{GRPO}importance_sampling_level: sequence_token\n")[1]) == {"policy_loss"}


def test_rloo_has_its_own_defaults(tmp_path: Path):
    report, tree = trl(tmp_path, f"{ROWS}reward_funcs: r.f\nnormalize_advantages: false\nreward_clip_range: [-1, 1]\n")
    # 8 completions per optimizer step, 2 per prompt; KL 0.05 in the reward, one loss for a response.
    check(tree, {
        "adv_estimator": "rloo", "num_return_sequences_in_group": 2, "rollout_batch_size": 4, "init_kl_coef": 0.05,
        "add_token_level_kl": True, "use_kl_loss": None, "reward_clip": 1, "loss_agg_mode": "seq-mean-token-sum",
        "reference.model_args.dtype": "bf16",
    })  # fmt: skip
    assert any("RLOOConfig" in line for line in report.decisions)
    assert not asked(tree) and read_tree(tree, "").sound


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ("normalize_advantages: true", "whiten_advantages"), ("reward_clip_range: [0, 1]", "reward_clip"),
        # Two optimizer steps for one generation: the second one's ratio isn't 1.
        ("normalize_advantages: false\nnum_iterations: 2", "policy_loss"),
        ("normalize_advantages: false\nsteps_per_generation: 2", "policy_loss"),
    ],
)  # fmt: skip
def test_what_rloo_alone_does_is_asked_for(keys: str, place: str, tmp_path: Path):
    _, tree = trl(tmp_path, f"{ROWS}reward_funcs: r.f\n{keys}\n")
    assert asked(tree) == {place} and tree["adv_estimator"] == "rloo"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", {"level": "sequence", "rejection": "icepop", "ratio_high": 3.0, "importance_upper": 3.0}),
        ("vllm_importance_sampling_mode: token_truncate\n", {"level": "token", "importance_upper": 3.0}),
        ("vllm_importance_sampling_mode: token_mask\nvllm_importance_sampling_clip_min: 0.5\n"
         "vllm_importance_sampling_clip_max: 2.0\n",
         {"level": "token", "rejection": "icepop", "ratio_low": 0.5, "ratio_high": 2.0, "importance_upper": 2.0}),
        ("vllm_importance_sampling_mode: sequence_truncate\nvllm_importance_sampling_clip_min: 0.5\n",
         {"level": "sequence", "importance_upper": 3.0, "importance_lower": 0.5}),
        ("vllm_importance_sampling_cap: 2.0\nvllm_importance_sampling_mode: token_truncate\n",
         {"level": "token", "importance_upper": 2.0}),
        # null is no bound, and not the default of 3.0
        ("vllm_importance_sampling_mode: token_truncate\nvllm_importance_sampling_clip_max: null\n",
         {"level": "token", "importance_upper": 1e9}),
        ("vllm_importance_sampling_correction: false\n", None),
    ],
)  # fmt: skip
def test_the_correction_for_vllm_is_on_by_default(keys: str, expected: dict[str, Any] | None, tmp_path: Path):
    _, tree = trl(tmp_path, f"{GRPO}use_vllm: true\n{keys}")
    assert tree.get("train_infer_correction") == expected
    assert not asked(tree) and read_tree(tree, "").sound
    _, tree = trl(tmp_path, f"{GRPO}{keys}")
    assert "train_infer_correction" not in tree


def test_steps_of_several_optimizer_steps_are_counted_in_steps(tmp_path: Path):
    # 8 per device, 32 completions per generation, trained on twice: 8 optimizer steps.
    _, tree = trl(tmp_path, f"{GRPO}steps_per_generation: 4\nnum_iterations: 2\nmax_steps: 80\nsave_steps: 16\n")
    check(tree, {"max_steps": 10, "save_steps": 2, "rollout_batch_size": 4, "num_train_epochs": None})


def test_a_batch_that_only_several_devices_fill_is_asked_for(tmp_path: Path):
    _, tree = trl(tmp_path, f"{GRPO}per_device_train_batch_size: 4\n")  # half a group of 8
    assert asked(tree) == {"rollout_batch_size"}
    _, tree = trl(tmp_path, f"{GRPO}per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n")
    assert not asked(tree) and tree["rollout_batch_size"] == 1


def test_means_that_differ_are_told(tmp_path: Path):
    report, _ = trl(tmp_path, f"{GRPO}steps_per_generation: 4\nuse_vllm: true\nbeta: 0.1\n")
    assert {line.split(":")[0] for line in report.decisions} >= {"use_bias_correction_kl", "loss_type dapo"}
    report, _ = trl(tmp_path, f"{GRPO}loss_type: grpo\nmask_truncated_completions: true\n")
    assert any(line.startswith("max_len_mask") for line in report.decisions)
    report, _ = trl(tmp_path, GRPO)
    assert not any(line.startswith(("max_len_mask", "use_bias", "loss_type")) for line in report.decisions)


def test_zero_is_no_clipping_and_no_limit_of_checkpoints(tmp_path: Path):
    _, tree = trl(tmp_path, f"{LAST}max_grad_norm: 0\nsave_total_limit: 0\nresume_from_checkpoint: false\n")
    assert tree["max_grad_norm"] is None and tree["checkpoint_config"]["max_to_keep"] is None
    assert not asked(tree) and read_tree(tree, "").sound


def test_a_reward_model_beside_functions_is_added(tmp_path: Path):
    _, tree = trl(tmp_path, f"{ROWS}num_generations: 4\nreward_model_name_or_path: a/rm\nreward_funcs: [r.f, r.g]\n"
                            "reward_weights: [0.5, 1.0, 2.0]\n")  # fmt: skip
    check(tree, {
        "reward_model.model_args.model_name_or_path": "a/rm", "rewards.all.reward_model_weight": 0.5,
        "rewards.all.rule_weight": 1.0, "rewards.all.parts.f.weight": 1.0, "rewards.all.parts.g.weight": 2.0,
    })  # fmt: skip


@pytest.mark.parametrize(("length", "expected"), [(512, None), (1280, {"buffer": "???"})])
def test_rewards_that_trl_knows_by_name(length: int, expected: Any, tmp_path: Path):
    # TRL builds get_soft_overlong_punishment for 1280 tokens, of which the last 256 cost something.
    names = "[accuracy_reward, think_format_reward, get_soft_overlong_punishment]"
    _, tree = trl(tmp_path, f"{ROWS}num_generations: 4\nmax_completion_length: {length}\nreward_funcs: {names}\n")
    parts = {name: part["name"] for name, part in tree["rewards"]["all"]["parts"].items()}
    assert parts == {name: f"trl.rewards:{name}" for name in ("accuracy_reward", "think_format_reward")}
    assert tree.get("overlong_shaping") == expected


def test_names_of_rewards_that_trl_hasnt_are_guessed_or_asked_for(tmp_path: Path):
    report, tree = trl(tmp_path, f"{ROWS}num_generations: 4\nreward_funcs: [format]\n")  # a reward here is called so
    assert tree["rewards"]["all"]["name"] == "rewards.py:format" and report.of("decided")
    _, tree = trl(tmp_path, f"{ROWS}num_generations: 4\nreward_funcs: [Qwen/RM-1B]\n")  # a model to TRL's trainer
    assert asked(tree) == {"rewards.all.name"}


# Preferences


def test_a_bound_of_completions_that_rows_dont_have_is_asked_for(tmp_path: Path):
    _, tree = trl(tmp_path, f"{ROWS}loss_type: ipo\nmax_completion_length: 256\n")  # DPOConfig of older releases
    assert asked(tree) == {"exp_name"}


@pytest.mark.parametrize(
    ("launcher", "devices"),
    [
        ("accelerate launch --num_processes 8", {"num_gpus_per_node": 8}),
        ("accelerate launch --config_file eight.yaml", {"num_gpus_per_node": 8}),
        ("accelerate launch --config_file eight.yaml --num_processes 2", {"num_gpus_per_node": 2}),
        ("accelerate launch --num_machines 2 --num_processes 8", {"num_gpus_per_node": 4, "num_nodes": 2}),
        ("torchrun --nnodes 2 --nproc_per_node 4", {"num_gpus_per_node": 4, "num_nodes": 2}),
        ("deepspeed --num_nodes 2 --num_gpus 4", {"num_gpus_per_node": 4, "num_nodes": 2}),
    ],
)
def test_a_launchers_processes_are_devices_and_their_batch(launcher: str, devices: dict[str, int], tmp_path: Path):
    # 1.16.0's GRPOConfig: per_device_train_batch_size * world_size * steps_per_generation completions a generation.
    (tmp_path / "eight.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 8\n")
    count = devices["num_gpus_per_node"] * devices.get("num_nodes", 1)
    for job, keys in (("grpo", "--gradient_accumulation_steps 2"), ("dpo", "--beta 0.1")):
        file = tmp_path / f"{job}.sh"
        file.write_text(f"{launcher} {job}.py --dataset_name a/b --model_name_or_path m --output_dir o {keys}\n")
        report, tree = migrate(file, "trl")
        assert {key: tree[key] for key in devices} == devices
        assert tree["actor_train"]["device_mapping"] == f"0-{count - 1}"
        assert any(f"for {count} devices" in line for line in report.decisions)
    (tmp_path / "grpo.sh").write_text(
        f"{launcher} grpo.py --dataset_name a/b --num_generations 8 --generation_batch_size 64 --max_steps 100\n"
    )
    _, tree = migrate(tmp_path / "grpo.sh", "trl")
    # 64 completions of all devices; an optimizer step has 8 on each, so a generation is 8 / count steps.
    assert (tree["rollout_batch_size"], tree["max_steps"]) == (8, max(1, round(100 * count / 8)))
    assert tree["actor_infer"]["device_mapping"] == f"0-{count - 1}"


def test_settings_of_a_launcher_that_arent_here_are_named(tmp_path: Path):
    (tmp_path / "job.sh").write_text("accelerate launch --config_file far.yaml dpo.py --dataset_name a/b --beta 0.1\n")
    report, _ = migrate(tmp_path / "job.sh", "trl")
    assert any("--config_file=far.yaml" in line for line in report.decisions)
    assert any("for one device" in line for line in report.decisions)


def test_kto_is_kto(tmp_path: Path):
    report, tree = trl(tmp_path, f"{ROWS}desirable_weight: 1.0\nundesirable_weight: 1.33\n")
    check(tree, {"pipeline": "dpo", "loss_type": "kto", "undesirable_weight": 1.33, "truncation": "right",
                 f"{ARGS}.per_device_train_batch_size": 8, "actor_train.data_args.shuffle": False})  # fmt: skip
    assert not any("pairs" in line for line in report.decisions)
    _, tree = trl(tmp_path, f"{ROWS}loss_type: apo_zero_unpaired\n")
    assert asked(tree) == {"loss_type"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("loss_type: [sigmoid]", "sigmoid"), ("loss_type: ipo", "ipo"), ("loss_type: [sigmoid, sft]", "???"),
        ("loss_type: [sigmoid]\nloss_weights: [0.5]", "???"), ("loss_type: apo_zero", "???"),
        ("label_smoothing: 0.1\nf_divergence_type: js_divergence", "???"), ("use_weighting: true", "???"),
        ("label_smoothing: 0.0\nld_alpha: 0.5", "???"), ("label_smoothing: 0.1", "sigmoid"),
    ],
)  # fmt: skip
def test_one_loss_of_preferences_is_what_there_is(keys: str, expected: str, tmp_path: Path):
    _, tree = trl(tmp_path, f"{ROWS}{keys}\n")
    check(tree, {"pipeline": "dpo", "loss_type": expected, f"{ARGS}.per_device_train_batch_size": 16,
                 "label_smoothing": None})  # fmt: skip


# Schedules, checkpoints, validations, types


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("warmup_steps: 0.1", {f"{ARGS}.warmup_ratio": 0.1, f"{ARGS}.warmup_steps": None}),
        ("warmup_steps: 10", {f"{ARGS}.warmup_steps": 10}), ("warmup_ratio: 0.2", {f"{ARGS}.warmup_ratio": 0.2}),
        ("save_steps: 100", {"save_steps": 100, "checkpoint_config": {"max_to_keep": None}}),
        ("save_strategy: 'no'", {"save_steps": None}), ("seed: 1", {"save_steps": 500, f"{MODEL}.dtype": "bf16"}),
        ("save_total_limit: 3", {"checkpoint_config": {"max_to_keep": 3}}),
        ("bf16: false", {f"{MODEL}.dtype": "fp32"}), ("fp16: true", {f"{MODEL}.dtype": "fp16"}),
        ("bf16: false\ndtype: bfloat16", {f"{MODEL}.dtype": "bf16"}),
        ("model_init_kwargs: {dtype: float32, attn_implementation: sdpa}",
         {f"{MODEL}.dtype": "bf16", f"{MODEL}.attn_implementation": "sdpa"}),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 2.0e-6}",
         {f"{ARGS}.lr_scheduler_type": "cosine", f"{ARGS}.min_lr_ratio": 0.1}),
        ("shuffle_dataset: false", {"actor_train.data_args.shuffle": None}),
        ("train_sampling_strategy: sequential", {"actor_train.data_args.shuffle": False}),
        ("deepspeed: null", {"actor_train.strategy_args": None}),
        ("eval_strategy: steps", {"eval_steps": None}), ("metric_for_best_model: null", {"save_best": None}),
    ],
)  # fmt: skip
def test_schedules_checkpoints_and_types_are_transformers(keys: str, expected: dict[str, Any], tmp_path: Path):
    _, tree = trl(tmp_path, f"{LAST}{keys}\n")
    check(tree, expected)
    assert not asked(tree) and read_tree(tree, "").sound


def test_a_split_of_the_hub_is_what_is_validated_on(tmp_path: Path):
    hub = LAST.replace("rows.jsonl", "trl-lib/Capybara")
    _, tree = trl(tmp_path, f"{hub}eval_strategy: steps\n")
    check(tree, {"validation.data_args.file_name": "trl-lib/Capybara#test", "eval_steps": 10})  # logging_steps
    _, tree = trl(tmp_path, f"{hub}eval_strategy: steps\neval_steps: 50\ndataset_test_split: dev\n"
                            "metric_for_best_model: eval_loss\n")  # fmt: skip
    check(tree, {"validation.data_args.file_name": "trl-lib/Capybara#dev", "eval_steps": 50, "save_best": "val/loss"})
    _, tree = trl(tmp_path, f"{hub}eval_steps: 50\n")
    check(tree, {"validation": None, "eval_steps": None})  # eval_strategy is no


def test_a_mixture_is_several_files(tmp_path: Path):
    _, tree = trl(tmp_path, "completion_only_loss: true\ndatasets: [{path: a/b, name: c, split: x}, {path: d/e}]\n")
    assert tree["actor_train"]["data_args"]["file_name"] == ["a/b/c#x", "d/e"]


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ("loss_type: grpo", "GRPOConfig"), ("loss_type: kto", "KTOConfig"), ("loss_type: [sigmoid]", "DPOConfig"),
        ("num_generations: 4", "GRPOConfig"), ("normalize_advantages: true", "RLOOConfig"),
        ("packing: true", "SFTConfig"),
        ("precompute_ref_log_probs: true", "DPOConfig"), ("center_rewards_coefficient: 0.01", "RewardConfig"),
        ("teacher_model_name_or_path: a/b", "DistillationConfig"), ("max_length: 8", "SFTConfig"),
        ("desirable_weight: 2.0\nmax_length: 8\nbeta: 0.2", "KTOConfig"), ("reward_funcs: a.b", "GRPOConfig"),
    ],
)  # fmt: skip
def test_a_file_is_for_the_trainer_whose_keys_it_has(keys: str, name: str, tmp_path: Path):
    report, _ = trl(tmp_path, f"{ROWS}{keys}\n")
    line = next(line for line in report.decisions if line.startswith("pipeline: "))
    assert f"TRL's {name}" in line
    assert ("keys fit" in line) is (keys in ("num_generations: 4", "max_length: 8", "precompute_ref_log_probs: true",
                                             "reward_funcs: a.b"))  # fmt: skip


@pytest.mark.parametrize("value", ["abc", [], {"a": {"b": 1}}, -1, 0.5, True, None, [[1]]])
def test_values_of_any_kind_end_in_a_report(value: Any, tmp_path: Path):
    keys = ("generation_batch_size steps_per_generation num_iterations reward_clip_range loss_type reward_funcs beta "
            "reward_weights chat_template_kwargs max_steps warmup_steps save_steps lora_alpha epsilon_high use_peft "
            "datasets dataset_name max_length num_train_epochs lr_scheduler_kwargs")  # fmt: skip
    given = dict.fromkeys(keys.split(), value)
    for more in ({"num_generations": 8, "use_vllm": True}, {"normalize_advantages": True}, {"packing": False},
                 {"desirable_weight": 1.0}, {"label_smoothing": 0.1, "loss_type": value}):  # fmt: skip
        report, _ = trl(tmp_path, yaml.safe_dump({**given, **more}))
        assert {use.key.split(".")[0] for use in report.uses} == given.keys() | more.keys()


# What a first step by TRL's own trainers has shown to differ (tests/evidence/test_evidence_migrate_trl.py)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{LAST}warmup_steps: 10\n", "of w warm-up steps the first step has 1 / (w + 1) of the peak here"),
        (f"{LAST}lr_scheduler_type: constant\nwarmup_steps: 10\n", "transformers' constant has no warm-up"),
        (f"{GRPO}scale_rewards: batch\n", "1e-06 beside it here, 1e-04 in TRL"),
        (f"{GRPO}use_vllm: true\nbeta: 0.04\n", "use_bias_correction_kl: the KL's factor is the ratio to the sampler"),
        (GRPO, "the last prompts of an epoch that don't fill a batch of 1 are left out in TRL"),
        (GRPO, "around prompts that are text"),
        (LAST, "behind the token that ends a response"),
        (f"{ROWS}center_rewards_coefficient: 0.01\n", "a response that is text ends with"),
    ],
)
def test_what_differs_in_numbers_is_said(text: str, words: str, tmp_path: Path) -> None:
    report, tree = trl(tmp_path, text)
    lines = [*(use.line() for use in report.uses), *report.decisions]
    assert any(words in line for line in lines), lines
    assert at(tree, f"{ARGS}.warmup_steps") == (10 if text == f"{LAST}warmup_steps: 10\n" else None)
