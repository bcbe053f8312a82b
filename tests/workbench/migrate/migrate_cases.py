"""Configurations in the style of Alibaba's ROLL and of verl: whole ones in `cases/`, and bases with what varies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CASES = Path(__file__).with_name("cases")

# --- verl: overrides of its ppo_trainer, `key=value` ------------------------------------------------------------------

A, F, R, M = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))

VERL_GRPO = f"""
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation=error
{M}.path=Qwen/Qwen2-7B-Instruct {M}.use_remove_padding=True {M}.enable_gradient_checkpointing=True
{A}.optim.lr=1e-6 {A}.ppo_mini_batch_size=256 {A}.ppo_micro_batch_size_per_gpu=40
{A}.use_kl_loss=True {A}.kl_loss_coef=0.001 {A}.kl_loss_type=low_var_kl {A}.entropy_coeff=0
{A}.fsdp_config.param_offload=False {A}.fsdp_config.optimizer_offload=False
{R}.log_prob_micro_batch_size_per_gpu=40 {R}.tensor_model_parallel_size=2 {R}.name=vllm
{R}.gpu_memory_utilization=0.6 {R}.n=5
{F}.log_prob_micro_batch_size_per_gpu=40 {F}.fsdp_config.param_offload=True
trainer.critic_warmup=0 trainer.logger=[console,wandb] trainer.project_name=verl_grpo_example_gsm8k
trainer.experiment_name=qwen2_7b trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=15
"""
VERL_PPO = f"""
algorithm.adv_estimator=gae algorithm.gamma=1.0 algorithm.lam=0.95 algorithm.use_kl_in_reward=True
algorithm.kl_ctrl.type=fixed algorithm.kl_ctrl.kl_coef=0.001
data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet data.train_batch_size=1024
data.max_prompt_length=512 data.max_response_length=512
{M}.path=deepseek-ai/deepseek-llm-7b-chat {A}.optim.lr=1e-6 {A}.ppo_mini_batch_size=256
{A}.ppo_micro_batch_size_per_gpu=16 {A}.fsdp_config.param_offload=False {R}.name=vllm
{R}.tensor_model_parallel_size=4 {R}.gpu_memory_utilization=0.4
critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.model.path=deepseek-ai/deepseek-llm-7b-chat
critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size_per_gpu=32
critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.optimizer_offload=False critic.cliprange_value=0.5
trainer.logger=[console] trainer.experiment_name=deepseek_ppo trainer.n_gpus_per_node=8 trainer.nnodes=1
trainer.save_freq=-1 trainer.test_freq=1 trainer.total_epochs=15
"""
VERL_SFT = """
data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet data.prompt_key=extra_info
data.response_key=extra_info data.prompt_dict_keys=[question] data.response_dict_keys=[answer]
data.micro_batch_size_per_gpu=4 data.train_batch_size=256 data.max_length=1024 data.truncation=right
model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct model.strategy=fsdp2 optim.lr=1e-4 optim.warmup_steps_ratio=0.1
optim.lr_scheduler=cosine optim.weight_decay=0.01 optim.clip_grad=1.0 optim.betas=[0.9,0.95]
trainer.project_name=gsm8k-sft trainer.experiment_name=qwen trainer.logger=[console] trainer.total_epochs=2
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.seed=1 trainer.default_hdfs_dir=null trainer.save_freq=100
trainer.test_freq=50 ulysses_sequence_parallel_size=2 use_remove_padding=true
"""

VERL: dict[str, tuple[str, str]] = {
    # what varies, over a base: a group of the specification each
    "batch": (VERL_GRPO, f"data.train_batch_size=512 {A}.ppo_mini_batch_size=128 {A}.ppo_micro_batch_size_per_gpu=4"),
    "dynamic_bsz": (VERL_GRPO, f"{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=24000 "
                    f"{F}.log_prob_use_dynamic_bsz=True {F}.log_prob_max_token_len_per_gpu=32000 "
                    f"{R}.log_prob_use_dynamic_bsz=True {R}.log_prob_max_token_len_per_gpu=32000"),
    "old_micro": (VERL_GRPO, f"{A}.ppo_micro_batch_size=64 {F}.log_prob_micro_batch_size=64 "
                  f"{R}.log_prob_micro_batch_size=64"),
    "dr_grpo": (VERL_GRPO, f"algorithm.norm_adv_by_std_in_grpo=False {A}.loss_agg_mode=seq-mean-token-sum-norm "
                f"{A}.use_kl_loss=False"),
    "rloo": (VERL_GRPO, "algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl "
             f"algorithm.kl_ctrl.kl_coef=0.001 {A}.use_kl_loss=False"),
    "reinforce_pp": (VERL_GRPO, "algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True "
                     f"algorithm.kl_penalty=low_var_kl {A}.use_kl_loss=False algorithm.gamma=1.0"),
    "reinforce_pp_baseline": (VERL_GRPO, "algorithm.adv_estimator=reinforce_plus_plus_baseline "
                              f"{A}.kl_loss_type=mse"),
    "remax": (VERL_GRPO, f"algorithm.adv_estimator=remax {R}.n=4 {R}.do_sample=True"),
    "opo": (VERL_GRPO, f"algorithm.adv_estimator=opo {A}.kl_loss_type=k2"),
    "passk": (VERL_GRPO, "algorithm.adv_estimator=grpo_passk"),
    "adaptive_kl": (VERL_PPO, "algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=10000 "
                    "algorithm.kl_ctrl.target_kl=0.1"),
    "pf_ppo": (VERL_PPO, "algorithm.use_pf_ppo=True algorithm.pf_ppo.reweight_method=pow "
               "algorithm.pf_ppo.weight_pow=2.0"),
    "clip_higher": (VERL_GRPO, f"{A}.clip_ratio=0.2 {A}.clip_ratio_low=0.2 {A}.clip_ratio_high=0.28 "
                    f"{A}.clip_ratio_c=10.0 {A}.loss_agg_mode=token-mean {A}.grad_clip=0.5 {A}.ppo_epochs=2"),
    "gspo": (VERL_GRPO, f"{A}.policy_loss.loss_mode=gspo {A}.clip_ratio_low=0.0003 {A}.clip_ratio_high=0.0004 "
             f"{A}.loss_agg_mode=seq-mean-token-mean"),
    "gmpo": (VERL_GRPO, f"{A}.policy_loss.loss_mode=geo_mean {A}.clip_ratio_low=0.4 {A}.clip_ratio_high=0.4"),
    "clip_cov": (VERL_GRPO, f"{A}.policy_loss.loss_mode=clip_cov {A}.policy_loss.clip_cov_ratio=0.0002 "
                 f"{A}.policy_loss.clip_cov_lb=1.0 {A}.policy_loss.clip_cov_ub=5.0 {A}.use_kl_loss=False"),
    "kl_cov": (VERL_GRPO, f"{A}.policy_loss.loss_mode=kl_cov {A}.policy_loss.kl_cov_ratio=0.0002 "
               f"{A}.policy_loss.ppo_kl_coef=1.0"),
    "sapo": (VERL_GRPO, f"{A}.policy_loss.loss_mode=sapo {A}.tau_pos=1.0 {A}.tau_neg=1.05"),
    "entropy": (VERL_GRPO, f"{A}.entropy_coeff=0.001 {A}.entropy_from_logits_with_chunking=True "
                f"{A}.entropy_checkpointing=True"),
    "filter_groups": (VERL_GRPO, "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=seq_reward "
                      "algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=3072"),
    "overlong": (VERL_GRPO, "reward_model.reward_manager=dapo "
                 "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
                 "+reward_model.reward_kwargs.overlong_buffer_cfg.len=512 "
                 "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 "
                 "+reward_model.reward_kwargs.overlong_buffer_cfg.log=False "
                 "+reward_model.reward_kwargs.max_resp_len=1024"),
    "rollout_is": (VERL_GRPO, "algorithm.rollout_correction.rollout_is=token "
                   "algorithm.rollout_correction.rollout_is_threshold=2.0 "
                   f"algorithm.rollout_correction.rollout_rs=null {R}.calculate_log_probs=True"),
    "rollout_rs": (VERL_GRPO, "algorithm.rollout_correction.rollout_is=null "
                   "algorithm.rollout_correction.rollout_rs=geometric "
                   "algorithm.rollout_correction.rollout_rs_threshold=1.01 "
                   "algorithm.rollout_correction.rollout_rs_threshold_lower=0.99"),
    "fsdp2": (VERL_GRPO, f"{A}.strategy=fsdp2 {F}.strategy=fsdp2 {A}.fsdp_config.offload_policy=True "
              f"{A}.fsdp_config.reshard_after_forward=True {A}.fsdp_config.fsdp_size=-1 "
              f"{A}.fsdp_config.forward_prefetch=True {A}.fsdp_config.wrap_policy.min_num_params=0 "
              f"{A}.fsdp_config.model_dtype=fp32"),
    "hsdp": (VERL_GRPO, f"{A}.fsdp_config.fsdp_size=4 {F}.fsdp_config.wrap_policy.min_num_params=0"),
    "ulysses": (VERL_GRPO, f"{A}.ulysses_sequence_parallel_size=2 {F}.ulysses_sequence_parallel_size=2"),
    "schedule": (VERL_GRPO, f"{A}.optim.lr_warmup_steps=10 {A}.optim.warmup_style=cosine {A}.optim.min_lr_ratio=0.1 "
                 f"{A}.optim.num_cycles=0.5 {A}.optim.weight_decay=0.1 {A}.optim.betas=[0.9,0.98] "
                 f"{A}.optim.total_training_steps=-1"),
    "warmup_ratio": (VERL_GRPO, f"{A}.optim.lr_warmup_steps=-1 {A}.optim.lr_warmup_steps_ratio=0.285 "
                     f"{A}.optim.warmup_style=constant {A}.optim.clip_grad=1.0"),
    "megatron": (VERL_GRPO, f"{A}.strategy=megatron {F}.strategy=megatron "
                 f"{A}.megatron.pipeline_model_parallel_size=2 {A}.megatron.tensor_model_parallel_size=2 "
                 f"{A}.megatron.sequence_parallel=True {A}.megatron.param_offload=True "
                 f"{A}.megatron.grad_offload=True {A}.megatron.optimizer_offload=True {A}.megatron.use_mbridge=True "
                 f"{F}.megatron.pipeline_model_parallel_size=2 {F}.megatron.tensor_model_parallel_size=2 "
                 f"{F}.megatron.param_offload=True ~{M}.use_remove_padding"),
    "megatron_moe": (VERL_GRPO, f"{A}.strategy=megatron {A}.megatron.expert_model_parallel_size=4 "
                     f"{A}.megatron.context_parallel_size=2 {A}.megatron.expert_tensor_parallel_size=1 "
                     f"+{A}.megatron.override_transformer_config.recompute_granularity=full "
                     f"+{A}.megatron.override_transformer_config.recompute_method=uniform "
                     f"+{A}.megatron.override_transformer_config.recompute_num_layers=1 "
                     f"+{A}.megatron.override_transformer_config.moe_token_dispatcher_type=alltoall "
                     f"+{A}.megatron.override_transformer_config.apply_rope_fusion=True "
                     f"{A}.megatron.dist_checkpointing_path=/m {A}.megatron.use_dist_checkpointing=True"),
    "lora": (VERL_GRPO, f"{M}.lora_rank=64 {M}.lora_alpha=32 {M}.target_modules=all-linear {R}.load_format=safetensors "
             f"{R}.layered_summon=True {M}.use_shm=True"),
    "model": (VERL_GRPO, f"{M}.trust_remote_code=True {M}.use_liger=True {M}.enable_activation_offload=True "
              f"+{M}.override_config.attention_dropout=0. +{M}.override_config.rope_theta=1000000 "
              f"{M}.use_fused_kernels=True {M}.fused_kernel_options.impl_backend=torch"),
    "engine": (VERL_GRPO, f"{R}.enforce_eager=False {R}.free_cache_engine=True {R}.max_num_batched_tokens=8192 "
               f"{R}.max_model_len=4096 {R}.max_num_seqs=1024 {R}.enable_chunked_prefill=False {R}.dtype=bfloat16 "
               f"{R}.load_format=dummy_dtensor {R}.disable_log_stats=True {R}.mode=async "
               f"+{R}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True {R}.enable_prefix_caching=True"),
    "sglang": (VERL_GRPO, f"{R}.name=sglang {R}.gpu_memory_utilization=0.7 {R}.free_cache_engine=False "
               f"+{R}.engine_kwargs.sglang.attention_backend=fa3 {R}.multi_stage_wake_up=True"),
    "hf": (VERL_GRPO, f"{R}.name=hf {R}.do_sample=True {R}.ignore_eos=False"),
    "sampling": (VERL_GRPO, f"{R}.temperature=0.7 {R}.top_p=0.9 {R}.top_k=50 {R}.val_kwargs.temperature=0.6 "
                 f"{R}.val_kwargs.top_p=0.95 {R}.val_kwargs.top_k=20 {R}.val_kwargs.n=4 {R}.val_kwargs.do_sample=True"),
    "greedy_val": (VERL_GRPO, f"{R}.val_kwargs.do_sample=False {R}.val_kwargs.n=8 {R}.use_fire_sampling=False"),
    "trainer": (VERL_GRPO, "trainer.total_training_steps=100 trainer.val_before_train=False "
        "trainer.resume_mode=disable "
                "trainer.default_local_dir=ckpt trainer.max_actor_ckpt_to_keep=3 trainer.max_critic_ckpt_to_keep=3 "
                "trainer.balance_batch=True trainer.log_val_generations=10 trainer.rollout_data_dir=/tmp/rollouts "
                "trainer.validation_data_dir=/tmp/val trainer.device=cuda trainer.default_hdfs_dir=null "
                "trainer.del_local_ckpt_after_load=False trainer.ray_wait_register_center_timeout=300"),
    "resume": (VERL_GRPO, "trainer.resume_mode=resume_path trainer.resume_from_path=/ckpt/global_step_10 "
               f"{A}.checkpoint.save_contents=[model,optimizer,extra,hf_model] "
               f"{A}.checkpoint.load_contents=[model,optimizer,extra] trainer.val_only=False"),
    "nodes": (VERL_GRPO, "trainer.nnodes=4 ray_init.num_cpus=null ray_init.timeline_json_file=null"),
    "data": (VERL_GRPO, "data.prompt_key=prompt data.reward_fn_key=data_source data.shuffle=False data.seed=1 "
             "data.filter_overlong_prompts_workers=64 data.return_raw_chat=True data.return_raw_input_ids=False "
             "data.return_full_prompt=False data.image_key=images data.video_key=videos data.val_batch_size=64 "
             "data.validation_shuffle=False data.dataloader_num_workers=8 data.custom_cls.path=null "
             "data.custom_cls.name=null data.trust_remote_code=True data.tokenizer=null"),
    "several_files": (VERL_GRPO, "data.train_files=\"['/d/a.parquet','/d/b.parquet']\" data.val_files=[/d/c.parquet] "
                      "data.prompt_key=question"),
    "custom_reward": (VERL_GRPO, "custom_reward_function.path=rewards/mine.py custom_reward_function.name=score "
                      "+custom_reward_function.reward_kwargs.scale=2 reward_model.reward_manager=prime "
                      "reward_model.launch_reward_fn_async=True"),
    "reward_model": (VERL_PPO, "reward_model.enable=True reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 "
                     "reward_model.model.use_remove_padding=True reward_model.micro_batch_size_per_gpu=32 "
                     "reward_model.model.fsdp_config.param_offload=True reward_model.max_length=2048 "
                     "reward_model.model.input_tokenizer=null reward_model.strategy=fsdp"),
    "sandbox": (VERL_GRPO, "reward_model.sandbox_fusion.url=null reward_model.sandbox_fusion.max_concurrent=64 "
                "reward_model.sandbox_fusion.memory_limit_mb=1024"),
    "critic": (VERL_PPO, "critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=32768 "
               "critic.forward_max_token_len_per_gpu=32768 critic.ulysses_sequence_parallel_size=2 "
               "critic.strategy=fsdp "
               "critic.optim.lr_warmup_steps_ratio=0.05 critic.ppo_epochs=1 critic.grad_clip=1.0 critic.shuffle=False"),
    "critic_warmup": (VERL_PPO, "trainer.critic_warmup=10 critic.forward_micro_batch_size_per_gpu=16 "
                      "critic.ppo_mini_batch_size=128"),
    "both_kl": (VERL_PPO, f"{A}.use_kl_loss=True {A}.kl_loss_coef=0.01 {A}.kl_loss_type=low_var_kl"),
    "multi_turn_off": (VERL_GRPO, f"{R}.multi_turn.enable=False {R}.agent.num_workers=8"),
    "profiler_off": (VERL_GRPO, f"{A}.profiler.enable=False global_profiler.tool=null global_profiler.steps=null "
                     "trainer.profile_steps=null"),
    "compile": (VERL_GRPO, f"{A}.use_torch_compile=False {A}.shuffle=False {A}.use_token_level_loss=True"),
}  # fmt: skip

SFT: dict[str, str] = {
    "columns": "",
    "multiturn": "data.multiturn.enable=true data.multiturn.messages_key=messages data.truncation=error",
    "lora": "model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear model.use_liger=True "
            "model.enable_gradient_checkpointing=True model.fsdp_config.cpu_offload=False "
            "model.fsdp_config.offload_params=False model.fsdp_config.model_dtype=fp32 model.trust_remote_code=False",
    "wsd": "optim.lr_scheduler=wsd trainer.total_training_steps=500 data.micro_batch_size=32 "
    "data.balance_dp_token=False "
           "data.chat_template=null trainer.resume_mode=auto trainer.max_ckpt_to_keep=3",
}  # fmt: skip


def overrides(*lists: str) -> dict[str, str]:
    """`key=value` words by key, the last of a key, with signs in front of it."""
    found = {}
    for word in " ".join(lists).split():
        key, _, value = word.partition("=")
        plain = key.lstrip("+~")
        found = {given: text for given, text in found.items() if given.lstrip("+~") != plain}
        found[key] = value
    return found


def script(*lists: str, module: str = "verl.trainer.main_ppo") -> str:
    """A shell script that starts verl so."""
    words = [key if not value else f"{key}={value}" for key, value in overrides(*lists).items()]
    return "set -x\n\n" + f"python3 -m {module} \\\n    " + " \\\n    ".join(words) + " $@\n"


# --- ROLL ------------------------------------------------------------------------------------------------------------

ROLL: dict[str, tuple[str, dict[str, Any]]] = {
    # file of cases/, and what varies: a path with its value; None takes it out
    "rlvr": ("rlvr.yaml", {}),
    "rlvr_grpo": ("rlvr.yaml", {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.001,
                  "loss_agg_mode": "seq-mean-token-sum", "reference.strategy_args": {"strategy_name": "hf_infer",
                  "strategy_config": None}}),
    "rlvr_norm": ("rlvr.yaml", {"norm_mean_type": "group", "norm_std_type": "batch", "reward_norm": "...",
                  "reward_shift": "...", "reward_scale": "..."}),
    "rlvr_gae": ("rlvr.yaml", {"adv_estimator": "gae", "gamma": 1, "lambd": 0.95, "critic": {
                 "model_args": {"attn_implementation": "fa2", "disable_gradient_checkpointing": False, "dtype": "bf16",
                 "model_type": None}, "training_args": {"learning_rate": 1.0e-5, "weight_decay": 0.01,
                 "per_device_train_batch_size": 1, "gradient_accumulation_steps": 64, "warmup_steps": 5},
                 "strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": "${deepspeed_zero3}"},
                 "device_mapping": "list(range(0,8))", "infer_batch_size": 4}}),
    "rlvr_critic_unused": ("rlvr.yaml", {"critic": {"model_args": {"dtype": "bf16"}, "strategy_args": {
                           "strategy_name": "deepspeed_train", "strategy_config": "${deepspeed_zero2}"}}}),
    "rlvr_topr": ("rlvr.yaml", {"rl_loss_coef": 0.0, "positive_loss_coef": 0.1, "use_topr_neg_loss_coef": 1.0}),
    "rlvr_topr_switch": ("rlvr.yaml", {"use_topr_loss": True, "actor_train.topr_positive_weight": 1.0,
                         "actor_train.topr_negative_weight": 0.5, "actor_train.pg_variant": "topr"}),
    "rlvr_pg_variant": ("rlvr.yaml", {"actor_train.pg_variant": "tis", "tis_lower_bound": 0.0, "tis_upper_bound": 1.0}),
    "rlvr_gspo": ("rlvr.yaml", {"importance_sampling": "seq", "pg_clip": 0.0003, "use_pg_clip_range": False,
                  "pg_clip_low": 0.2, "pg_clip_high": 0.28}),
    "rlvr_clip": ("rlvr.yaml", {"pg_clip": 0.2, "use_pg_clip_range": True, "pg_clip_low": 0.2, "pg_clip_high": 0.28}),
    "rlvr_kl": ("rlvr.yaml", {"add_token_level_kl": True, "init_kl_coef": 0.05, "target_kl": None, "kl_horizon": 10000,
                "kl_penalty": "kl", "enable_reference": True}),
    "rlvr_async": ("rlvr.yaml", {"async_generation_ratio": 1, "actor_train.device_mapping": "list(range(0,8))",
                   "actor_infer.device_mapping": "list(range(8,16))", "is_num_return_sequences_expand": True,
                   "reference.device_mapping": "list(range(0,8))", "generate_opt_level": 1}),
    "rlvr_correction": ("rlvr.yaml", {"train_infer_correction": {"is_weight": {"enabled": True, "weight_type": "token",
                        "upper_bound": 1.2, "detach": True}, "filters": [{"enabled": True, "agg_type": "token",
                        "ratio_enabled": True, "ratio_low": 0.8, "ratio_high": 1.2}]}}),
    "rlvr_dynamic": ("rlvr.yaml", {"actor_train.use_dynamic_batching_in_train": True,
                     "actor_train.max_tokens_per_microbatch_in_train": 8192,
                     "actor_train.sequence_length_round_in_train": 8, "reference.use_dynamic_batching_in_infer": True,
                     "reference.max_tokens_per_microbatch_in_infer": 8192, "actor_train.use_sequence_packing": True}),
    "rlvr_fsdp2": ("rlvr.yaml", {"actor_train.strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {
                   "fsdp_size": 16, "param_dtype": "bf16", "reduce_dtype": "fp32", "reshard_after_forward": True,
                   "offload_policy": False}}, "actor_train.model_args.ulysses_size": 2}),
    "rlvr_lora": ("rlvr.yaml", {"actor_train.model_args.lora_rank": 32, "actor_train.model_args.lora_alpha": 32,
                  "actor_train.model_args.lora_target": "o_proj,q_proj,k_proj,v_proj",
                  "actor_train.strategy_args": {"strategy_name": "deepspeed_train",
                  "strategy_config": "${deepspeed_zero2}"}, "actor_infer.model_args.lora_target": "q_proj,v_proj",
                  "actor_infer.model_args.lora_rank": 32}),
    "rlvr_freeze": ("rlvr.yaml", {"actor_train.model_args.freeze_module_prefix": "lm_head,model.embed_tokens",
                    "actor_train.model_args.model_config_kwargs": {"rope_theta": 1000000}}),
    "rlvr_moe": ("rlvr.yaml", {"actor_train.strategy_args.strategy_config": {"tensor_model_parallel_size": 2,
                 "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
                 "expert_model_parallel_size": 4, "account_for_loss_in_pipeline_split": True,
                 "account_for_embedding_in_pipeline_split": True, "use_distributed_optimizer": True,
                 "sequence_parallel": True, "overlap_grad_reduce": True, "bias_activation_fusion": True,
                 "apply_rope_fusion": True, "moe_grouped_gemm": True, "moe_layer_recompute": True,
                 "moe_token_dispatcher_type": "alltoall"},
                 "actor_train.training_args.gradient_accumulation_steps": 64}),
    "rlvr_sglang": ("rlvr.yaml", {"actor_infer.strategy_args": {"strategy_name": "sglang", "strategy_config": {
                    "mem_fraction_static": 0.7, "load_format": "dummy"}}, "actor_infer.num_gpus_per_worker": 2}),
    "rlvr_vllm": ("rlvr.yaml", {"actor_infer.strategy_args.strategy_config": {"gpu_memory_utilization": 0.75,
                  "load_format": "dummy", "tensor_parallel_size": 4, "enforce_eager": True, "swap_space": 4,
                  "enable_prefix_caching": False}, "actor_infer.num_gpus_per_worker": 4}),
    "rlvr_wandb": ("rlvr.yaml", {"track_with": "wandb", "tracker_kwargs": {"api_key": None, "project": "roll_examples",
                   "notes": "roll_examples", "tags": ["rlvr", "baseline"], "name": "${exp_name}"}}),
    "rlvr_resume": ("rlvr.yaml", {"resume_from_checkpoint": "/ckpt/step-100", "max_ckpt_to_keep": 3,
                    "num_nodes": 2, "rpc_timeout": 7200, "model_update_buffer_size_mb": 512,
                    "is_offload_optimizer_states_in_train_step": False, "profiler_timeline": False}),
    "rlvr_additional": ("rlvr.yaml", {"is_use_additional_prompts": True, "max_additional_running_prompts": 16,
                        "max_running_requests": 256, "generate_opt_level": 1}),
    "agentic": ("agentic.yaml", {}),
    "agentic_gigpo": ("agentic.yaml", {"defaults": ["../config/step_envs@_here_", "../config/deepspeed_zero2@_here_"],
                      "adv_estimator": "gigpo", "batch_adjust_mode": "copy", "step_reward_weight": 1.0,
                      "episode_reward_weight": 1.0, "step_reward_gamma": 0.95, "use_kl_loss": True,
                      "kl_loss_coef": 0.01, "env_manager_cls":
                      "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"}),
    "agentic_step": ("agentic.yaml", {"adv_estimator": "step_reinforce", "step_reward_gamma": 1.0,
                     "reward_normalization": {"norm_mean_type": "batch", "norm_std_type": "group"}}),
    "agentic_async": ("agentic.yaml", {"async_generation_ratio": 1, "actor_train.device_mapping": "list(range(0,4))",
                      "actor_infer.device_mapping": "list(range(4,8))",
                      "reference.device_mapping": "list(range(0,4))"}),
    "agentic_own": ("agentic.yaml", {"train_env_manager.tags": ["Room"],
                    "train_env_manager.num_groups_partition": [32], "val_env_manager": None, "custom_envs": {
                    "Room": {"env_type": "sokoban", "max_steps": 20, "max_tokens_per_step": 64, "use_thread_lock": True,
                    "env_manager_cls": "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager",
                    "agent_system_template": "You play a game.", "agent_template":
                    "Turn {turn_idx}:\n{observation}\nYou have {actions_left} actions, {max_response_length} tokens.",
                    "env_config": {"action_pattern": "<answer>(.*?)</answer>", "max_steps": 20, "format_penalty": -0.15,
                    "dim_room": [6, 6], "num_boxes": 1, "search_depth": 10}}}}),
    "sft": ("sft.yaml", {}),
    "sft_deepspeed": ("sft.yaml", {"defaults": ["../config/deepspeed_zero3@_here_"], "sft_train.strategy_args": {
                      "strategy_name": "deepspeed_train", "strategy_config": "${deepspeed_zero3}"},
                      "max_steps": 200}),
    "dpo": ("dpo.yaml", {}),
    "dpo_ipo": ("dpo.yaml", {"ipo": True, "beta": 0.05, "label_smoothing": 0.0, "train_batch_size": 32}),
    "distill": ("distill.yaml", {}),
    "distill_reverse": ("distill.yaml", {"kd_objective": "reverse_kl", "kd_temperature": 1, "teacher_temperature": 1,
                        "logits_topk": 0, "distill_loss_weight": 1.0}),
}  # fmt: skip


def roll_tree(name: str) -> dict[str, Any]:
    """The tree of a case, as its file would have it."""
    file, changes = ROLL[name]
    tree: dict[str, Any] = yaml.safe_load((CASES / file).read_text("utf-8"))
    for path, value in copy.deepcopy(changes).items():
        node: Any = tree
        *sections, last = path.split(".")
        for word in sections:
            node = node.setdefault(word, {})
        if value == "..." or (value is None and isinstance(node.get(last), Mapping)):
            node.pop(last, None)
        else:
            node[last] = value
    return tree
