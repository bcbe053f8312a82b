"""Words users bring that aren't keys here (yet), and what to say about each."""

from __future__ import annotations

UNSUPPORTED_KEYS: dict[str, str] = {
    "generate_opt_level": "there is one scheduler, which works per request",
    "is_num_return_sequences_expand": "the scheduler always sends one request per response",
    "save_logging_board_dir": "not available in this version; see rollout_dump_dir",
    "model_update_frequency": "weights are synchronised after every step",
    "max_concurrency": "calls that a worker takes at once belong to its role; see max_running_requests for engines",
    "worker_cls": "a role has one worker class; code of your own goes into rewards, environments and rollouts",
    "checkpoint_config.type": "checkpoint_config.output_dir says it: a folder, or an address such as s3://bucket/run",
    "strategy_config.scheduler": "training_args.lr_scheduler_type and its neighbours say it for every backend",
    "strategy_config.activation_checkpointing": "model_args.disable_gradient_checkpointing says it for every backend",
    "model_args.model_type": "the model's own configuration says it",
    "use_thread_lock": "an environment process makes one call after the other",
    "max_env_step_concurrent": "an environment process makes one call after the other; see env_workers.world_size",
    "llm_proxy": "environments' responses come from actor_infer",
    "batch_adjust_mode": "mini-batches are whole trajectories, as many as gradient accumulation takes",
    "response": "reference responses aren't used in RLVR; see data_args.ground_truth",
    "logprobs": "log-probs of sampled tokens are always kept",
    "ep_size": (
        "with fsdp2_* every rank holds all experts (in shards); to spread them choose megatron_* and its "
        "expert_model_parallel_size"
    ),
    "forward_prefetch": "FSDP2 gathers the next layer's weights ahead by itself",
    "image_key": "rows are text: models of images aren't supported in this version",
    "video_key": "rows are text: models of videos aren't supported in this version",
    "return_raw_chat": "messages always reach rewards and rollouts, as task.payload['messages']",
    "return_raw_input_ids": "a reward model with another tokenizer encodes messages itself, see reward_model.template",
    "return_full_prompt": "rewards and rollouts always see the whole row, see task.payload",
    "calculate_log_probs": "log-probs of sampled tokens are always kept",
    "calculate_sum_pi_squared": "adv_estimator: optimal_token_baseline asks for what it needs",
    "launch_reward_fn_async": "rewards are always computed beside generation, see rewards.<domain>.world_size",
    "ray_init.runtime_env": "environment variables go into system_envs; workers import what the controller imports",
    "ray_init.include_dashboard": (
        "a dashboard has no password, and the Ray of a run listens to its own machine alone; start one with "
        "`ray start --head` and join it with num_nodes"
    ),
    "ray_init.num_gpus": "write num_gpus_per_node",
    "ray_init.address": "a run on several machines (num_nodes) joins the cluster that RAY_ADDRESS names",
    "ray_init._temp_dir": "the Ray of a run has a folder of its own below TMPDIR, which goes with it",
    "wrap_policy": "what is sharded together is what the model names as its layers",
}
"""Keys of the users' vocabulary that nothing would read in this version; `section.key` for one of a section."""

OTHER_PIPELINE_KEYS: dict[str, dict[str, str]] = {
    "rlvr": {
        "reward_normalization": "see reward_norm",
        "train_env_manager": "see rewards.<domain>.rollout for episodes of several turns",
        "val_env_manager": "see validation",
        "validation_share": "see validation",
    },
    "agentic": {
        "rewards": "environments give the rewards, see custom_envs",
        "custom_reward_function": "environments give the rewards, see custom_envs; question_answer-v1 takes a function",
        "reward_model": "environments give the rewards, see custom_envs",
        "num_return_sequences_in_group": "write train_env_manager.group_size",
        "validation": "write val_env_manager",
        "global_template": "see custom_envs.<tag>.system_template and turn_template",
        "tag_to_template": "see custom_envs.<tag>.system_template and turn_template",
        "num_train_epochs": "environments have no epochs, write max_steps",
        "truncation": "a context that is too long ends its episode",
        "reward_retries": "a failed environment ends its episode; group_size_redundancy makes up for it",
        "cosine_length": "it knows the limit of one response; max_tokens_per_step bounds a turn",
        "overlong_shaping": "it knows the limit of one response; max_tokens_per_step bounds a turn",
        **dict.fromkeys(
            ("reward_norm", "reward_shift", "reward_scale", "use_reward_scaling", "use_reward_norm"),
            "see reward_normalization",
        ),
        "data_args": "tasks are environments and seeds (custom_envs); prompts take the tokenizer's own chat template",
    },
    "sft": {"response_length": "write sequence_length", "prompt_length": "write sequence_length"},
    "dpo": {
        "response_length": "write sequence_length",
        "prompt_length": "write sequence_length",
        "ipo": "write loss_type: ipo",
        "chosen_key": "it stands in actor_train.data_args, with rejected_key",
        "rejected_key": "it stands in actor_train.data_args, with chosen_key",
    },
    "reward_model": {"response_length": "write sequence_length", "prompt_length": "write sequence_length"},
    "distill": {
        "custom_envs": "environments are of pipeline: agentic, which takes a section teacher, too",
        "messages": "prompts are in data_args.prompt; texts to learn from are rows of pipeline: sft with a teacher",
    },
}
"""By pipeline: keys that only others have, and what it has instead."""

_VLLM = "it is an option of vllm: write it into actor_infer.strategy_args.strategy_config with strategy_name: vllm"
_SGLANG = _VLLM.replace("vllm", "sglang")

FOREIGN_KEYS: dict[str, str] = {
    "tensor_parallel_size": "megatron_* has tensor_model_parallel_size; vllm and sglang, in actor_infer, have this one",
    "gpu_memory_utilization": f"{_VLLM}; for sglang see mem_fraction_static",
    "max_model_len": _VLLM,
    "max_num_seqs": _VLLM,
    "enforce_eager": _VLLM,
    "load_format": _VLLM,
    "sleep_level": _VLLM,
    "mem_fraction_static": f"{_SGLANG}; for vllm see gpu_memory_utilization",
    "free_cache_engine": "write sleep_level, an option of vllm",
    "tensor_model_parallel_size": "an option of megatron_*; vllm and sglang have tensor_parallel_size",
    "use_topr_loss": "write policy_loss: topr",
    "pg_variant": "write policy_loss",
    "train_batch_size": "write rollout_batch_size",
    "ppo_mini_batch_size": (
        "the mini-batch is per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks"
    ),
    "ppo_micro_batch_size_per_gpu": "write training_args.per_device_train_batch_size",
    "use_dynamic_bsz": "write use_dynamic_batching_in_train",
    "use_remove_padding": "write use_sequence_packing",
    "ulysses_sequence_parallel_size": "write model_args.ulysses_size",
    "enable_gradient_checkpointing": "write model_args.disable_gradient_checkpointing, the other way round",
    "enable_activation_offload": "write model_args.activation_offload",
    "use_torch_compile": "write model_args.torch_compile",
    "override_config": "write model_args.model_config_kwargs",
    "model_dtype": "write model_args.dtype",
    "param_offload": (
        "an option of fsdp2_*, in strategy_config; deepspeed_* has zero_optimization.offload_param; roles that share "
        "devices leave them in turns anyway"
    ),
    "optimizer_offload": (
        "an option of fsdp2_*, in strategy_config; deepspeed_* has zero_optimization.offload_optimizer, megatron_* "
        "optimizer_cpu_offload"
    ),
    "tokenizer_path": "write model_args.tokenizer_name_or_path",
    "tokenizer": "write model_args.tokenizer_name_or_path",
    "custom_tokenizer_path": "write model_args.tokenizer_name_or_path",
    "external_libs": "write external_lib",
    "freeze_modules": "write model_args.freeze_module_prefix",
    "torch_dtype": "write model_args.dtype",
    "fsdp_config": "write strategy_args.strategy_config with strategy_name: fsdp2_train",
    "strategy": "write strategy_args.strategy_name: fsdp2_train for verl's fsdp and fsdp2, megatron_train for megatron",
    "ray_kwargs": "write ray_init",
    "lr_warmup_steps": "write training_args.warmup_steps",
    "lr_warmup_steps_ratio": "write training_args.warmup_ratio",
    "warmup_style": "write training_args.lr_scheduler_type",
    "lr_decay_style": "write training_args.lr_scheduler_type",
    "lr_warmup_init": "write training_args.warmup_init_ratio, a share of learning_rate",
    "min_lr": "write training_args.min_lr_ratio, a share of learning_rate",
    "lr_scheduler_kwargs": (
        "its keys stand beside lr_scheduler_type: num_cycles, min_lr_ratio (min_lr_rate), lr_decay_power (power), "
        "lr_timescale (timescale), wsd_decay_ratio (num_decay_steps), wsd_decay_style (decay_type)"
    ),
    "lr_wsd_decay_style": "write training_args.wsd_decay_style",
    "lr_wsd_decay_steps": "write training_args.wsd_decay_ratio, a share of the steps after the warm-up",
    "wsd_decay_steps": "write training_args.wsd_decay_ratio, a share of the steps after the warm-up",
    "num_decay_steps": "write training_args.wsd_decay_ratio, a share of the steps after the warm-up",
    "start_weight_decay": "write training_args.weight_decay",
    "lr_decay_iters": "write training_args.lr_decay_steps",
    "optim": "write training_args: its optimizer, learning_rate, lr_scheduler_type and the rest",
    "optimizer_type": "write training_args.optimizer",
    "momentum": "write training_args.muon_momentum",
    "ppo_max_token_len_per_gpu": "write max_tokens_per_microbatch_in_train",
    "log_prob_micro_batch_size_per_gpu": "write infer_batch_size",
    "log_prob_max_token_len_per_gpu": "write max_tokens_per_microbatch_in_infer",
    "max_prompt_length": "write prompt_length",
    "max_response_length": "write response_length",
    "norm_adv_by_std_in_grpo": "for false write adv_estimator: dr_grpo",
    "use_kl_in_reward": "write add_token_level_kl",
    "kl_ctrl": "write init_kl_coef, target_kl and kl_horizon",
    "kl_coef": "write init_kl_coef (KL in the reward) or kl_loss_coef (KL in the loss)",
    "clip_ratio": "write pg_clip",
    "clip_ratio_low": "write pg_clip_low",
    "clip_ratio_high": "write pg_clip_high",
    "clip_ratio_c": "write dual_clip_c",
    "entropy_coeff": "write entropy_loss_coef",
    "grad_clip": "write max_grad_norm",
    "lam": "write lambd",
    "val_kwargs": "write validation.generating_args",
    "total_epochs": "write num_train_epochs",
    "total_training_steps": "write max_steps",
    "save_freq": "write save_steps",
    "test_freq": "write eval_steps",
    "resume_mode": "write resume_from_checkpoint",
    "resume_from_path": "write resume_from_checkpoint",
    "logger": "write track_with",
    "rollout_data_dir": "write rollout_dump_dir",
    "max_actor_ckpt_to_keep": "write checkpoint_config.max_to_keep",
    "max_critic_ckpt_to_keep": "write checkpoint_config.max_to_keep: a checkpoint holds actor and critic",
    "max_ckpt_to_keep": "write checkpoint_config.max_to_keep",
    "default_local_dir": "write checkpoint_config.output_dir",
    "default_hdfs_dir": "write checkpoint_config.output_dir, as an address such as hdfs://host/run",
    "del_local_ckpt_after_load": "write checkpoint_config.delete_after_load",
    "remove_previous_ckpt_in_save": (
        "write checkpoint_config.max_to_keep: 1, which removes the one before when the next is complete"
    ),
    "async_upload": "write checkpoint_config.async_save: with it uploads, too, run while training goes on",
    "nnodes": "write num_nodes",
    "n_gpus_per_node": "write num_gpus_per_node",
    "reward_manager": "write rewards",
    "profiler_timeline": "write profile_steps, e.g. [2]; profiler.tools is torch then",
    "profiler_memory": "write profile_steps, e.g. [2], and profiler.tools: memory",
    "global_profiler": "write profile_steps for its steps, profiler.tools for tool, profiler_output_dir for save_path",
    "timeline_json_file": "write profiler.ray_timeline: true; the file is ray_timeline.json in profiler_output_dir",
    "env_manager_cls": "write sample_unit: trajectory for TrajEnvManager, sample_unit: step for StepEnvManager",
    "env_groups": "write num_env_groups",
    "n_groups": "write num_groups_partition",
    "agent_system_template": "write system_template",
    "agent_template": "write turn_template",
    "clip_cov_ratio": "write policy_loss: {name: clip_cov, cov_ratio: ...}",
    "clip_cov_lb": "write policy_loss: {name: clip_cov, cov_low: ...}",
    "clip_cov_ub": "write policy_loss: {name: clip_cov, cov_high: ...}",
    "kl_cov_ratio": "write policy_loss: {name: kl_cov, cov_ratio: ...}",
    "ppo_kl_coef": "write policy_loss: {name: kl_cov, kl_coef: ...}",
    "loss_mode": "write policy_loss",
    "student": "write actor_train",
    "student_pretrain": "write pretrain",
    "teacher_pretrain": "write teacher.model_args.model_name_or_path",
    "teacher_model_name_or_path": "write teacher.model_args.model_name_or_path",
    "kd_objective": "write distill.divergence",
    "kd_temperature": "distributions are compared at the temperature of actor_infer.generating_args",
    "logits_topk": "write distill.top_k",
    "distill_loss_weight": "write distill.coef (and for sft distill.sft_coef)",
    "use_opd": "add a section teacher",
    "is_pure_opd": "write pipeline: distill, or distill.reward_coef: 0",
    "opd_kl_coef": "write distill.coef",
    "rpo_alpha": "there is no cross-entropy beside DPO; loss_type: orpo has one",
    "reference_free": "write loss_type: simpo or orpo, which have no reference",
    "ref_model": "write reference",
    "max_completion_length": "write response_length",
    "num_generations": "write num_return_sequences_in_group; in agentic train_env_manager.group_size",
    "reward_fn_key": "write data_args.tag, the column whose values rewards.<domain>.tag_included lists",
    "data_source": "a column of rows, no key: data_args.tag names another, rewards.<domain>.tag_included its values",
    "custom_cls": "write data_args.dataset: path/to/file.py:Class, and its options in data_args.dataset_args",
    "use_fire_sampling": "write actor_infer.generating_args.fire_temperature: 30 (and fire_top_k: 16)",
    "completion_callback": "write rewards.<domain>.rollout, a class of your own that plays the turns",
    "validation_shuffle": "write validation.shuffle",
    "filter_overlong_prompts_workers": "write data_args.preprocessing_num_workers",
    "n_samples": "generation over a file is a command: roll eval generate DATA --model M --n_samples N",
    "output_path": "generation over a file is a command: roll eval generate DATA --model M --output_path FILE",
    "data_source_key": "scoring a file is a command: roll eval score FILE --data_source_key COLUMN",
    "reward_model_key": "scoring a file is a command: roll eval score FILE --reward_model_key COLUMN",
    "reward": "write reward_model for a model that scores; functions have rewards.<domain>.world_size processes",
}
"""Words of other frameworks and older spellings, with this project's key."""

_TURNS = "write optimal_token_baseline: it counts the action tokens of all turns"
UNSUPPORTED_VALUES: dict[str, dict[str, str]] = {
    "adv_estimator": {
        "tir_optimal_token_baseline": _TURNS,
        "grpo_passk": "write pass_at_k",
        "grpo_vectorized": "write grpo",
        "rloo_vectorized": "write rloo",
    },
    "strategy_name": {
        given: f"write {name}_train for a role that trains, {name}_infer for one that doesn't"
        for given, name in {"fsdp": "fsdp2", "fsdp2": "fsdp2", "deepspeed": "deepspeed", "megatron": "megatron"}.items()
    },
    "attn_implementation": {
        "flash_attention_3": "kernels are auto, eager, sdpa and fa2",
        "flex_attention": "kernels are auto, eager, sdpa and fa2",
    },
    "weight_decay_incr_style": {"constant": "without end_weight_decay it is constant; remove both"},
    "lr_scheduler_type": {
        "reduce_lr_on_plateau": "the learning rate follows the steps alone, not what is measured; see cosine and wsd"
    },
}
"""Values of the users' vocabulary, by key, that are refused with a reason of their own."""
