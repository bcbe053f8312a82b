"""Flags of OpenRLHF, for hints and the page of docs: `roll migrate` doesn't read its scripts."""

from __future__ import annotations

from roll.catalog.foreign_keys.rows import ForeignKey, absent, dead, pairs

FLAGS: list[ForeignKey] = [
    *pairs("""
    reward_pretrain reward_model.model_args.model_name_or_path
    remote_rm_url rewards.<name>.name
    actor_learning_rate actor_train.training_args.learning_rate
    critic_learning_rate critic.training_args.learning_rate
    critic_pretrain critic.model_args.model_name_or_path
    n_samples_per_prompt num_return_sequences_in_group
    micro_train_batch_size actor_train.training_args.per_device_train_batch_size
    micro_rollout_batch_size actor_train.infer_batch_size
    prompt_max_len prompt_length
    generate_max_len response_length
    num_episodes num_train_epochs
    max_epochs ppo_epochs
    advantage_estimator adv_estimator
    eps_clip pg_clip
    eps_clip_low_high pg_clip_low pg_clip_high
    kl_target target_kl
    kl_estimator kl_penalty
    entropy_loss_coef entropy_loss_coef
    zero_stage actor_train.strategy_args.strategy_config.zero_optimization
    adam_offload actor_train.strategy_args.strategy_config.zero_optimization
    packing_samples actor_train.use_sequence_packing
    vllm_num_engines actor_infer.device_mapping
    vllm_sync_backend weight_transport
    actor_num_gpus_per_node actor_train.device_mapping
    ref_num_gpus_per_node reference.device_mapping
    critic_num_gpus_per_node critic.device_mapping
    reward_num_gpus_per_node reward_model.device_mapping
    prompt_data actor_train.data_args.file_name
    input_key actor_train.data_args.prompt
    label_key actor_train.data_args.ground_truth
    apply_chat_template actor_train.data_args.template
    input_template actor_train.data_args.template
    save_path export_dir
    ckpt_path checkpoint_config.output_dir
    max_ckpt_num checkpoint_config.max_to_keep
    load_checkpoint resume_from_checkpoint
    lr_warmup_ratio actor_train.training_args.warmup_ratio
    use_tensorboard track_with
    use_wandb track_with
    freezing_actor_steps critic_warmup
    ring_attn_size actor_train.model_args.ring_attention_size
    dynamic_filtering rewards.<name>.query_filter_config
    dynamic_filtering_reward_range rewards.<name>.query_filter_config.filter_args
    async_train async_generation_ratio
    partial_rollout partial_rollout
    agent_func_path rewards.<name>.rollout
    """),
    *dead("colocate_all_models colocate_actor_ref colocate_critic_reward vllm_enable_sleep deepspeed_enable_sleep",
          "roles that name the same slots share them, and give back their memory by themselves",
          see="actor_train.device_mapping"),
    *absent("ema_beta enable_ema", "weights aren't averaged"),
]  # fmt: skip
"""As they are typed, without `--`."""
