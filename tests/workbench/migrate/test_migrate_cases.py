"""`roll migrate` on configurations in ROLL's and verl's style: no key is lost, what comes out passes the check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import migrate_cases as cases
import pytest
import yaml

from roll.configs.parsing.loader import read_config, read_tree
from roll.workbench.migrate import finish
from roll.workbench.migrate.report import MigrationReport, as_yaml
from roll.workbench.migrate.translate import migrate


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Keys of a file that have no keys below them; written apart from the code that is tested."""
    for key, value in tree.items():
        below = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value:
            yield from leaves(value, below)
        else:
            yield below


def assert_each_key_is_in_one_list(report: MigrationReport, keys: list[str]) -> None:
    reported = Counter(use.key for use in report.uses)
    for key in keys:
        owners = [name for name in reported.elements() if key == name or key.startswith(f"{name}.")]
        assert len(owners) == 1, f"{key} is in {len(owners)} lists"


def assert_passes_or_says_why(report: MigrationReport, tree: dict[str, Any]) -> None:
    """What is written is read back as `roll check` reads it; only files, models and the machine aren't looked at."""
    text = as_yaml(report, tree)
    reading = read_tree(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    assert bool(reading.violations) == bool(report.missing), [str(violation) for violation in reading.violations]


def share_handled(report: MigrationReport) -> float:
    counts = report.counts()
    return (counts["translated"] + counts["dead"]) / len(report.uses)


ASKED_OF_ROLL = {"rewards.graded.judge_prompt", "norm_mean_type", "norm_std_type",
                 "reward_normalization.norm_mean_type", "reward_normalization.norm_std_type",
                 "custom_envs.Room.env_config.format_penalty", "dual_clip_loss"}  # fmt: skip
"""What the cases have that nothing here does."""


@pytest.mark.parametrize("name", cases.ROLL)
def test_a_job_of_roll_is_translated(name: str, tmp_path: Path):
    tree = cases.roll_tree(name)
    old = tmp_path / "old.yaml"
    old.write_text(yaml.safe_dump(tree, sort_keys=False), "utf-8")
    report, ours = migrate(old)
    assert_each_key_is_in_one_list(report, list(leaves(tree)))
    asked = {use.key for use in report.of("absent")}
    assert asked <= ASKED_OF_ROLL and not report.of("unexpanded")
    assert bool(report.missing) == bool(asked)
    assert_passes_or_says_why(report, ours)
    assert share_handled(report) >= 0.9


@pytest.mark.parametrize("name", cases.VERL)
def test_a_script_of_verl_is_translated(name: str, tmp_path: Path):
    lists = cases.VERL[name]
    old = tmp_path / "run.sh"
    old.write_text(cases.script(*lists), "utf-8")
    report, ours = migrate(old)
    assert report.system == "verl"
    assert_each_key_is_in_one_list(report, [key.lstrip("+") for key in cases.overrides(*lists)])
    asked = {"algorithm.adv_estimator"} if name == "passk" else set()  # another estimator than pass_at_k
    assert {use.key for use in report.of("absent")} == asked
    assert bool(report.missing) is bool(asked)
    assert_passes_or_says_why(report, ours)
    assert share_handled(report) >= 0.9


@pytest.mark.parametrize("name", cases.SFT)
def test_fine_tuning_with_verl_is_translated(name: str, tmp_path: Path):
    old = tmp_path / "sft.sh"
    old.write_text(cases.script(cases.VERL_SFT, cases.SFT[name], module="verl.trainer.fsdp_sft_trainer"), "utf-8")
    report, ours = migrate(old)
    assert (report.pipeline, report.missing) == ("sft", [])
    assert_each_key_is_in_one_list(
        report, [key.lstrip("+") for key in cases.overrides(cases.VERL_SFT, cases.SFT[name])]
    )
    assert_passes_or_says_why(report, ours)
    assert share_handled(report) >= 0.9


def test_there_are_as_many_cases_as_promised():
    assert len(cases.ROLL) + len(cases.VERL) + len(cases.SFT) >= 60


def test_a_file_that_was_written_is_composed_as_any_other(tmp_path: Path):
    old, new = tmp_path / "run.sh", tmp_path / "new.yaml"
    old.write_text(cases.script(cases.VERL_PPO), "utf-8")
    report, tree = migrate(old)
    new.write_text(as_yaml(report, tree), "utf-8")
    assert not read_config(new, ["rollout_batch_size=512"]).violations


def test_merged_yaml_an_override_list_and_a_script_say_the_same(tmp_path: Path):
    words = cases.overrides(cases.VERL_GRPO)
    tree: dict[str, Any] = {}
    for key, value in words.items():
        node = tree
        *sections, last = key.split(".")
        for word in sections:
            node = node.setdefault(word, {})
        node[last] = yaml.safe_load(value)
    files = {
        "merged.yaml": yaml.safe_dump(tree),
        "list.txt": "\n".join(f"{key}={value}" for key, value in words.items()),
        "run.sh": cases.script(cases.VERL_GRPO),
    }
    results = []
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
        results.append(migrate(tmp_path / name)[1])
    assert results[0] == results[1] == results[2]


# --- numbers by hand -------------------------------------------------------------------------------------------------


def verl(tmp_path: Path, *lists: str) -> tuple[MigrationReport, dict[str, Any]]:
    (tmp_path / "run.sh").write_text(cases.script(*lists), "utf-8")
    report, tree = migrate(tmp_path / "run.sh")
    assert tree is not None
    return report, tree


def roll(tmp_path: Path, name: str, **changes: Any) -> tuple[MigrationReport, dict[str, Any]]:
    tree = cases.roll_tree(name) | changes
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), "utf-8")
    report, ours = migrate(tmp_path / "old.yaml")
    assert ours is not None
    return report, ours


def test_a_mini_batch_in_prompts_becomes_passes_of_responses(tmp_path: Path):
    # 128 prompts x 4 responses = 512; 8 devices / ulysses 2 = 4 data-parallel ranks; 8 per device: 512 / (8 x 4) = 16.
    _, tree = verl(
        tmp_path, cases.VERL_GRPO,
        f"{cases.R}.n=4 {cases.A}.ppo_mini_batch_size=128 {cases.A}.ppo_micro_batch_size_per_gpu=8 "
        f"{cases.A}.ulysses_sequence_parallel_size=2",
    )  # fmt: skip
    args = tree["actor_train"]["training_args"]
    assert (args["per_device_train_batch_size"], args["gradient_accumulation_steps"]) == (8, 16)


def test_a_micro_batch_of_all_devices_is_divided_by_them(tmp_path: Path):
    # 64 of all 8 devices are 8 per device.
    _, tree = verl(
        tmp_path, cases.VERL_PPO, f"{cases.A}.ppo_micro_batch_size=64 {cases.A}.ppo_micro_batch_size_per_gpu=null"
    )
    assert tree["actor_train"]["training_args"]["per_device_train_batch_size"] == 8


def test_the_pairs_of_a_batch_are_sequences(tmp_path: Path):
    # ROLL's batch is 8 pairs per device x 2 accumulation x 8 ranks, and 8 pairs are 16 sequences.
    report, tree = roll(tmp_path, "dpo")
    args = tree["actor_train"]["training_args"]
    assert (args["per_device_train_batch_size"], args["gradient_accumulation_steps"]) == (16, 2)
    assert [use.key for use in report.of("quiet")] == ["train_batch_size"]


def test_a_learning_rates_floor_is_a_share_of_its_peak(tmp_path: Path):
    _, tree = verl(tmp_path, cases.VERL_GRPO, f"{cases.A}.optim.min_lr=1e-7")
    assert tree["actor_train"]["training_args"]["min_lr_ratio"] == pytest.approx(0.1)


def test_defaults_of_verl_that_differ_are_written_out(tmp_path: Path):
    report, tree = verl(tmp_path, cases.VERL_PPO)
    assert tree["critic"]["training_args"]["weight_decay"] == 0.01
    assert tree["num_return_sequences_in_group"] == 1
    assert tree["validation"]["generating_args"]["temperature"] == 0
    assert "critic.optim.weight_decay" in {use.key for use in report.filled}


@pytest.mark.parametrize(("sleeps", "level"), [(True, None), (False, 0)])
def test_an_engine_that_sleeps_takes_the_level_that_fits_the_weight_sync(tmp_path: Path, sleeps: bool, level: Any):
    # Level 1 would copy weights to the host that the next sync overwrites.
    _, tree = verl(tmp_path, cases.VERL_GRPO, f"{cases.R}.name=vllm {cases.R}.free_cache_engine={sleeps}")
    (tmp_path / "trl.yaml").write_text(
        f"model_name_or_path: some/Model\ndataset_name: data.jsonl\nreward_funcs: rewards.accuracy\nuse_vllm: true\n"
        f"num_generations: 8\nvllm_enable_sleep_mode: {sleeps}\n", "utf-8",
    )  # fmt: skip
    _, of_trl = migrate(tmp_path / "trl.yaml")
    assert of_trl is not None
    for job in (tree, of_trl):
        assert job["actor_infer"]["strategy_args"]["strategy_config"]["sleep_level"] == level


def test_what_the_report_says_it_decided(tmp_path: Path):
    report, tree = roll(tmp_path, "rlvr")
    decided = {use.key: use.note for use in report.of("decided")}
    assert "off in training" in decided["actor_infer.generating_args.top_p"]
    assert "off in training" in decided["actor_infer.generating_args.top_k"]
    assert not {"top_p", "top_k"} & tree["actor_infer"]["generating_args"].keys()
    assert "native" in decided["actor_train.data_args.template"]
    assert "no backward pass" in decided["actor_infer.model_args.disable_gradient_checkpointing"]
    assert "attention of its own" in decided["actor_train.model_args.flash_attn"]  # fa2 on Megatron
    assert any(line.startswith("num_nodes: 2") for line in report.decisions)  # slots 0-15, 8 per machine
    report, tree = roll(tmp_path, "agentic")
    decided = {use.key: use.note for use in report.of("decided")}
    assert "fsdp2_infer" in decided["reference.strategy_args.strategy_name"]
    report, tree = roll(tmp_path, "rlvr_lora")
    assert tree["actor_train"]["model_args"]["lora_target"] == ["o_proj", "q_proj", "k_proj", "v_proj"]
    assert (
        "text where a list is meant"
        in {use.key: use.note for use in report.of("decided")}["actor_train.model_args.lora_target"]
    )


def test_top_p_stays_where_a_correction_knows_it(tmp_path: Path):
    _, tree = roll(tmp_path, "rlvr_correction")
    assert tree["actor_infer"]["generating_args"]["top_p"] == 0.99
    assert tree["train_infer_correction"]["importance_upper"] == 1.2
    assert tree["train_infer_correction"]["ratio_high"] == 1.2


def test_a_reference_to_a_preset_is_one_key_of_the_file(tmp_path: Path):
    report, tree = roll(tmp_path, "agentic")
    uses = {use.key: use for use in report.uses}
    assert uses["actor_train.strategy_args.strategy_config"].value == "${deepspeed_zero3}"
    assert tree["actor_train"]["strategy_args"]["strategy_config"]["zero_optimization"]["stage"] == 3
    assert tree["custom_envs"]["FrozenLake"]["max_tokens_per_step"] == 96  # set anew by the job
    assert uses["max_tokens_per_step"].fate == "translated"


def test_an_own_presets_file_wins_over_the_one_that_comes_with_the_package(tmp_path: Path):
    folder = tmp_path / "job"
    (tmp_path / "config").mkdir()
    folder.mkdir()
    (tmp_path / "config" / "deepspeed_zero3.yaml").write_text(
        "deepspeed_zero3: {zero_optimization: {stage: 3, sub_group_size: 5}}\n", "utf-8"
    )
    (folder / "old.yaml").write_text(yaml.safe_dump(cases.roll_tree("agentic"), sort_keys=False), "utf-8")
    _, tree = migrate(folder / "old.yaml")
    config = tree["actor_train"]["strategy_args"]["strategy_config"]
    assert config == {"zero_optimization": {"stage": 3, "sub_group_size": 5}}


def test_unknown_keys_are_named(tmp_path: Path):
    report, _ = roll(tmp_path, "rlvr", frobnicate=3, actor_train_2={"x": {"y": 1}})
    absent = {use.key: use.note for use in report.of("absent") if use.key not in ASKED_OF_ROLL}
    assert absent == dict.fromkeys(("frobnicate", "actor_train_2.x.y"), "nothing is known about this key")


def test_merged_yaml_of_verl_is_translated():
    file = cases.CASES / "verl_merged.yaml"
    report, tree = migrate(file)
    assert (report.system, report.missing, report.of("absent"), report.of("unexpanded")) == ("verl", [], [], [])
    assert_each_key_is_in_one_list(report, list(leaves(yaml.safe_load(file.read_text("utf-8")))))
    assert_passes_or_says_why(report, tree)
    assert share_handled(report) >= 0.9
    # 128 prompts x 5 responses = 640 = 8 per device x 10 accumulation x 8 devices
    assert tree["actor_train"]["training_args"]["gradient_accumulation_steps"] == 10
    assert not {"critic", "reward_model"} & tree.keys()


def test_the_megatron_trainer_makes_a_job_of_megatron(tmp_path: Path):
    text = cases.script(cases.VERL_GRPO).replace("main_ppo", "main_ppo --config-name=ppo_megatron_trainer.yaml")
    (tmp_path / "run.sh").write_text(text, "utf-8")
    report, tree = migrate(tmp_path / "run.sh")
    assert tree["actor_train"]["strategy_args"]["strategy_name"] == "megatron_train"
    assert tree["reference"]["strategy_args"]["strategy_name"] == "megatron_infer"
    assert not report.missing


def test_keys_and_passwords_are_never_shown(tmp_path: Path):
    report, tree = roll(
        tmp_path, "rlvr", track_with="wandb", tracker_kwargs={"api_key": "s3cr3t", "project": "x"},
        system_envs={"WANDB_API_KEY": "0ther", "HF_TOKEN": "th1rd", "MAX_TOKENS": "5", "AWS_SECRET_ACCESS_KEY": "f0ur"},
        theirs={"access_key": "f1fth"}, store="s3://me:s1xth@host/a",
    )  # fmt: skip
    said = report.text() + report.json()
    assert not any(secret in said for secret in ("s3cr3t", "0ther", "th1rd", "f0ur", "f1fth", "s1xth"))
    assert "MAX_TOKENS" in said
    assert "s3cr3t" not in as_yaml(report, tree)


def test_files_of_trl_are_translated(tmp_path: Path):
    old = tmp_path / "grpo.yaml"
    old.write_text(
        "model_name_or_path: some/Model\nlearning_rate: 1e-6\nnum_generations: 8\nmax_prompt_length: 256\n"
        "max_completion_length: 512\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 4\nbeta: 0.04\n"
        "epsilon: 0.2\nbf16: true\ngradient_checkpointing: true\nuse_vllm: true\nvllm_mode: colocate\n"
        "loss_type: dr_grpo\n"
        "scale_rewards: false\nreport_to: [wandb]\nnum_train_epochs: 1\ndataset_name: data.jsonl\n"
        "reward_funcs: rewards.accuracy\nlogging_steps: 5\n",
        "utf-8",
    )
    report, tree = migrate(old)
    assert (report.system, report.pipeline, report.missing) == ("TRL", "rlvr", [])
    assert tree["rollout_batch_size"] == 4  # 8 per device x 4 passes = 32 completions = 4 prompts x 8
    assert (tree["adv_estimator"], tree["kl_loss_coef"], tree["use_kl_loss"]) == ("dr_grpo", 0.04, True)
    assert tree["rewards"]["all"]["name"] == "rewards:accuracy"
    assert_passes_or_says_why(report, tree)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (
            "python3 -m verl.trainer.main_generation data.path=/d/test.parquet data.n_samples=4 data.prompt_key=prompt "
            "data.output_path=out.parquet model.path=some/Model rollout.temperature=0.6 rollout.response_length=2048 "
            "rollout.top_p=0.95",
            "roll eval generate /d/test.parquet --samples 4 -o out.parquet --model some/Model --temperature 0.6 "
            "--max_new_tokens 2048 actor_infer.generating_args.top_p=0.95",
        ),
        (
            "python3 -m verl.trainer.main_eval data.path=out.parquet data.response_key=responses "
            "custom_reward_function.path=mine.py custom_reward_function.name=score",
            "roll eval score out.parquet --response responses --reward mine.py:score",
        ),
    ],
    ids=["generation", "evaluation"],
)
def test_jobs_that_are_commands_here_become_them(text: str, command: str, tmp_path: Path):
    (tmp_path / "job.sh").write_text(text, "utf-8")
    report, tree = migrate(tmp_path / "job.sh")
    assert (report.command, tree) == (command, None)
    assert len(report.uses) == text.count("=")


def test_several_rewards_of_trl_are_a_weighted_sum(tmp_path: Path):
    text = "num_generations: 4\nbf16: true\nreward_funcs: [right, mod.form]\nreward_weights: [1.0, 0.5]\n"
    (tmp_path / "grpo.yaml").write_text(text, "utf-8")
    report, tree = migrate(tmp_path / "grpo.yaml", "trl")
    assert tree is not None
    assert tree["rewards"]["all"]["parts"] == {
        "right": {"name": "rewards.py:right", "weight": 1.0},
        "form": {"name": "mod:form", "weight": 0.5},
    }
    assert tree["rewards"]["all"]["name"] == "weighted" and tree["actor_infer"]["model_args"]["dtype"] == "bf16"
    fates = {use.key: (use.fate, use.ours) for use in report.uses}
    assert fates["reward_weights"] == ("translated", ("rewards.all.parts",))
    (tmp_path / "one.yaml").write_text(text.replace("[right, mod.form]", "[right]"), "utf-8")
    report, tree = migrate(tmp_path / "one.yaml", "trl")
    assert tree["rewards"]["all"]["parts"] == "???" and "reward_weights" in {use.key for use in report.of("absent")}


def test_a_data_set_of_the_hub_keeps_its_configuration_and_split(tmp_path: Path):
    text = "num_generations: 4\ndataset_name: openai/gsm8k\ndataset_config: main\ndataset_train_split: test\n"
    (tmp_path / "grpo.yaml").write_text(text, "utf-8")
    report, tree = migrate(tmp_path / "grpo.yaml", "trl")
    assert tree["actor_train"]["data_args"]["file_name"] == "openai/gsm8k/main#test"
    assert {"dataset_config", "dataset_train_split"} <= {use.key for use in report.of("translated")}
    (tmp_path / "grpo.yaml").write_text(text.replace("openai/gsm8k", "rows/a.jsonl"), "utf-8")
    report, tree = migrate(tmp_path / "grpo.yaml", "trl")
    assert tree["actor_train"]["data_args"]["file_name"] == "rows/a.jsonl"
    assert {"dataset_config", "dataset_train_split"} <= {use.key for use in report.of("dead")}


def test_the_soft_penalty_of_verls_dapo_recipe_is_overlong_shaping(tmp_path: Path):
    key = "reward_model.overlong_buffer"
    report, tree = verl(
        tmp_path, cases.VERL_GRPO, f"+{key}.enable=True +{key}.len=512 +{key}.penalty_factor=0.5 +{key}.log=True"
    )
    assert tree["overlong_shaping"] == {"buffer": 512, "penalty": 0.5}
    assert not report.of("absent")


@pytest.mark.parametrize(
    ("options", "expected", "absent"),
    [
        ("{num_decay_steps: 20, min_lr_ratio: 0.1, decay_type: 1-sqrt}",
         {"num_decay_steps": 20, "min_lr_ratio": 0.1, "wsd_decay_style": "1-sqrt"}, []),
        # 2e-6 is a fifth of the peak.
        ("{num_decay_steps: 20, min_lr: 2.0e-6, num_cycles: 0.5}",
         {"num_decay_steps": 20, "min_lr_ratio": 0.2, "num_cycles": 0.5}, []),
        ("{num_decay_steps: 20, num_stable_steps: 5, warmup_type: cosine}", {"num_decay_steps": 20},
         ["num_stable_steps", "warmup_type"]),
    ],
)  # fmt: skip
def test_the_options_of_a_schedule_of_trl_are_translated_or_counted(options, expected, absent, tmp_path: Path):
    (tmp_path / "job.yaml").write_text(
        "model_name_or_path: a/b\nmax_length: 8\nlearning_rate: 1.0e-5\nlr_scheduler_type: warmup_stable_decay\n"
        f"lr_scheduler_kwargs: {options}\n",
        "utf-8",
    )
    report, tree = migrate(tmp_path / "job.yaml", "trl")
    args = tree["actor_train"]["training_args"]
    assert args.pop("lr_scheduler_type") == ("???" if absent else "warmup_stable_decay")
    assert {key: round(args[key], 9) if isinstance(args[key], float) else args[key] for key in expected} == expected
    assert not {"min_lr_ratio", "num_cycles"} & (args.keys() - expected.keys())
    assert [use.key.rpartition(".")[2] for use in report.of("absent")] == absent


def test_a_preference_file_of_trl_has_its_own_notes_and_a_reference_in_the_same_type(tmp_path: Path):
    (tmp_path / "dpo.yaml").write_text(
        "model_name_or_path: some/Model\nbeta: 0.1\nloss_type: [sigmoid]\ntruncation_mode: keep_end\nbf16: true\n",
        "utf-8",
    )
    report, tree = migrate(tmp_path / "dpo.yaml", "trl")
    assert (tree["pipeline"], tree["beta"], tree["loss_type"]) == ("dpo", 0.1, "sigmoid")
    assert tree["reference"] == {"model_args": {"dtype": "bf16"}}
    assert {use.note for use in report.uses if use.key in ("beta", "loss_type")} == {""}


@pytest.mark.parametrize(
    ("job", "keys", "expected"),
    [
        ("max_length: 8\n", "metric_for_best_model: eval_loss\n", "val/loss"),
        ("max_length: 8\n", "load_best_model_at_end: true\n", "val/loss"),
        ("max_length: 8\n", "metric_for_best_model: mean_token_accuracy\n", "val/token_accuracy"),
        ("max_length: 8\n", "metric_for_best_model: loss\ngreater_is_better: true\n", "max:val/loss"),
        ("max_length: 8\nbeta: 0.1\n", "metric_for_best_model: eval_rewards/accuracies\n", "val/accuracy"),
        ("num_generations: 4\n", "metric_for_best_model: eval_reward\n", "val/all/reward"),
        ("num_generations: 4\n", "metric_for_best_model: eval_loss\n", None),
        ("max_length: 8\n", "metric_for_best_model: bleu\n", None),
    ],
)
def test_the_best_model_of_trl_is_the_best_checkpoint(job, keys, expected, tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(f"model_name_or_path: a/b\neval_steps: 5\n{job}{keys}", "utf-8")
    settle, written = finish._validation, []
    monkeypatch.setattr(finish, "_validation", lambda draft: (written.append(draft.get("save_best")), settle(draft)))
    report, tree = migrate(tmp_path / "job.yaml", "trl")
    assert written == [expected]
    # eval_strategy is off by default, so there is nothing to validate on; what has no counterpart is asked for.
    assert tree.get("save_best") == ("???" if expected is None else None)
    assert bool(report.of("absent")) is (expected is None)
