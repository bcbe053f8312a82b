"""Arguments of TRL's trainers: GRPO and its relatives, DPO, SFT, reward models, GKD."""

from __future__ import annotations

from roll.catalog.foreign_keys.rows import ForeignKey, absent, dead, decided, moved

_A, _T = "actor_train.model_args", "actor_train.training_args"
_GEN, _CONFIG = "actor_infer.generating_args", "actor_infer.strategy_args.strategy_config"
_DATA = "actor_train.data_args"

TRAINER: list[ForeignKey] = [
    *(moved(key, f"{_T}.{key}") for key in ("per_device_train_batch_size", "gradient_accumulation_steps",
      "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_steps", "warmup_ratio")),
    moved("learning_rate", f"{_T}.learning_rate", default=1e-6),
    moved("lr_scheduler_type", f"{_T}.lr_scheduler_type", how="schedule", default="linear"),
    *(moved(f"lr_scheduler_kwargs.{key}", f"{_T}.{ours}") for key, ours in {
        "num_cycles": "num_cycles", "power": "lr_decay_power", "timescale": "lr_timescale",
        "min_lr_rate": "min_lr_ratio", "min_lr_ratio": "min_lr_ratio", "num_decay_steps": "num_decay_steps",
        "decay_type": "wsd_decay_style"}.items()),
    *(decided(f"lr_scheduler_kwargs.{key}", f"{_T}.min_lr_ratio", "a share of the peak", how="min_lr")
      for key in ("min_lr", "lr_end")),
    moved("lr_scheduler_kwargs.warmup_type", f"{_T}.warmup_steps", "linear is what there is", how="linear_warmup"),
    *absent("lr_scheduler_kwargs.**", "the schedule has no such option here", see=f"{_T}.lr_scheduler_type"),
    moved("max_grad_norm"),
    moved("num_train_epochs", default=1),
    moved("max_steps", how="steps", default=None),
    moved("save_steps"), moved("eval_steps"), moved("logging_steps"), moved("seed"), moved("output_dir"),
    moved("logging_dir"),
    moved("run_name", "exp_name", how="name"),
    moved("report_to", "track_with", how="report_to"),
    moved("project", "tracker_kwargs", how="project"),
    moved("save_total_limit", "checkpoint_config.max_to_keep"),
    moved("metric_for_best_model", "save_best", "in the words of this run's validations", how="best_metric"),
    decided("load_best_model_at_end", "save_best", "the best checkpoint is kept; roll export RUN --step best writes it",
            how="best_at_end"),
    moved("greater_is_better", "save_best", "max: or min: in front of the metric", how="nothing"),
    moved("resume_from_checkpoint"),
    moved("eval_on_start", "val_before_train"),
    moved("bf16", f"{_A}.dtype", "true is bf16", how="half_type"),
    moved("fp16", f"{_A}.dtype", "true is fp16", how="half_type"),
    moved("gradient_checkpointing", f"{_A}.disable_gradient_checkpointing", "the other way round", how="not"),
    moved("use_liger_kernel", f"{_A}.use_liger"),
    moved("torch_compile", f"{_A}.torch_compile"),
    moved("deepspeed", "actor_train.strategy_args.strategy_config", "a file with DeepSpeed's keys",
          how="deepspeed_file"),
    moved("model_name_or_path", "pretrain"),
    moved("dtype", f"{_A}.dtype", how="dtype"),
    moved("torch_dtype", f"{_A}.dtype", how="dtype"),
    moved("attn_implementation", f"{_A}.attn_implementation", values={"flash_attention_2": "fa2"}),
    moved("trust_remote_code", f"{_A}.trust_remote_code"),
    decided("use_peft", f"{_A}.lora_rank", "adapters are trained where lora_r is above 0", how="peft"),
    moved("lora_r", f"{_A}.lora_rank", how="peft", default=16),
    moved("lora_alpha", f"{_A}.lora_alpha", how="peft"),
    moved("lora_dropout", f"{_A}.lora_dropout", how="peft"),
    moved("lora_target_modules", f"{_A}.lora_target", how="peft"),
    moved("peft_config.**", f"{_A}.lora_rank", "lora_rank and its neighbours", how="nothing"),
    moved("model_init_kwargs.**", f"{_A}.model_config_kwargs", how="model_config"),
    moved("dataset_name", f"{_DATA}.file_name", "owner/name/config#split of the hub", how="trl_dataset"),
    moved("dataset_config", f"{_DATA}.file_name", "owner/name/config", how="of_trl_dataset"),
    moved("dataset_train_split", f"{_DATA}.file_name", "owner/name#split", how="of_trl_dataset"),
    moved("dataset_num_proc", f"{_DATA}.preprocessing_num_workers"),
    moved("shuffle_dataset", f"{_DATA}.shuffle"),
    *dead("eval_strategy evaluation_strategy save_strategy logging_strategy do_train do_eval logging_first_step "
          "remove_unused_columns dataloader_num_workers dataloader_pin_memory ddp_find_unused_parameters "
          "gradient_checkpointing_kwargs.** log_level overwrite_output_dir per_device_eval_batch_size "
          "disable_dropout tf32 bf16_full_eval hub_model_id hub_strategy push_to_hub hub_private_repo "
          "dataset_test_split ds3_gather_for_generation load_in_4bit load_in_8bit "
          "log_completions_hub_repo average_tokens_across_devices", "it is of Hugging Face's trainer"),
    moved("optim", f"{_T}.optimizer", how="optimizer"),
    *absent("optim_args", "the optimizer has options of its own", see=f"{_T}.optimizer"),
    *absent("dataset_mixture.**", "file_name takes several files", see=f"{_DATA}.file_name"),
]  # fmt: skip
"""What every trainer has."""

GRPO: list[ForeignKey] = [
    moved("num_generations", "num_return_sequences_in_group", default=8),
    decided("generation_batch_size", "rollout_batch_size", "in prompts: divided by num_generations", how="trl_batch"),
    decided("steps_per_generation", "rollout_batch_size", "in prompts: per device x steps x ranks / num_generations",
            how="trl_batch"),
    moved("num_iterations", "ppo_epochs"),
    moved("max_prompt_length", "prompt_length"),
    moved("max_completion_length", "response_length", default=256),
    moved("temperature", f"{_GEN}.temperature"),
    decided("top_p", f"{_GEN}.top_p", "off in training", how="truncation"),
    decided("top_k", f"{_GEN}.top_k", "off in training", how="truncation"),
    decided("repetition_penalty", f"{_GEN}.repetition_penalty", "off in training", how="truncation"),
    moved("beta", "kl_loss_coef use_kl_loss", "above 0 with use_kl_loss: true", how="trl_beta"),
    moved("epsilon", "pg_clip"),
    moved("epsilon_high", "pg_clip_high"),
    moved("delta", "dual_clip_c", "a bound of the ratio, whatever the advantage", how="nothing"),
    moved("loss_type", "loss_agg_mode", "grpo is seq-mean-token-mean, dapo and bnpo are token-mean, dr_grpo is "
          "seq-mean-token-sum-norm", values={"grpo": "seq-mean-token-mean", "dapo": "token-mean", "bnpo": "token-mean",
          "dr_grpo": "seq-mean-token-sum-norm"}, default="dapo", how="trl_loss"),
    moved("scale_rewards", "adv_estimator", "none (false) is adv_estimator: dr_grpo", how="scale_rewards"),
    moved("importance_sampling_level", "policy_loss", "sequence is policy_loss: gspo",
          values={"token": "ppo", "sequence": "gspo"}),
    moved("mask_truncated_completions", "max_len_mask"),
    moved("reward_weights", "rewards.<name>.parts", "with the reward called weighted", how="reward_weights"),
    moved("reward_funcs", "rewards.<name>.name", "a function of prompts, completions and columns is taken as it is",
          how="reward_funcs"),
    moved("reward_model_name_or_path", "reward_model.model_args.model_name_or_path", how="trl_reward_model"),
    moved("use_vllm", "actor_infer.strategy_args.strategy_name", "true is vllm", values={True: "vllm",
          False: "hf_infer"}),
    decided("vllm_mode", "actor_infer.strategy_args.strategy_name", "engines are part of the run, on the slots of "
            "actor_infer", how="nothing"),
    moved("vllm_gpu_memory_utilization", f"{_CONFIG}.gpu_memory_utilization"),
    moved("vllm_tensor_parallel_size", f"{_CONFIG}.tensor_parallel_size actor_infer.num_gpus_per_worker", how="both"),
    moved("vllm_max_model_length", f"{_CONFIG}.max_model_len"),
    moved("vllm_enable_sleep_mode", f"{_CONFIG}.sleep_level", values={True: None, False: 0}),
    moved("vllm_importance_sampling_correction", "train_infer_correction", how="trl_correction"),
    moved("vllm_importance_sampling_cap", "train_infer_correction.importance_upper", how="trl_correction"),
    decided("sync_ref_model", "reference", "the reference stays", how="false_is_none"),
    moved("log_completions", "rollout_dump_dir", "rollout_dump_dir is a folder for all responses", how="nothing"),
    moved("num_completions_to_print", "log_val_generations", how="nothing"),
    moved("chat_template_kwargs", "chat_template_kwargs", how="template_variables"),
    moved("chat_template_kwargs.**", "chat_template_kwargs", how="template_variables"),
    moved("use_liger_loss", f"{_A}.use_fused_kernels"),
    moved("top_entropy_quantile", "policy_loss", how="one_is_none"),
    *dead("vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout vllm_group_port "
          "vllm_model_impl", "the engine is called directly, there is no server"),
    *dead("shuffle_prompts cache_implementation use_transformers_paged generation_kwargs.** wandb_log_unique_prompts "
          "ref_model_mixup_alpha ref_model_sync_steps min_p", "it is of TRL's generation"),
]  # fmt: skip
"""GRPO, and RLOO with the same names."""

PREFERENCES: list[ForeignKey] = [
    moved("max_length", "sequence_length"),
    moved("precompute_ref_log_probs"),
    moved("label_smoothing"),
    moved("simpo_gamma"),
    moved("desirable_weight"),
    moved("undesirable_weight"),
    moved("center_rewards_coefficient"),
    moved("reference_free", "loss_type", "true is a loss without a reference: simpo or orpo", how="false_is_none"),
    absent("rpo_alpha", "there is no cross-entropy beside DPO; loss_type: orpo has one", see="loss_type")[0],
    moved("ref_model", "reference.model_args.model_name_or_path"),
    moved("completion_only_loss", "train_on", how="nothing"),
    moved("assistant_only_loss", "train_on", "true is train_on: all", values={True: "all", False: "last"}),
    moved("packing", "actor_train.use_sequence_packing"),
    moved("padding_free", "actor_train.use_sequence_packing"),
    moved("dataset_text_field", "actor_train.data_args.response", how="nothing"),
    moved("lmbda", "pipeline", "1 is pipeline: distill, 0 is pipeline: sft with a teacher", how="nothing"),
    moved("teacher_model_name_or_path", "teacher.model_args.model_name_or_path"),
    *dead("max_prompt_length max_target_length truncation_mode padding_value label_pad_token_id is_encoder_decoder "
          "generate_during_eval model_adapter_name ref_adapter_name force_use_ref_model use_logits_to_keep "
          "eos_token pad_token chat_template_path", "sequence_length bounds a row", see="sequence_length"),
]  # fmt: skip
"""DPO, KTO, ORPO, CPO; SFT; reward models; GKD."""
