"""Keys of Alibaba's ROLL at the top level of a file: the run, the policy's optimisation."""

from __future__ import annotations

from roll.catalog.foreign_keys.rows import ForeignKey, absent, dead, decided, moved, same

RUN: list[ForeignKey] = [
    *same(
        "exp_name seed output_dir rpc_timeout system_envs logging_steps resume_from_checkpoint render_save_dir "
        "rollout_dump_dir num_nodes prompt_length response_length sequence_length is_use_additional_prompts "
        "max_additional_running_prompts max_running_requests async_generation_ratio pretrain reward_pretrain "
        "model_update_buffer_size_mb val_batch_size num_train_epochs log_val_generations truncation balance_batch "
        "val_before_train val_only"
    ),
    moved("logging_dir", note="exp_name isn't added to it"),
    moved("num_gpus_per_node", default=8),
    moved("max_steps", how="steps", default=500),
    moved("save_steps", default=50),
    moved("eval_steps", default=10),
    moved("rollout_batch_size", default=128),
    moved("num_return_sequences_in_group", default=1),
    moved("track_with", values={"stdout": "stdout"}, default="tensorboard"),
    *same("checkpoint_config.output_dir"),
    moved("max_ckpt_to_keep", "checkpoint_config.max_to_keep", "0 keeps all", how="positive"),
    moved("checkpoint_config.max_to_keep"),
    *dead("checkpoint_config.type", "checkpoint_config.output_dir says it: a folder, or an address such as s3://bucket/run",
          see="checkpoint_config.output_dir"),
    moved("checkpoint_config.async_upload", "checkpoint_config.async_save", "uploads, too, run while training goes on"),
    *absent("checkpoint_config.**", "checkpoints are files", see="checkpoint_config.output_dir"),
    decided(
        "tracker_kwargs.log_dir", "logging_dir", "trackers write below logging_dir; it is taken where that isn't given",
        how="log_dir",
    ),
    moved("tracker_kwargs.project", "tracker_kwargs", "below the tracker's name", how="tracker_option"),
    *(moved(f"tracker_kwargs.{key}", "tracker_kwargs", "below the tracker's name", how="tracker_option")
      for key in ("name", "entity", "group", "tags", "notes", "mode", "workspace", "tracking_uri")),
    moved("tracker_kwargs.experiment_name", "exp_name", how="if_free"),
    moved("tracker_kwargs.dir", "logging_dir", "trackers write below logging_dir", how="if_free"),
    moved("tracker_kwargs.logdir", "logging_dir", "trackers write below logging_dir", how="if_free"),
    *dead(
        "tracker_kwargs.api_key tracker_kwargs.login_kwargs.api_key tracker_kwargs.login_kwargs",
        "a key never stands in a file; export WANDB_API_KEY (SWANLAB_API_KEY, ...)",
    ),
    *absent("tracker_kwargs.**", "the tracker has no such option here", see="tracker_kwargs"),
    *dead(
        "hydra hydra.** defaults", "the file is composed here without Hydra's own settings; presets are filled in",
    ),
    *dead("generate_opt_level", "there is one scheduler, which works per request"),
    *dead("is_num_return_sequences_expand", "the scheduler always sends one request per response"),
    moved("use_additional_prompts", "is_use_additional_prompts"),
    *dead(
        "is_offload_states is_offload_optimizer_states_in_train_step offload_nccl",
        "roles that share devices give back their memory by themselves",
    ),
    *dead("local_rank", "ranks follow from device_mapping"),
    *dead("base_dir", "output_dir says where a run writes", see="output_dir"),
    moved("project_name", "tracker_kwargs", "as `project` below the tracker's name", how="project"),
    *dead("model_name", "a name that nothing here reads; exp_name is the run's", see="exp_name"),
    *dead("track_name", "it says nothing; track_with names trackers", see="track_with"),
    *dead("model_download_type", "models come from a folder or the hub that HF_ENDPOINT names"),
    *absent("save_logging_board_dir", "not available; see rollout_dump_dir", see="rollout_dump_dir logging_dir"),
    *same("profile_steps profiler_output_dir external_lib"),
    decided("profiler_timeline", "profile_steps profiler.tools", "true profiles step 2, with torch",
            how="profile_mode"),
    decided("profiler_memory", "profile_steps profiler.tools", "true profiles step 2, with memory", how="profile_mode"),
    *absent("report_length_and_rewards length_profiler_dir", "see rollout_dump_dir", see="rollout_dump_dir"),
    *absent("rollout_mock rollout_mock.**", "responses aren't taken from files without their rewards; replay_from "
            "trains on what a run has recorded", see="replay_from rollout_dump_dir"),
    *absent("user_defined_rollout_loop_cls", "code of your own goes into a rollout", see="rewards.<name>.rollout"),
    *dead("router_args router_args.**", "requests with one prefix go to one engine by themselves"),
    *absent(
        "val_prompt_length val_sequence_length", "validation has the lengths of training", see="prompt_length",
    ),
    *dead("balance_length", "ranks get equal token counts, see balance_batch", see="balance_batch"),
    *dead("minibatch_data_iter_num", "ppo_epochs says how often a batch is passed over", see="ppo_epochs"),
]  # fmt: skip
"""The run itself."""

POLICY: list[ForeignKey] = [
    *same(
        "ppo_epochs max_grad_norm l2 lambd gamma pg_clip pg_clip_low pg_clip_high dual_clip_loss dual_clip_c target_kl "
        "init_kl_coef kl_horizon use_reward_scaling add_len_reward reward_clip use_reward_norm whiten_rewards "
        "whiten_advantages advantage_clip add_token_level_kl critic_warmup use_kl_loss kl_loss_type entropy_loss_coef "
        "rl_loss_coef difficulty_loss_weight length_loss_weight max_len_mask difficulty_mask error_max_len_clip "
        "error_max_len_threshold reward_norm reward_shift reward_scale ratio_type topr_positive_weight "
        "topr_negative_weight tis_lower_bound tis_upper_bound kimi15_tau decoupled_ppo_cap "
        "sapo_tau_positive sapo_tau_negative cispo_epsilon_low cispo_epsilon_high"
    ),
    moved("adv_estimator", how="roll_estimator", default="gae"),
    moved("loss_agg_mode", default="seq-mean-token-mean"),
    moved("value_clip", default=None),
    moved("kl_loss_coef", default=0),
    moved("kl_penalty"),
    moved("difficulty_low_threshold", default=0.0),
    moved("difficulty_high_threshold", default=1.0),
    moved("postive_loss_coef", "sft_loss_coef"),
    moved("positive_loss_coef", "sft_loss_coef"),
    moved("sft_loss_coef"),
    decided(
        "use_pg_clip_range", "pg_clip_low pg_clip_high", "a range that is written counts: with false the two are left "
        "out", how="clip_range",
    ),
    decided(
        "use_topr_loss", "policy_loss", "true is policy_loss: topr, with topr_positive_weight and topr_negative_weight",
        how="topr",
    ),
    decided(
        "use_topr_neg_loss_coef", "policy_loss topr_negative_weight", "above 0 is policy_loss: topr with this weight "
        "of negative samples", how="topr_weight",
    ),
    decided(
        "use_policy_loss_type", "policy_loss", "PPO is ppo, PG is reinforce", values={"PPO": "ppo", "PG": "reinforce"},
    ),
    decided(
        "importance_sampling", "policy_loss", "seq is policy_loss: gspo", values={"token": "ppo", "seq": "gspo"},
    ),
    moved("pg_variant", "policy_loss", values={"vanilla": "reinforce", "ppo": "ppo"}),
    *dead(
        "enable_reference", "a reference is started when a KL term uses it", see="reference use_kl_loss"
    ),
    *dead(
        "enable_old_logprobs_recompute force_disable_old_logprobs_recompute",
        "old log-probs are computed where the update needs them",
    ),
    *dead("mask_type", "masks leave responses out of the loss"),
    decided("norm_mean_type", "reward_norm", "one level for the mean and the deviation", how="norm_type"),
    decided("norm_std_type", "reward_norm", "one level for the mean and the deviation", how="norm_type"),
    decided(
        "val_greedy", "validation.generating_args.temperature", "true is temperature 0", how="greedy",
    ),
    moved("val_n_sample", "validation.generating_args.num_return_sequences"),
    moved("train_infer_correction.is_weight.weight_type", "train_infer_correction.level", how="is_weight"),
    moved("train_infer_correction.is_weight.upper_bound", "train_infer_correction.importance_upper", how="is_weight"),
    moved("train_infer_correction.is_weight.enabled", "train_infer_correction", how="is_weight"),
    *dead("train_infer_correction.is_weight.detach", "the weight has no gradient"),
    moved(
        "train_infer_correction.filters", "train_infer_correction.ratio_low train_infer_correction.ratio_high "
        "train_infer_correction.difference_low train_infer_correction.difference_high train_infer_correction.level",
        "all filters share one level", how="is_filters",
    ),
]  # fmt: skip
"""Rewards -> advantages -> loss."""
