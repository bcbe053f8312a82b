"""`roll migrate` on files of Alibaba's ROLL: what ROLL takes where a file says nothing, and keys that mislead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.workbench.migrate.overrides import at
from roll.workbench.migrate.report import MigrationReport
from roll.workbench.migrate.table import systems
from roll.workbench.migrate.translate import migrate

BACKEND = {"strategy_args": {"strategy_name": "fsdp2_train"}, "device_mapping": "list(range(0,2))"}
RLVR: dict[str, Any] = {
    "pretrain": "some/Model", "response_length": 512, "num_gpus_per_node": 2,
    "actor_train": {**BACKEND, "data_args": {"file_name": ["a.jsonl"], "messages": "messages",
                    "domain_interleave_probs": {"maths": 1.0}}},
    "actor_infer": {"strategy_args": {"strategy_name": "vllm"}, "device_mapping": "list(range(0,2))",
                    "generating_args": {"temperature": 1.0, "top_p": 1.0, "top_k": -1}},
    "rewards": {"maths": {"worker_cls": "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"}},
}  # fmt: skip
SFT: dict[str, Any] = {"pretrain": "some/Model", "sequence_length": 64,
                       "sft_train": {**BACKEND, "data_args": {"file_name": "a.jsonl"}}}  # fmt: skip
DISTILL: dict[str, Any] = {
    "student_pretrain": "some/Small", "teacher_pretrain": "some/Large", "sequence_length": 64,
    "student": {**BACKEND, "data_args": {"file_name": ["a.jsonl"]}},
    "teacher": {"strategy_args": {"strategy_name": "fsdp2_infer"}, "device_mapping": "list(range(0,2))"},
}  # fmt: skip
DPO: dict[str, Any] = {"pretrain": "some/Model", "sequence_length": 64, "chosen_key": "chosen", "ipo": False,
                       "actor_train": {**BACKEND, "data_args": {"file_name": ["a.jsonl"]}}}  # fmt: skip
GAME: dict[str, Any] = {
    "pretrain": "some/Model", "sequence_length": 2048, "num_gpus_per_node": 2, "adv_estimator": "reinforce",
    "actor_train": BACKEND, "actor_infer": RLVR["actor_infer"],
    "custom_envs": {"Lake": {"env_type": "frozen_lake", "max_steps": 5, "env_config": {}}},
    "train_env_manager": {"tags": ["Lake"], "num_env_groups": 2, "group_size": 4, "num_groups_partition": [2]},
}  # fmt: skip


def with_keys(tree: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    for path, value in keys.items():
        word, _, rest = path.partition(".")
        tree = {**tree, word: with_keys(tree.get(word) or {}, {rest: value}) if rest else value}
    return tree


def migrated(tmp_path: Path, tree: dict[str, Any], **keys: Any) -> tuple[MigrationReport, dict[str, Any]]:
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(with_keys(tree, keys), sort_keys=False), "utf-8")
    report, ours = migrate(tmp_path / "old.yaml", "roll")
    assert ours is not None
    return report, ours


@pytest.mark.parametrize(
    ("tree", "place", "value"),
    [
        # of TrainingArguments: 5e-5, linear, 8 per device
        (RLVR, "actor_train.training_args.learning_rate", 5e-5),
        (RLVR, "actor_train.training_args.lr_scheduler_type", "linear"),
        (RLVR, "actor_train.training_args.per_device_train_batch_size", 8),
        (RLVR, "checkpoint_config.max_to_keep", None),
        (RLVR, "max_steps", 500),
        (RLVR, "adv_estimator", "gae"),
        (RLVR, "actor_train.data_args.filter_overlong_prompts", True),
        # SFTConfig has max_steps -1 and one epoch, its DataLoader shuffle=False
        (SFT, "max_steps", None),
        (SFT, "num_train_epochs", 1),
        (SFT, "actor_train.data_args.shuffle", False),
        (SFT, "actor_train.data_args.prompt", "instruction"),
        (SFT, "actor_train.data_args.response", "output"),
        (with_keys(SFT, {"max_steps": 70}), "max_steps", 70),
        # DistillConfig has max_grad_norm 0, which clips nothing; its pipeline passes over epochs
        (DISTILL, "max_grad_norm", None),
        (with_keys(DISTILL, {"max_steps": 500, "student.training_args.num_train_epochs": 3}), "num_train_epochs", 3),
        (with_keys(DISTILL, {"max_steps": 500}), "max_steps", None),
        (DISTILL, "actor_train.data_args.prompt", "question"),
        # the columns are the top level's, wherever they stand; each pipeline has its own names for them
        (with_keys(SFT, {"sft_train.data_args.prompt": "other"}), "actor_train.data_args.prompt", "instruction"),
        (
            {"prompt_key": "q", **with_keys(SFT, {"sft_train.data_args.prompt": "other"})},
            "actor_train.data_args.prompt",
            "q",
        ),
        (
            {"question_key": "q", **with_keys(DISTILL, {"student.data_args.prompt": "other"})},
            "actor_train.data_args.prompt",
            "q",
        ),
        ({"question_key": "q", "prompt_key": "p", **DISTILL}, "actor_train.data_args.prompt", "q"),
        ({"prompt_key": "p", "question_key": "q", **SFT}, "actor_train.data_args.prompt", "p"),
        (with_keys(DISTILL, {"kd_objective": "skewed_reverse_kl"}), "distill.divergence_args.skew", 0.1),
        # DPO ends after its epochs or its steps: 8 pairs per device are 16 sequences
        (DPO, "num_train_epochs", 1),
        (DPO, "max_steps", 500),
        (DPO, "actor_train.training_args.per_device_train_batch_size", 16),
    ],
)
def test_what_roll_takes_where_the_file_says_nothing_is_written(tree, place: str, value: Any, tmp_path: Path):
    _, ours = migrated(tmp_path, tree)
    assert at(ours, place, "nothing") == value


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # ROLL bounds by 1 + 2 pg_clip, whatever use_pg_clip_range says: 1.4 and 1.2
        ({"dual_clip_loss": True}, {"dual_clip_c": 1.4}),
        ({"dual_clip_loss": True, "pg_clip": 0.1}, {"dual_clip_c": 1.2}),
        # each end of a range that isn't given is 0.2, not pg_clip
        ({"use_pg_clip_range": True, "pg_clip": 0.1, "pg_clip_high": 0.28}, {"pg_clip_low": 0.2, "pg_clip_high": 0.28}),
        ({"pg_clip": 0.1, "pg_clip_high": 0.28}, {"pg_clip": 0.1, "pg_clip_high": "nothing"}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.01}, {"kl_loss_ratio": False, "kl_loss_coef": 0.01}),
        # rl_loss_coef multiplies the KL too: 0.01 x 0.5
        ({"use_kl_loss": True, "kl_loss_coef": 0.01, "rl_loss_coef": 0.5}, {"kl_loss_coef": 0.005}),
        # rank 8 and alpha twice the rank
        ({"actor_train.model_args.lora_target": "all-linear", "actor_train.model_args.lora_rank": "16"},
         {"actor_train.model_args.lora_rank": 16, "actor_train.model_args.lora_alpha": 32}),
        ({"actor_train.model_args.lora_target": "q_proj,v_proj"},
         {"actor_train.model_args.lora_rank": 8, "actor_train.model_args.lora_alpha": 16}),
        ({"actor_train.model_args.lora_target": "all", "actor_train.model_args.lora_rank": 32},
         {"actor_train.model_args.lora_rank": 32, "actor_train.model_args.lora_alpha": 64,
          "actor_train.model_args.lora_target": "all-linear"}),
        ({"actor_train.model_args.lora_rank": 8}, {"actor_train.model_args.lora_rank": "nothing"}),
        # sequence_length less prompt_length: 6656 - 2048
        ({"prompt_length": 2048, "sequence_length": 6656}, {"response_length": 4608}),
        ({"actor_infer.generating_args.max_new_tokens": 64},
         {"response_length": 512, "actor_infer.generating_args.max_new_tokens": "nothing"}),
        ({"async_generation_ratio": 1}, {"allow_uncorrected_async": True, "train_infer_correction": "nothing"}),
        ({"actor_train.pg_variant": "cispo", "cispo_epsilon_high": 5.0}, {"policy_loss": "nothing"}),
        ({"actor_train.pg_variant": "cispo", "cispo_epsilon_high": 5.0,
          "actor_train.worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"},
         {"policy_loss": "cispo", "cispo_epsilon_low": 0.1, "cispo_epsilon_high": 0.1}),
        ({"actor_train.pg_variant": "topr", "actor_train.topr_negative_weight": 0.5,
          "actor_train.worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"},
         {"policy_loss": "topr", "topr_level": "token", "topr_negative_weight": 0.5}),
        ({"rl_loss_coef": 0.0, "postive_loss_coef": 0.1, "use_topr_neg_loss_coef": 2.0},
         {"policy_loss": "topr", "topr_positive_weight": 0.1, "topr_negative_weight": 2.0, "sft_loss_coef": "nothing",
          "topr_level": "token"}),
        ({"rl_loss_coef": 0.0, "use_topr_neg_loss_coef": 2.0}, {"topr_positive_weight": 0.0}),
        ({"use_policy_loss_type": "PG", "use_reward_norm": True},
         {"policy_loss": "nothing", "use_reward_norm": "nothing"}),
        # filters of one level are met together: max(0.8, 0.9), min(1.5, 1.3)
        ({"train_infer_correction.filters": [
            {"enabled": True, "ratio_high": 1.5}, {"enabled": True, "ratio_low": 0.9, "ratio_high": 1.3}]},
         {"train_infer_correction.ratio_low": 0.9, "train_infer_correction.ratio_high": 1.3,
          "train_infer_correction.importance_upper": None}),
        ({"actor_train.training_args.seed": 3, "actor_train.training_args.max_grad_norm": 0.3,
          "actor_train.training_args.max_steps": 9}, {"seed": "nothing", "max_grad_norm": "nothing", "max_steps": 500}),
        ({"actor_train.data_args.messages": None, "actor_train.data_args.prompt": "prompt"},
         {"global_template": "plain"}),
        ({"validation.data_args.file_name": ["b.jsonl"], "validation.generating_args.num_beams": 1},
         {"validation.generating_args.temperature": 0.95, "validation.generating_args.top_k": 50}),
    ],
)  # fmt: skip
def test_a_policy_trains_as_in_roll(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path):
    report, ours = migrated(tmp_path, RLVR, **{"adv_estimator": "reinforce", "reference": BACKEND} | keys)
    assert {place: at(ours, place, "nothing") for place in expected} == expected
    assert not report.of("absent") and not report.missing


@pytest.mark.parametrize(
    ("tree", "keys", "place"),
    [
        (RLVR, {"postive_loss_coef": 0.1}, "topr_positive_weight"),
        (RLVR, {"norm_mean_type": "group", "norm_std_type": "batch"}, "reward_norm"),
        (RLVR, {"importance_sampling": "seq", "dual_clip_loss": True}, "dual_clip_loss"),
        (RLVR, {"critic_epochs": 2}, "ppo_epochs"),
        (RLVR, {"force_disable_old_logprobs_recompute": True}, "policy_loss"),
        (RLVR, {"actor_train.model_update_frequency": 4}, "exp_name"),
        (RLVR, {"actor_train.apply_loss_scale": False}, "loss_agg_mode"),
        (RLVR, {"actor_train.strategy_args": {"strategy_name": "megatron_train",
                "strategy_config": {"calculate_per_token_loss": True}}}, "exp_name"),
        (SFT, {"sft_train.strategy_args.strategy_config.mixed_precision": "no"}, "exp_name"),
        (RLVR, {"actor_train.logits_in_fp32": False}, "exp_name"),
        (RLVR, {"actor_train.model_args.additional_target": "embed_tokens"}, "actor_train.model_args.lora_target"),
        (RLVR, {"rewards.maths.reward_manager_config": [{"name": "a"}]}, "rewards.maths.parts"),
        (RLVR, {"rewards.maths.worker_cls": "a.b.CrossThinkQARuleRewardWorker",
                "rewards.maths.response_length_penalty_coef": 0.5}, "rewards.maths.reward_kwargs"),
        (RLVR, {"rewards.maths.worker_cls": "a.b.LLMJudgeRewardWorker", "rewards.maths.judge_prompt": "a-name"},
         "judge.prompt"),
        (RLVR, {"train_infer_correction.filters": [{"enabled": True}, {"enabled": True, "agg_type": "sequence"}]},
         "train_infer_correction.ratio_low"),
        (RLVR, {"dataset_filter": {"source": "aime", "num_samples": 0}},
         "actor_train.data_args.filter_overlong_prompts"),
        (DISTILL, {"distill_on_prompt": True}, "actor_train.data_args.prompt"),
        (DISTILL, {"kd_temperature": 2.0}, "distill.divergence"),
        (GAME, {"train_env_manager.llm_proxy.proxy_type": "openai"}, "actor_infer.model_args.model_name_or_path"),
        (GAME, {"custom_envs.Lake.env_config.fog": 3}, "custom_envs.Lake.env_config.fog"),
        (GAME, {"custom_envs.Lake.action_lookup": {"go": "Left"},
                "custom_envs.Lake.env_config.action_lookup": {1: "Jump"}}, "custom_envs.Lake.action_lookup"),
        (GAME, {"adv_estimator": "agentic_reinforce", "gamma": 0.9}, "adv_estimator"),
        (GAME, {"reward_normalization.norm_mean_type": "batch", "reward_normalization.norm_std_type": "group"},
         "reward_normalization.grouping"),
    ],
)  # fmt: skip
def test_what_changes_the_training_and_isnt_here_is_asked_for(tree, keys: dict[str, Any], place: str, tmp_path: Path):
    report, ours = migrated(tmp_path, tree, **keys)
    assert at(ours, place) == "???"
    assert any(line.startswith(f"{place}: ") for line in report.missing)


def test_a_default_that_is_written_out_asks_for_nothing(tmp_path: Path):
    given = {
        "critic_epochs": 1, "force_disable_old_logprobs_recompute": False, "actor_train.model_update_frequency": 1,
        "actor_train.apply_loss_scale": True, "actor_train.logits_in_fp32": True, "dataset_filter.num_samples": 0,
        "actor_train.model_args.autocast_adapter_dtype": True, "train_infer_correction.is_weight.detach": True,
        "user_defined_rollout_loop_cls":
            "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop",
    }  # fmt: skip
    report, _ = migrated(tmp_path, RLVR, **given)
    assert {use.key for use in report.of("dead")} >= given.keys()
    assert not report.of("absent")


def test_arguments_of_an_environment_of_ones_own_stay(tmp_path: Path):
    options = {"path": "a:B", "debug": False, "inner": {"size": 1}}
    _, ours = migrated(tmp_path, GAME, **{"custom_envs.Lake.env_type": "envs/own.py:Own",
                                          "custom_envs.Lake.env_config": options})  # fmt: skip
    assert ours["custom_envs"]["Lake"]["env_config"] == options


@pytest.mark.parametrize(
    "keys",
    [{"rewards": [1, 2]}, {"rewards": {"maths": "x"}}, {"actor_infer.strategy_args.strategy_config": "abc"},
     {"rl_loss_coef": "x", "use_topr_neg_loss_coef": 1.0},
     {"actor_train.training_args.per_device_train_batch_size": []}],
)  # fmt: skip
def test_a_value_of_another_kind_is_named(keys: dict[str, Any], tmp_path: Path):
    report, _ = migrated(tmp_path, RLVR, **keys)
    assert report.missing


def test_rows_that_distillation_leaves_out_are_said(tmp_path: Path):
    report, _ = migrated(tmp_path, DISTILL)
    assert any("column split" in line for line in report.decisions)


def test_sampling_that_differs_is_said(tmp_path: Path):
    report, ours = migrated(tmp_path, RLVR, **{"actor_infer.generating_args": {"num_beams": 1}})
    # GeneratingArguments: temperature 0.95, top_p 0.7, top_k 50; log-probs are of the logits themselves
    assert ours["actor_infer"]["generating_args"] == {"num_beams": 1, "temperature": 0.95}
    assert any(line.startswith("top_p 0.7, top_k 50: ") for line in report.decisions)
    assert any("logits / temperature (0.95)" in line for line in report.decisions)


def test_environments_are_compared_and_sampled_as_in_roll(tmp_path: Path):
    _, ours = migrated(tmp_path, GAME, **{
        "reward_normalization.grouping": "traj_group_id", "reward_normalization.norm_mean_type": "batch",
        "train_env_manager.group_filter_cls": "roll.pipeline.agentic.agentic_pipeline.GroupFilter",
        "train_env_manager.generating_args.temperature": 0.3, "max_len_mask": True,
        "custom_envs.Lake.env_config.size": 6, "custom_envs.Lake.env_config.is_slippery": True,
    })  # fmt: skip
    assert ours["reward_normalization"] == {"grouping": "batch", "method": "mean"}
    assert ours["custom_envs"]["Lake"]["env_config"] == {"size": 6, "slippery": True}
    assert ours["actor_infer"]["generating_args"].get("temperature", 1.0) == 1.0
    assert "max_len_mask" not in ours


@pytest.mark.parametrize(("switch", "rewards"), [("is_pure_opd", None), ("use_opd", 1.0), ("opsd_mode", None)])
def test_on_policy_distillation_is_a_pipeline(switch: str, rewards: float | None, tmp_path: Path):
    teacher = {
        "strategy_args": {"strategy_name": "fsdp2_infer"},
        "device_mapping": "list(range(0,2))",
        "opd_kl_coef": 0.5,
    }
    report, ours = migrated(tmp_path, RLVR, teacher=teacher, **{switch: True})
    assert (ours["pipeline"], at(ours, "distill.coef"), at(ours, "distill.reward_coef")) == ("distill", 0.5, rewards)
    assert ours.get("adv_estimator", "reinforce") == ("reinforce" if rewards is None else "gae")  # what ROLL sets
    assert ({use.key for use in report.of("absent")} == {"opsd_mode"}) is (switch == "opsd_mode")


def test_a_shared_model_that_grades_is_the_judge(tmp_path: Path):
    model = {"model_args": {"model_name_or_path": "some/Judge"}, "strategy_args": {"strategy_name": "vllm"},
             "device_mapping": "list(range(0,2))"}  # fmt: skip
    _, ours = migrated(tmp_path, RLVR, reward_model=model, **{"rewards.maths.worker_cls": "a.LLMJudgeRewardWorker"})
    assert ours["judge"]["model_args"]["model_name_or_path"] == "some/Judge"
    assert ours["rewards"]["maths"]["name"] == "judge" and "reward_model" not in ours


def test_the_rows_name_the_commit_that_they_were_checked_with():
    assert systems()["roll"].release == "0a6a47e5"
