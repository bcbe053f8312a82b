"""Keys of Alibaba's ROLL in the sections of roles: placement, model, training, sampling, backends."""

from __future__ import annotations

from roll.catalog.foreign_keys.rows import ForeignKey, absent, dead, decided, moved, same

ROLES = {
    "actor_train": "actor_train", "actor_infer": "actor_infer", "reference": "reference", "critic": "critic",
    "student": "actor_train", "sft_train": "actor_train", "teacher": "teacher", "student_train": "actor_train",
    "student_infer": "actor_infer", "reward_model": "reward_model",
}  # fmt: skip
"""Their roles by ours."""

_R = "<role>"
_MODEL, _TRAIN, _DATA, _GEN = f"{_R}.model_args", f"{_R}.training_args", f"{_R}.data_args", f"{_R}.generating_args"
_CONFIG = f"{_R}.strategy_args.strategy_config"

PLACEMENT: list[ForeignKey] = [
    *same("world_size system_envs use_dynamic_batching_in_train use_dynamic_batching_in_infer "
          "sequence_length_round_in_train sequence_length_round_in_infer use_sequence_packing infer_batch_size", _R),
    moved(f"{_R}.max_tokens_per_microbatch_in_train", how="positive"),
    moved(f"{_R}.max_tokens_per_microbatch_in_infer", how="positive"),
    moved(f"{_R}.device_mapping", how="slots"),
    decided(f"{_R}.num_gpus_per_worker", f"{_R}.num_gpus_per_worker",
            "the devices of one engine: tensor_parallel_size times its pipeline stages", how="per_worker"),
    *dead("name worker_cls", "a role has one worker class; code of your own goes into rewards, environments, rollouts",
          _R),
    *dead("max_concurrency", "calls that a worker takes at once belong to its role", _R, see="max_running_requests"),
    *dead("model_update_frequency", "weights are synchronised after every step", _R),
    *dead("backend_timeout", "rpc_timeout limits calls", _R, see="rpc_timeout"),
    *dead("logits_in_fp32", "log-probs are computed in fp32", _R),
    *dead("apply_loss_scale", "loss and gradient don't depend on the layout", _R),
    *dead("sequence_packing_args.**", "packing fills passes up to max_tokens_per_microbatch_in_train", _R,
          see=f"{_R}.max_tokens_per_microbatch_in_train"),
    *(moved(f"{_R}.topr_{sign}_weight", f"topr_{sign}_weight") for sign in ("positive", "negative")),
    moved(f"{_R}.pg_variant", "policy_loss", values={"vanilla": "reinforce", "ppo": "ppo"}),
    decided(f"{_R}.strategy_args.strategy_name", f"{_R}.strategy_args.strategy_name",
            "hf_infer as a role that scores is fsdp2_infer, the same model behind the same forward pass",
            how="roll_strategy"),
    moved(f"{_R}.strategy_args.strategy_config", how="strategy_config"),
]  # fmt: skip
"""Where a role runs."""

MODEL: list[ForeignKey] = [
    *same("tokenizer_name_or_path external_lib use_shm model_name_or_path adapter_name_or_path "
          "model_config_kwargs lora_dropout "
          "ulysses_size trust_remote_code use_liger", _MODEL),
    moved(f"{_MODEL}.dtype", how="dtype", default="bf16"),
    decided(f"{_MODEL}.attn_implementation", f"{_MODEL}.attn_implementation",
            "megatron_*, vllm and sglang have attention of their own", how="attention",
            values={"flash_attention_2": "fa2", None: "auto"}),
    decided(f"{_MODEL}.flash_attn", f"{_MODEL}.attn_implementation",
            "megatron_*, vllm and sglang have attention of their own", how="attention",
            values={"flash_attention_2": "fa2", "disabled": "eager", None: "auto"}),
    decided(f"{_MODEL}.disable_gradient_checkpointing", f"{_MODEL}.disable_gradient_checkpointing",
            "an engine, and a role that doesn't train, have no backward pass", how="checkpointing"),
    decided(f"{_MODEL}.lora_rank", f"{_MODEL}.lora_rank", "adapters are of the role that trains", how="lora"),
    decided(f"{_MODEL}.lora_alpha", f"{_MODEL}.lora_alpha", "adapters are of the role that trains", how="lora"),
    decided(f"{_MODEL}.lora_target", f"{_MODEL}.lora_target", "a text with commas is a list", how="lora"),
    decided(f"{_MODEL}.freeze_module_prefix", f"{_MODEL}.freeze_module_prefix", "a text with commas is a list",
            how="list"),
    decided(f"{_MODEL}.additional_target", f"{_MODEL}.lora_target", "adapters are put on layers; none is trained whole",
            how="nothing"),
    moved(f"{_MODEL}.moe_aux_loss_coef", f"{_CONFIG}.moe_aux_loss_coeff", how="megatron_only"),
    *dead("model_type num_labels", "the model's own configuration says it", _MODEL),
    *dead("device_map", "ranks are placed by device_mapping", _MODEL, see=f"{_R}.device_mapping"),
    *dead("autocast_adapter_dtype", "adapters are kept in fp32", _MODEL),
    *dead("gradient_checkpointing_use_reentrant", "checkpointing isn't reentrant", _MODEL),
    *absent("vision_dp freeze_vision_tower", "models of text only", _MODEL),
]  # fmt: skip
"""`model_args`."""

TRAINING: list[ForeignKey] = [
    *same("learning_rate min_lr_ratio warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon "
          "per_device_train_batch_size gradient_accumulation_steps", _TRAIN),
    moved(f"{_TRAIN}.lr_scheduler_type", how="schedule"),
    moved(f"{_TRAIN}.lr_scheduler_kwargs.num_cycles", f"{_TRAIN}.num_cycles"),
    moved(f"{_TRAIN}.lr_scheduler_kwargs.power", f"{_TRAIN}.lr_decay_power"),
    moved(f"{_TRAIN}.lr_scheduler_kwargs.timescale", f"{_TRAIN}.lr_timescale"),
    decided(f"{_TRAIN}.num_train_epochs", "num_train_epochs", "max_steps decides where both are given", how="epochs"),
    moved(f"{_TRAIN}.max_grad_norm", "max_grad_norm", how="if_free"),
    moved(f"{_TRAIN}.seed", "seed", how="if_free"),
    moved(f"{_TRAIN}.max_steps", "max_steps", how="if_free"),
    moved(f"{_TRAIN}.lr_scheduler_kwargs.min_lr_ratio", f"{_TRAIN}.min_lr_ratio"),
    moved(f"{_TRAIN}.lr_scheduler_kwargs.min_lr_rate", f"{_TRAIN}.min_lr_ratio"),
    *dead("bf16 fp16", "model_args.dtype says it", _TRAIN, see=f"{_MODEL}.dtype"),
    *dead("output_dir logging_dir save_steps eval_steps logging_steps report_to run_name",
          "the key of the top level says it", _TRAIN, see="output_dir"),
    *dead("per_device_eval_batch_size dataloader_num_workers remove_unused_columns ddp_timeout save_strategy "
          "evaluation_strategy eval_strategy", "it is Hugging Face's trainer's", _TRAIN),
    moved(f"{_TRAIN}.optim", f"{_TRAIN}.optimizer", how="optimizer"),
    *absent("lr_scheduler_kwargs.**", "the keys of a schedule stand beside lr_scheduler_type", _TRAIN,
            see=f"{_TRAIN}.lr_scheduler_type"),
]  # fmt: skip
"""`training_args`."""

DATA: list[ForeignKey] = [
    decided(f"{_DATA}.template", f"{_DATA}.template", "a model family's name is native: the tokenizer's own template",
            how="template"),
    moved(f"{_DATA}.file_name", how="files"),
    *same("messages tag id domain_interleave_probs preprocessing_num_workers shuffle filter_overlong_prompts", _DATA),
    moved(f"{_DATA}.prompt", how="column"),
    decided(f"{_DATA}.response", f"{_DATA}.ground_truth", "in RLVR it is what the reward compares against, elsewhere "
            "the text to learn", how="response"),
    *dead("dataset_dir", "file_name is relative to the working directory; a folder in front of it is kept", _DATA,
          see=f"{_DATA}.file_name"),
    *dead("cache_path overwrite_cache dataset_type interleave_probs eval_dataset_type cutoff_len val_size",
          "files are read as they are, by their endings", _DATA),
    moved(f"{_DATA}.eval_file_name", "validation.data_args.file_name", how="files"),
    *absent("max_samples", "rows aren't counted out; cut the file", _DATA),
]  # fmt: skip
"""`data_args`."""

SAMPLING: list[ForeignKey] = [
    *same("do_sample repetition_penalty num_beams include_stop_str_in_output ignore_eos", _GEN),
    moved(f"{_GEN}.max_new_tokens", how="max_new_tokens"),
    moved(f"{_GEN}.temperature", default=0.95),
    decided(f"{_GEN}.top_p", f"{_GEN}.top_p", "off in training, whose log-probs are those of the full distribution",
            how="truncation", default=0.7),
    decided(f"{_GEN}.top_k", f"{_GEN}.top_k", "off in training, whose log-probs are those of the full distribution",
            how="truncation", default=50),
    moved(f"{_GEN}.stop_strings", how="stops"),
    decided(f"{_GEN}.num_return_sequences", f"{_GEN}.num_return_sequences",
            "the group's size rules in training", how="returned"),
    *dead("max_length", "max_new_tokens bounds a response", _GEN, see=f"{_GEN}.max_new_tokens"),
    *dead("length_penalty", "it is of beam search", _GEN),
    *dead("logprobs", "log-probs of sampled tokens are always kept", _GEN),
    *absent("min_p presence_penalty frequency_penalty", "log-probs wouldn't know it", _GEN),
]  # fmt: skip
"""`generating_args`."""

_SPLIT = ("account_for_loss_in_pipeline_split account_for_embedding_in_pipeline_split "
          "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage bias_activation_fusion "
          "apply_rope_fusion bias_dropout_fusion masked_softmax_fusion gradient_accumulation_fusion "
          "moe_router_load_balancing_type moe_permute_fusion moe_router_fusion")  # fmt: skip

BACKENDS: list[ForeignKey] = [
    *same("tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
          "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
          "recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute "
          "moe_token_dispatcher_type moe_grouped_gemm moe_shared_expert_overlap moe_router_dtype moe_aux_loss_coeff "
          "overlap_grad_reduce overlap_param_gather use_distributed_optimizer optimizer_cpu_offload transformer_impl "
          "additional_configs", _CONFIG),
    *(moved(f"{_CONFIG}.{key}", f"{_CONFIG}.additional_configs", how="additional") for key in _SPLIT.split()),
    moved(f"{_CONFIG}.max_grad_norm", "max_grad_norm", how="if_free"),
    moved(f"{_CONFIG}.bf16", f"{_MODEL}.dtype", how="half_type"),
    moved(f"{_CONFIG}.fp16", f"{_MODEL}.dtype", how="half_type"),
    *same("param_offload optimizer_offload fsdp_size param_dtype reduce_dtype reshard_after_forward offload_policy",
          _CONFIG),
    *absent("ep_size", "with fsdp2_* every rank holds all experts, in shards; to spread them choose megatron_*",
            _CONFIG, see=f"{_CONFIG}.expert_model_parallel_size"),
    *dead("forward_prefetch", "FSDP2 gathers the next layer's weights ahead by itself", _CONFIG),
    *dead("wrap_policy", "what is sharded together is what the model names as its layers", _CONFIG),
    moved(f"{_CONFIG}.ulysses_size", f"{_MODEL}.ulysses_size"),
    *same("zero_optimization zero_optimization.** train_batch_size train_micro_batch_size_per_gpu "
          "gradient_accumulation_steps gradient_clipping optimizer communication_data_type data_types "
          "prescale_gradients gradient_predivide_factor", _CONFIG),
    *dead("bf16.** fp16.** steps_per_print wall_clock_breakdown zero_allow_untested_optimizer "
          "zero_force_ds_cpu_optimizer", "DeepSpeed's section is filled in from the run", _CONFIG),
    *dead("scheduler", "training_args.lr_scheduler_type and its neighbours say it for every backend", _CONFIG,
          see=f"{_TRAIN}.lr_scheduler_type"),
    *same("gpu_memory_utilization block_size max_model_len max_num_seqs max_num_batched_tokens enable_prefix_caching "
          "enforce_eager load_format sleep_level quantization tensor_parallel_size mem_fraction_static "
          "attention_backend engine_args", _CONFIG),
    *dead("activation_checkpointing", "model_args.disable_gradient_checkpointing says it for every backend", _CONFIG),
]  # fmt: skip
"""`strategy_config`. A key that isn't here stays if the backend knows it."""
