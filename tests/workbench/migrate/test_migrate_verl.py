"""`roll migrate` on jobs of verl 0.9.1: what is trained is what verl would have trained, or the new file asks.

What verl does is read in its 0.9.1 (core_algos, rollout_corr_helper, the trainers, the agent loop).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.configs.parsing.loader import read_tree
from roll.workbench.migrate.overrides import at
from roll.workbench.migrate.report import MigrationReport
from roll.workbench.migrate.translate import migrate

A, R, M, C = (
    "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model", "algorithm.rollout_correction",
)  # fmt: skip
BASE = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
    f"{M}.path=some/Model {R}.name=vllm {R}.n=8 trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.logger=console "
    f"{A}.ppo_micro_batch_size_per_gpu=4 "
)
SFT = "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=some/Model "


def job(tmp_path: Path, words: str, base: str = BASE) -> tuple[MigrationReport, dict[str, Any]]:
    """Migrate a launch script; what it writes is sound unless the report says what is missing."""
    (tmp_path / "run.sh").write_text(base + words, "utf-8")
    report, tree = migrate(tmp_path / "run.sh")
    assert tree is not None
    violations = read_tree(yaml.safe_load(yaml.safe_dump(tree))).violations
    assert bool(violations) == bool(report.missing), [str(violation) for violation in violations]
    return report, tree


def values(tree: dict[str, Any], *places: str) -> list[Any]:
    return [at(tree, place) for place in places]


def fates(report: MigrationReport) -> dict[str, str]:
    return {use.key: use.fate for use in report.uses}


def asked(report: MigrationReport) -> set[str]:
    return {use.key.rpartition(".")[2] for use in report.of("absent")}


# --- losses ----------------------------------------------------------------------------------------------------------

LOSSES = {
    # cispo is bounded by clip_ratio_low and clip_ratio_high, 0.2 each
    f"{A}.policy_loss.loss_mode=cispo {A}.clip_ratio_low=0.1 {A}.clip_ratio_high=0.2":
        {"policy_loss": "cispo", "cispo_epsilon_low": 0.1, "cispo_epsilon_high": 0.2, "pg_clip_low": None},
    f"{A}.policy_loss.loss_mode=cispo {A}.clip_ratio_low=10":
        {"cispo_epsilon_low": 10, "cispo_epsilon_high": 0.2, "pg_clip_low": None},
    f"{A}.policy_loss.loss_mode=kl_cov":
        {"policy_loss": "kl_cov", "policy_loss_args": {"kl_coef": 0.1}},
    f"{A}.policy_loss.loss_mode=clip-cov {A}.clip_ratio_high=0.3":
        {"policy_loss": "clip_cov", "pg_clip_high": 0.3, "dual_clip_loss": None},
    f"{A}.policy_loss.loss_mode=geo_mean {A}.clip_ratio_low=0.3":
        {"policy_loss": "gmpo", "policy_loss_args": {"clip_low": 0.3, "clip_high": 0.2}, "pg_clip_low": None,
         "loss_agg_mode": "seq-mean-token-mean"},
    f"{A}.policy_loss.loss_mode=sapo {A}.tau_neg=1.1":
        {"policy_loss": "sapo", "sapo_tau_negative": 1.1, "loss_agg_mode": "seq-mean-token-mean"},
    f"{A}.policy_loss.loss_mode=gpg {A}.clip_ratio=0.3": {"policy_loss": "reinforce", "pg_clip": None},
    f"{A}.policy_loss.loss_mode=dppo_tv":
        {"policy_loss": "dppo", "policy_loss_args": {"divergence": "tv", "threshold": 0.2}},
    f"{A}.policy_loss.loss_mode=dppo_kl {A}.clip_ratio_low=0.05 {A}.clip_ratio_high=0.05":
        {"policy_loss_args": {"divergence": "kl", "threshold": 0.05}, "dual_clip_c": None},
    # -A logp + beta / 2 (log-ratio)^2 of each token
    f"{A}.policy_loss.loss_mode=dro {A}.policy_loss.dro_beta=0.05":
        {"policy_loss": "kimi15", "kimi15_level": "token", "kimi15_tau": 0.05},
    f"{A}.policy_loss.loss_mode=gspo {A}.clip_ratio_low=3e-4 {A}.clip_ratio_high=4e-4 "
    f"{A}.loss_agg_mode=seq-mean-token-mean":
        {"policy_loss": "gspo", "pg_clip_low": 3e-4, "pg_clip_high": 4e-4, "dual_clip_loss": None,
         "loss_agg_mode": "seq-mean-token-mean"},
    # vanilla has the dual clip; clip_ratio alone does nothing, for its two sides are 0.2 by default
    f"{A}.clip_ratio=0.3": {"policy_loss": None, "pg_clip": None, "pg_clip_low": None, "dual_clip_loss": True},
    f"{A}.clip_ratio=0.3 {A}.clip_ratio_low=null {A}.clip_ratio_high=null": {"pg_clip_low": 0.3, "pg_clip_high": 0.3},
    f"{A}.clip_ratio_c=10 {A}.clip_ratio_high=0.28": {"dual_clip_c": 10, "pg_clip_high": 0.28},
    f"{A}.loss_agg_mode=token-sum {A}.entropy_coeff=0.01": {"loss_agg_mode": "token-sum", "entropy_loss_coef": 0.01},
    f"{A}.loss_agg_mode=seq-mean-token-sum-norm {A}.loss_scale_factor=512":
        {"loss_agg_mode": "seq-mean-token-sum-norm", "response_length": 512},
}  # fmt: skip


@pytest.mark.parametrize("words", LOSSES)
def test_a_loss_of_verl_keeps_its_own_numbers(words: str, tmp_path: Path):
    report, tree = job(tmp_path, words)
    assert values(tree, *LOSSES[words]) == list(LOSSES[words].values())
    assert not report.missing and not report.of("absent")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (f"{A}.policy_loss.loss_mode=mine", {"loss_mode"}),
        (f"{A}.policy_loss.loss_mode=dro", {"loss_mode"}),
        (f"{A}.use_rollout_log_probs=True", {"use_rollout_log_probs"}),
        (f"{A}.policy_loss.loss_mode=dppo_tv {A}.clip_ratio_low=0.1", {"clip_ratio_low"}),
        (f"{A}.loss_agg_mode=seq-mean-token-sum-norm {A}.loss_scale_factor=1024", {"loss_scale_factor"}),
        (f"{A}.qat.enable=true", {"enable"}),
        (f"{A}.optim.optimizer_impl=torchao.optim {A}.optim.optimizer=_AdamW", {"optimizer_impl", "optimizer"}),
        (f"{A}.optim.lr_scheduler_type=tanh", {"lr_scheduler_type"}),
        # Adam decays in its gradient, AdamW doesn't; Adamax is neither
        (f"{A}.optim.optimizer=Adam", {"optimizer"}),
        (f"{A}.optim.optimizer=Adamax", {"optimizer"}),
        (f"{A}.optim.zero_indexed_step=False", {"zero_indexed_step"}),
        ("algorithm.adv_estimator=grpo_passk", {"adv_estimator"}),
        ("algorithm.adv_estimator=mine", {"adv_estimator"}),
        ("algorithm.adv_estimator=gdpo +algorithm.gdpo_reward_keys=[a,b]", {"gdpo_reward_keys"}),
        ("data.train_max_samples=100", {"train_max_samples"}),
        ("data.custom_cls.path=mine.py data.custom_cls.name=Rows", {"path", "name"}),
        (f"{M}.exclude_modules=[q_proj]", {"exclude_modules"}),
        (f"{R}.quantization_config_file=q.json", {"quantization_config_file"}),
        ("trainer.v1.trainer_mode=separate_async", {"trainer_mode"}),
        (f"{R}.multi_turn.enable=True {R}.multi_turn.max_assistant_turns=4", {"enable", "max_assistant_turns"}),
    ],
)
def test_what_changes_the_training_and_has_no_counterpart_is_asked_for(words: str, keys: set[str], tmp_path: Path):
    report, _ = job(tmp_path, words)
    assert asked(report) == keys
    assert report.missing


def test_what_verl_says_by_default_asks_for_nothing(tmp_path: Path):
    report, _ = job(
        tmp_path,
        f"{A}.qat.enable=false data.train_max_samples=-1 trainer.v1.trainer_mode=sync {R}.multi_turn.format=hermes "
        f"{A}.optim.optimizer_impl=torch.optim algorithm.filter_groups.enable=False {A}.policy_loss.dro_beta=null",
    )
    assert not report.missing and not report.of("absent")


def test_the_kl_in_the_loss_isnt_weighed_by_the_ratio_to_the_sampler(tmp_path: Path):
    report, tree = job(tmp_path, f"{A}.use_kl_loss=True {A}.kl_loss_type=k3+")
    assert values(tree, "use_kl_loss", "kl_loss_ratio", "kl_loss_type") == [True, False, "k3+"]
    assert not report.missing
    report, tree = job(tmp_path, f"{A}.use_kl_loss=True {A}.kl_loss_type=kl")
    assert fates(report)[f"{A}.kl_loss_type"] == "decided"
    assert "kl_loss_ratio" not in job(tmp_path, f"{A}.use_kl_loss=False")[1]


# --- correction between sampler and trainer --------------------------------------------------------------------------

T = "train_infer_correction"
CORRECTIONS = {
    "rollout_is=token": {"level": "token", "importance_upper": 2.0},
    "rollout_is=sequence rollout_is_threshold=5.0 rollout_is_batch_normalize=true":
        {"level": "sequence", "importance_upper": 5.0, "importance_mean_one": True},
    "rollout_is=token rollout_is_threshold=0.5_5.0":
        {"level": "token", "importance_upper": 5.0, "rejection": "icepop", "ratio_low": 0.5, "ratio_high": 5.0},
    # k1 is -log ratio: 0.25 to 2 of it is a ratio from 1 / 2 to 1 / 0.25
    "rollout_rs=token_k1 rollout_rs_threshold=0.25_2.0":
        {"level": "token", "importance_upper": None, "ratio_low": 0.5, "ratio_high": 4.0},
    "rollout_rs=token_k1 rollout_rs_threshold=0.5_2.0": {"level": "token", "ratio_low": 0.5, "ratio_high": 2.0},
    "rollout_is=sequence rollout_rs=seq_sum_k1 rollout_rs_threshold=4":
        {"level": "sequence", "importance_upper": 2.0, "ratio_low": 0.25, "ratio_high": 4.0},
    "rollout_rs=seq_mean_k1 rollout_rs_threshold=0.5_2.0": {"level": "geometric", "ratio_low": 0.5, "ratio_high": 2.0},
    "rollout_rs=seq_mean_k3 rollout_rs_threshold=0.01":
        {"level": "geometric", "importance_upper": None, "divergence": "k3", "divergence_high": 0.01,
         "ratio_high": None},
    "rollout_is=token rollout_rs=token_k2 rollout_rs_threshold=0.5": {"divergence": "k2", "divergence_high": 0.5},
    "rollout_is=sequence rollout_rs=seq_max_k3 rollout_rs_threshold=0.3":
        {"level": "sequence", "divergence": "k3", "row_divergence_high": 0.3, "divergence_high": None},
    "rollout_is=token 'rollout_rs=token_k1,seq_max_k2' 'rollout_rs_threshold=\"0.5_2.0,0.4\"'":
        {"level": "token", "ratio_low": 0.5, "ratio_high": 2.0, "divergence": "k2", "row_divergence_high": 0.4},
    # before 0.8
    "rollout_rs=geometric rollout_rs_threshold=1.01 rollout_rs_threshold_lower=0.99":
        {"level": "geometric", "ratio_low": 0.99, "ratio_high": 1.01},
    "rollout_rs_threshold=0.5 rollout_is=null loss_type=reinforce": {"level": None, "ratio_high": None},
}  # fmt: skip


def corrected(words: str) -> str:
    return " ".join(word[0] + f"+{C}.{word[1:]}" if word[0] == "'" else f"+{C}.{word}" for word in words.split(" "))


@pytest.mark.parametrize("words", CORRECTIONS)
def test_a_correction_of_verl_is_one_section(words: str, tmp_path: Path):
    report, tree = job(tmp_path, corrected(words))
    expected = CORRECTIONS[words]
    assert values(tree, *(f"{T}.{key}" for key in expected)) == list(expected.values())
    assert not report.missing and not report.of("absent")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        # one level for weights and filters; the sum isn't the mean
        ("rollout_is=sequence rollout_rs=seq_mean_k3 rollout_rs_threshold=0.01", {"rollout_rs"}),
        ("rollout_rs=token_k9 rollout_rs_threshold=0.01", {"rollout_rs"}),
        ("rollout_rs=token_k1", {"rollout_rs"}),
        ("rollout_rs=token_k1 rollout_rs_threshold=2.0_4.0", {"rollout_rs"}),
        ("bypass_mode=true", {"bypass_mode"}),
        ("bypass_mode=true rollout_is=token", {"bypass_mode"}),
        ("rollout_is=token rollout_token_veto_threshold=1e-4", {"rollout_token_veto_threshold"}),
    ],
)
def test_a_correction_that_isnt_here_is_asked_for(words: str, keys: set[str], tmp_path: Path):
    report, tree = job(tmp_path, corrected(words))
    assert asked(report) == keys
    assert report.missing
    assert at(tree, f"{T}.ratio_high") is None
    if "seq_mean" in words:
        assert values(tree, f"{T}.level", f"{T}.divergence_high", f"{T}.importance_upper") == ["???", 0.01, 2.0]


def test_reinforce_around_the_sampler_is_reinforce_with_weights(tmp_path: Path):
    report, tree = job(tmp_path, corrected("bypass_mode=true loss_type=reinforce rollout_is=sequence"))
    assert values(tree, "policy_loss", f"{T}.level", f"{T}.importance_upper") == ["reinforce", "sequence", 2.0]
    assert fates(report)[f"{C}.bypass_mode"] == "decided"
    assert "dual_clip_loss" not in tree


# --- advantages, batches, schedules ----------------------------------------------------------------------------------


def test_gae_whitens_its_advantages_and_the_critic_has_its_own_numbers(tmp_path: Path):
    _, tree = job(tmp_path, "algorithm.adv_estimator=gae critic.ppo_micro_batch_size_per_gpu=4 critic.model.path=a/b")
    assert values(
        tree,
        "whiten_advantages",
        "lambd",
        "value_clip",
        "critic.training_args.learning_rate",
        "critic.model_args.dtype",
    ) == [True, 1.0, 0.5, 1e-5, "bf16"]
    assert "whiten_advantages" not in job(tmp_path, "")[1]


def test_the_actor_joins_in_the_step_that_verl_says(tmp_path: Path):
    # verl counts from 1: with critic_warmup 10 steps 1 to 9 train the critic alone.
    _, tree = job(
        tmp_path, "algorithm.adv_estimator=gae critic.ppo_micro_batch_size_per_gpu=4 trainer.critic_warmup=10"
    )
    assert tree["critic_warmup"] == 9


def test_steps_of_a_schedule_are_optimizer_steps(tmp_path: Path):
    # 1024 prompts / 256 = 4 mini-batches, twice: 8 optimizer steps of each of the 10 steps of warm-up.
    report, tree = job(tmp_path, f"{A}.optim.lr_warmup_steps=10 {A}.ppo_epochs=2 {A}.optim.lr_scheduler_type=cosine")
    args = tree["actor_train"]["training_args"]
    assert (args["warmup_steps"], args["lr_scheduler_type"]) == (80, "cosine")
    # 256 prompts x 8 responses = 2048 = 4 per device x 64 passes x 8 ranks
    assert args["gradient_accumulation_steps"] == 64
    assert any("8 optimizer steps" in line for line in report.decisions)


def test_the_bound_of_the_gradient_is_the_one_that_is_read(tmp_path: Path):
    report, tree = job(tmp_path, f"{A}.grad_clip=0.5")
    assert (at(tree, "max_grad_norm"), fates(report)[f"{A}.grad_clip"]) == (None, "decided")
    assert job(tmp_path, f"{A}.optim.clip_grad=0.5")[1]["max_grad_norm"] == 0.5


def test_what_a_critic_has_alone_is_asked_for_where_there_is_one(tmp_path: Path):
    words = "critic.ppo_epochs=3 critic.optim.clip_grad=0.5"
    assert not job(tmp_path, words)[0].of("absent")
    report, _ = job(tmp_path, f"{words} algorithm.adv_estimator=gae critic.ppo_micro_batch_size_per_gpu=4")
    assert asked(report) == {"ppo_epochs", "clip_grad"}


def test_validation_is_sampled_at_its_temperature(tmp_path: Path):
    # verl's agent loop reads temperature, top_p and top_k, never do_sample.
    words = f"data.val_files=b.parquet {R}.val_kwargs.temperature=0.6 {R}.val_kwargs.n=4 {R}.val_kwargs.do_sample=False"
    report, tree = job(tmp_path, words)
    assert tree["validation"]["generating_args"] == {"temperature": 0.6, "num_return_sequences": 4}
    assert fates(report)[f"{R}.val_kwargs.do_sample"] == "dead"
    _, tree = job(tmp_path, "data.val_files=b.parquet")
    assert tree["validation"]["generating_args"]["temperature"] == 0


def test_adapters_on_all_layers_say_what_they_are_in_mixtures_of_experts(tmp_path: Path):
    report, tree = job(tmp_path, f"{M}.lora_rank=32 {M}.target_modules=all-linear")
    note = next(use.note for use in report.of("decided") if use.key == f"{M}.target_modules")
    assert "router" in note and tree["actor_train"]["model_args"]["lora_target"] == "all-linear"
    _, tree = job(tmp_path, f"{M}.lora_rank=32 {M}.target_modules=[q_proj]")
    assert values(tree["actor_train"]["model_args"], "lora_rank", "lora_target") == [32, ["q_proj"]]


def test_a_teacher_of_verl_joins_the_run(tmp_path: Path):
    loss = "distillation.distillation_loss"
    words = f"distillation.enabled=True distillation.teacher_models.teacher_model.model_path=a/b {loss}.loss_mode="
    report, tree = job(tmp_path, f"{words}forward_kl_topk {loss}.topk=64 {loss}.use_task_rewards=False")
    assert tree["distill"] == {"use_as": "loss", "divergence": "forward_kl", "top_k": 64, "reward_coef": 0.0}
    assert tree["teacher"]["model_args"]["model_name_or_path"] == "a/b"
    report, tree = job(tmp_path, f"{words}k1 {loss}.use_policy_gradient=True {loss}.distillation_loss_coef=0.5")
    assert tree["distill"] == {"use_as": "advantage", "coef": 0.5, "reward_coef": 1.0}
    report, _ = job(tmp_path, f"{words}k3")
    assert asked(report) == {"enabled"}
    assert not {"teacher", "distill"} & job(tmp_path, f"{loss}.loss_mode=k1")[1].keys()


# --- prompts and rewards ---------------------------------------------------------------------------------------------


def test_a_switch_of_the_chat_template_stays_off(tmp_path: Path):
    words = "+data.apply_chat_template_kwargs.enable_thinking=False +data.apply_chat_template_kwargs.effort=low"
    _, tree = job(tmp_path, words)
    assert tree["chat_template_kwargs"] == {"enable_thinking": False, "effort": "low"}
    _, tree = job(tmp_path, '"+data.apply_chat_template_kwargs={enable_thinking: false}"')
    assert tree["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("section", ["reward.custom_reward_function", "custom_reward_function"])
def test_a_reward_function_is_the_rewards_in_both_of_verls_places(section: str, tmp_path: Path):
    words = f"{section}.path=mine/score.py {section}.name=score +{section}.reward_kwargs.scale=2"
    report, tree = job(tmp_path, words)
    assert values(tree["rewards"]["all"], "name", "reward_kwargs") == ["mine/score.py:score", {"scale": 2}]
    _, tree = job(tmp_path, f"{section}.path=mine/score.py")
    assert tree["rewards"]["all"]["name"] == "mine/score.py:compute_score"
    _, tree = job(tmp_path, f"{section}.path=file://mine/score.py {section}.name=f")
    assert tree["rewards"]["all"]["name"] == "mine/score.py:f"
    _, tree = job(tmp_path, f"{section}.path=pkg://mine/score {section}.name=f")
    assert tree["rewards"]["all"]["name"] == "mine.score:f"
    report, tree = job(tmp_path, f"{section}.path=$(pwd)/score.py {section}.name=score")
    assert tree["rewards"]["all"]["name"] == "???" and report.missing


REWARDS = {
    "reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True "
    "+reward.reward_kwargs.overlong_buffer_cfg.len=128 +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 "
    "+reward.reward_kwargs.max_resp_len=512": {"overlong_shaping": {"buffer": 128, "penalty": 0.5}},
    # only dapo's manager reads it
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=128":
        {"overlong_shaping": None},
    "reward.reward_model.enable=True reward.reward_model.model_path=a/RM reward.reward_model.rollout.name=vllm":
        {"rewards.all.name": "reward_model", "reward_model.model_args.model_name_or_path": "a/RM"},
    "reward_model.enable=True reward_model.model.path=a/RM":
        {"rewards.all.name": "reward_model", "reward_model.model_args.model_name_or_path": "a/RM"},
    "reward_model.reward_manager=prime reward.num_workers=4":
        {"rewards.all.name": "math_rule", "rewards.all.world_size": 4},
    "reward.sandbox_fusion.url=null sandbox_fusion.max_concurrent=32": {"rewards.all.name": "math_rule"},
}  # fmt: skip


@pytest.mark.parametrize("words", REWARDS)
def test_rewards_of_verl_are_a_domain(words: str, tmp_path: Path):
    report, tree = job(tmp_path, words)
    assert values(tree, *REWARDS[words]) == list(REWARDS[words].values())
    assert not report.missing and not report.of("absent")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("reward.reward_manager.source=importlib reward.reward_manager.name=Mine "
         "reward.reward_manager.module.path=m.py", {"source", "name"}),
        ("reward_model.reward_manager=mine", {"reward_manager"}),
        ("reward.sandbox_fusion.url=http://host/run_code", {"url"}),
        ("reward.reward_model.enable=True reward.reward_model.model_path=a/b reward.custom_reward_function.path=f.py",
         {"enable"}),
        ("reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True "
         "+reward.reward_kwargs.overlong_buffer_cfg.len=128 +reward.reward_kwargs.max_resp_len=256", {"max_resp_len"}),
        ("+reward.reward_kwargs.made_up=1", {"made_up"}),
    ],
)  # fmt: skip
def test_a_reward_that_would_be_lost_is_asked_for(words: str, keys: set[str], tmp_path: Path):
    report, _ = job(tmp_path, words)
    assert asked(report) == keys
    assert report.missing


# --- whole configurations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["verl", "verl_sft"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_file_with_every_default_of_verl_asks_for_what_a_run_must_name(system: str, backend: str, tmp_path: Path):
    from roll.workbench.migrate.peers import table

    tree = table("verl")[system]
    if system == "verl" and backend == "megatron":
        tree = table("verl")["verl_megatron"]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    report, _ = migrate(tmp_path / "all.yaml", "verl")
    assert not report.of("absent") and not report.of("unexpanded")
    assert [line.split(":")[0] for line in report.missing] == [
        "actor_infer.strategy_args.strategy_name" for _ in range(system == "verl")
    ]


def test_the_engine_of_the_model_chooses_the_backend(tmp_path: Path):
    _, tree = job(tmp_path, f"model_engine=megatron {A}.megatron.tensor_model_parallel_size=2 {A}.use_kl_loss=True")
    assert values(
        tree, "actor_train.strategy_args.strategy_name", "reference.strategy_args.strategy_name",
        "actor_train.strategy_args.strategy_config.sequence_parallel",
    ) == ["megatron_train", "megatron_infer", True]  # fmt: skip
    report, _ = job(tmp_path, "model_engine=veomni")
    assert report.missing


def test_fine_tuning_learns_every_message_of_the_assistant(tmp_path: Path):
    report, tree = job(tmp_path, "data.train_batch_size=64 data.micro_batch_size_per_gpu=2", SFT)
    # 64 rows = 2 per device x 8 passes x 4 ranks
    assert values(
        tree, "pipeline", "train_on", "actor_train.data_args.messages", "num_train_epochs", "sequence_length",
        "actor_train.training_args.learning_rate", "actor_train.training_args.gradient_accumulation_steps",
        "actor_train.max_tokens_per_microbatch_in_train",
    ) == ["sft", "all", "messages", 4, 1024, 1e-3, 8, 8192]  # fmt: skip
    assert not report.missing
    _, tree = job(tmp_path, "data.enable_thinking_default=false", SFT)
    assert tree["chat_template_kwargs"] == {"enable_thinking": False}
    _, tree = job(tmp_path, "data.prompt_key=question data.response_key=answer", SFT)
    assert "train_on" not in tree and tree["actor_train"]["data_args"]["response"] == "answer"
    report, _ = job(tmp_path, "data.truncation=left", SFT)
    assert report.missing


def test_the_column_of_pictures_is_named_where_a_job_names_one(tmp_path: Path):
    # images is the default of every job, of text too; rows with pictures are then refused, and the message has the key.
    report, tree = job(tmp_path, "data.image_key=shots data.val_files=b.parquet")
    assert values(tree, "actor_train.data_args.images", "validation.data_args.images") == ["shots", "shots"]
    assert fates(report)["data.image_key"] == "translated"
    report, tree = job(tmp_path, "data.image_key=images")
    assert "images" not in tree["actor_train"]["data_args"]
    assert fates(report)["data.image_key"] == "dead"
    _, tree = job(tmp_path, "+data.image_key=shots", SFT)
    assert tree["actor_train"]["data_args"]["images"] == "shots"


def test_what_verl_saves_in_the_end_is_saved(tmp_path: Path):
    # verl's fine-tuning saves its last step whatever save_freq says, and keeps all of its checkpoints.
    _, tree = job(tmp_path, "", SFT)
    assert (tree["save_steps"], tree["checkpoint_config"]["max_to_keep"]) == (10**9, None)
    report, _ = job(tmp_path, "trainer.save_freq=after_each_epoch", SFT)
    assert asked(report) == {"save_freq"} and report.missing
    _, tree = job(tmp_path, "")
    assert (tree.get("save_steps"), tree["checkpoint_config"]["max_to_keep"]) == (None, None)


def test_a_choice_of_hydra_leaves_the_keys_of_its_section(tmp_path: Path):
    words = "optim=fsdp optim.lr=2e-5 engine.fsdp_size=4 engine=fsdp model=hf_model optim.betas=[0.9,0.95]"
    report, tree = job(tmp_path, words, SFT)
    args = tree["actor_train"]["training_args"]
    assert (args["learning_rate"], args["adam_beta2"]) == (2e-5, 0.95)
    assert not report.missing and {"optim", "engine", "model"} <= {use.key for use in report.of("dead")}


def test_an_older_name_of_the_model_is_the_model_that_is_trained(tmp_path: Path):
    _, tree = job(tmp_path, "data.train_files=a.parquet model.partial_pretrain=b/c", SFT.partition("data.train")[0])
    assert tree["actor_train"]["model_args"]["model_name_or_path"] == "b/c"


def test_options_of_the_engine_reach_it(tmp_path: Path):
    words = f"+{R}.engine_kwargs.vllm.kv_cache_dtype=fp8 +{R}.engine_kwargs.sglang.attention_backend=fa3"
    _, tree = job(tmp_path, words)
    options = tree["actor_infer"]["strategy_args"]["strategy_config"]
    assert options["kv_cache_dtype"] == "fp8" and "attention_backend" not in options


def test_passes_of_all_devices_add_no_role(tmp_path: Path):
    words = "actor_rollout_ref.ref.log_prob_micro_batch_size=64 critic.forward_micro_batch_size=8"
    assert not {"reference", "critic"} & job(tmp_path, words)[1].keys()
    assert job(tmp_path, f"{words} {A}.use_kl_loss=True")[1]["reference"]["infer_batch_size"] == 8


def test_what_other_versions_say_by_default_asks_for_nothing(tmp_path: Path):
    words = "+algorithm.rollout_is=true +algorithm.rollout_is_threshold=2.0 +algorithm.rollout_is_mode=truncate"
    report, tree = job(tmp_path, words)
    assert not report.missing and values(tree[T], "level", "importance_upper") == ["token", 2.0]
    assert asked(job(tmp_path, words.replace("truncate", "mask"))[0]) == {"rollout_is_mode"}
    report, tree = job(tmp_path, f"+{A}.tis_imp_ratio_cap=2 {A}.profiler.enable=True")
    assert tree[T] == {"importance_upper": "???"} and asked(report) == {"tis_imp_ratio_cap"}


CONFIG = """data: {train_files: a.parquet, max_response_length: 256}
defaults: [ppo_trainer, _self_]
"""


def test_configurations_that_come_with_verl_are_its_defaults(tmp_path: Path):
    words = "--config-path=./config --config-name=ppo_megatron_trainer"
    report, tree = job(tmp_path, f"{words} {R}.calculate_log_probs=True")
    assert at(tree, "actor_train.strategy_args.strategy_name") == "megatron_train" and not report.missing
    words = "python3 -m verl.trainer.main_ppo --config-path=. --config-name=my algorithm.adv_estimator=grpo "
    _, tree = job(tmp_path, f"{words} {R}.name=vllm", f"cat > my.yaml <<EOT\n{CONFIG}EOT\n")
    assert tree["response_length"] == 256


@pytest.mark.parametrize("value", ["$(wc -l a)", "abc", "0", "[1,2]"])
def test_a_mini_batch_that_is_no_number_is_asked_for(value: str, tmp_path: Path):
    report, tree = job(tmp_path, f"{A}.ppo_mini_batch_size={value}")
    assert tree["actor_train"]["training_args"]["gradient_accumulation_steps"] == "???"
    assert report.missing and fates(report)[f"{A}.ppo_mini_batch_size"] in ("absent", "unexpanded")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("main_generation_server data.train_files=/d/t.parquet actor_rollout_ref.rollout.n=4 "
         "actor_rollout_ref.rollout.temperature=0.6 +data.output_path=out.parquet actor_rollout_ref.model.path=a/b",
         "roll eval generate /d/t.parquet -o out.parquet --samples 4 --temperature 0.6 --model a/b"),
        # verl samples at 1.0 if nothing else is said, one response as well
        ("main_generation data.path=t.jsonl model.path=a/b model.trust_remote_code=True data.prompt_key=prompt",
         "roll eval generate t.jsonl --model a/b --temperature 1.0 actor_infer.model_args.trust_remote_code=true"),
    ],
)  # fmt: skip
def test_a_job_that_generates_is_a_command(words: str, command: str, tmp_path: Path):
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.{words}", "utf-8")
    report, _ = migrate(tmp_path / "run.sh")
    assert report.command == command
