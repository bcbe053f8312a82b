"""Keys of verl in its roles: actor, reference, rollout, critic, reward model."""

from __future__ import annotations

from roll.catalog.foreign_keys.rows import ForeignKey, absent, dead, decided, moved, same

_A, _F, _R = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_M, _C, _W = "actor_rollout_ref.model", "critic", "reward_model"
ROLES = {_A: "actor_train", _F: "reference", _R: "actor_infer", _C: "critic", _W: "reward_model"}
"""Their sections by our roles."""

STRATEGIES = {"fsdp": "fsdp2", "fsdp2": "fsdp2", "megatron": "megatron"}

LOSSES = {
    "vanilla": "ppo", "clip_cov": "clip_cov", "clip-cov": "clip_cov", "kl_cov": "kl_cov", "kl-cov": "kl_cov",
    "geo_mean": "gmpo", "gpg": "reinforce",
}  # fmt: skip
"""Their policy losses by ours, where the names differ."""

_GIVEN_BACK = "roles that share devices give back their memory by themselves"


def _fsdp(theirs: str, role: str) -> list[ForeignKey]:
    config, model = f"{role}.strategy_args.strategy_config", f"{role}.model_args"
    return [
        moved(f"{theirs}.fsdp_size", f"{config}.fsdp_size", "-1 is null: all ranks", how="positive"),
        moved(f"{theirs}.reshard_after_forward", f"{config}.reshard_after_forward", how="truth"),
        moved(f"{theirs}.offload_policy", f"{config}.offload_policy"),
        moved(f"{theirs}.cpu_offload", f"{config}.offload_policy"),
        moved(f"{theirs}.offload_params", f"{config}.offload_policy", how="if_true"),
        moved(f"{theirs}.param_offload", f"{config}.param_offload", how="if_true"),
        moved(f"{theirs}.optimizer_offload", f"{config}.optimizer_offload", how="if_true"),
        moved(f"{theirs}.grad_offload", f"{config}.offload_policy", _GIVEN_BACK, how="nothing"),
        moved(f"{theirs}.mixed_precision.param_dtype", f"{config}.param_dtype", how="dtype"),
        moved(f"{theirs}.mixed_precision.reduce_dtype", f"{config}.reduce_dtype", how="dtype"),
        *dead("mixed_precision.buffer_dtype", "buffers keep their type", theirs),
        decided(f"{theirs}.model_dtype", f"{model}.dtype", "weights that are trained are fp32; dtype is that of the "
                "forward pass", how="master_dtype"),
        moved(f"{theirs}.dtype", f"{model}.dtype", how="dtype"),
        moved(f"{theirs}.use_torch_compile", f"{model}.torch_compile", how="compile"),
        moved(f"{theirs}.ulysses_sequence_parallel_size", f"{model}.ulysses_size"),
        *dead("wrap_policy.** wrap_policy", "what is sharded together is what the model names as its layers", theirs),
        *dead("forward_prefetch", "FSDP2 gathers the next layer's weights ahead by itself", theirs),
        *dead("use_orig_params forward_only strategy seed full_determinism "
              "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing "
              "use_no_sync_for_gradient_accumulation pad_to_length pad_to_length_bucket", "it is so here, or isn't "
              "needed", theirs),
        *absent("qat.** turbo_config.** **", "FSDP2 has no such option here", theirs, see=config),
    ]  # fmt: skip


def _megatron(theirs: str, role: str) -> list[ForeignKey]:
    config = f"{role}.strategy_args.strategy_config"
    override = f"{theirs}.override_transformer_config"
    return [
        *same("tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
              "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
              "use_distributed_optimizer", theirs, ours_under=config),
        moved(f"{theirs}.sequence_parallel", f"{config}.sequence_parallel", "acts with tensor parallelism",
              how="sequence_parallel"),
        *(moved(f"{override}.{key}", f"{config}.{key}", how="of_training") for key in
          ("recompute_granularity", "recompute_method", "recompute_num_layers")),
        moved(f"{override}.recompute_modules", f"{config}.recompute_modules", how="recompute_modules"),
        *same("moe_token_dispatcher_type moe_grouped_gemm moe_shared_expert_overlap moe_router_dtype "
              "moe_aux_loss_coeff", override, ours_under=config),
        moved(f"{override}.attention_backend", f"{config}.transformer_impl", how="nothing"),
        moved(f"{override}.**", f"{config}.additional_configs", how="additional"),
        decided(f"{theirs}.optimizer_offload", f"{config}.optimizer_cpu_offload",
                f"between phases {_GIVEN_BACK}; optimizer_cpu_offload updates in host memory", how="nothing"),
        moved(f"{theirs}.param_offload", config, _GIVEN_BACK, how="nothing"),
        moved(f"{theirs}.grad_offload", config, _GIVEN_BACK, how="nothing"),
        *same("overlap_grad_reduce overlap_param_gather", f"{theirs}.override_ddp_config", ours_under=config),
        *dead("override_ddp_config.** override_ddp_config override_mcore_model_config.** override_mcore_model_config",
              "see additional_configs", theirs, see=f"{config}.additional_configs"),
        *dead("use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix use_mbridge vanilla_mbridge",
              "models are read from Hugging Face folders", theirs),
        moved(f"{theirs}.dtype", f"{role}.model_args.dtype", how="dtype"),
        *dead("seed forward_only extra.**", "it is so here, or isn't needed", theirs),
        *absent("**", "Megatron has no such option here", theirs, see=f"{config}.additional_configs"),
    ]  # fmt: skip


def optimizer(theirs: str, role: str, rate: float) -> list[ForeignKey]:
    """Return the rows of an `optim` section; `rate` is its default learning rate."""
    args = f"{role}.training_args"
    return [
        moved(f"{theirs}.lr", f"{args}.learning_rate", default=rate),
        moved(f"{theirs}.lr_warmup_steps", f"{args}.warmup_steps", "-1 leaves it to the ratio", how="warmup"),
        moved(f"{theirs}.lr_warmup_steps_ratio", f"{args}.warmup_ratio", how="warmup_ratio"),
        moved(f"{theirs}.warmup_steps_ratio", f"{args}.warmup_ratio", how="warmup_ratio"),
        moved(f"{theirs}.min_lr_ratio", f"{args}.min_lr_ratio", how="or_zero"),
        decided(f"{theirs}.min_lr", f"{args}.min_lr_ratio", "a share of the peak", how="min_lr"),
        *(moved(f"{theirs}.{key}", f"{args}.lr_scheduler_type", values={"WSD": "wsd"}, how="schedule")
          for key in ("warmup_style", "lr_scheduler", "lr_scheduler_type", "lr_decay_style")),
        moved(f"{theirs}.weight_decay", f"{args}.weight_decay", default=0.01),
        moved(f"{theirs}.betas", f"{args}.adam_beta1 {args}.adam_beta2", how="betas"),
        moved(f"{theirs}.eps", f"{args}.adam_epsilon"),
        moved(f"{theirs}.clip_grad", "max_grad_norm", how="clip"),
        *dead("total_training_steps", "the run knows how many steps it takes", theirs, see="max_steps"),
        moved(f"{theirs}.lr_decay_steps", f"{args}.lr_decay_steps", how="or_default"),
        moved(f"{theirs}.num_cycles", f"{args}.num_cycles", "half a cosine is what cosine does", how="half_cosine"),
        moved(f"{theirs}.lr_warmup_init", f"{args}.warmup_init_ratio", "a share of the peak", how="min_lr"),
        moved(f"{theirs}.weight_decay_incr_style", f"{args}.weight_decay_incr_style", "constant is without it",
              how="incr_style"),
        moved(f"{theirs}.lr_wsd_decay_style", f"{args}.wsd_decay_style", how="or_default"),
        decided(f"{theirs}.lr_wsd_decay_steps", f"{args}.wsd_decay_ratio", "a share of the steps after the warm-up",
                how="none_is_none"),
        *dead("use_checkpoint_opt_param_scheduler zero_indexed_step", "a run goes on where it stopped", theirs,
              see="resume_from_checkpoint"),
        moved(f"{theirs}.optimizer", f"{args}.optimizer", how="optimizer"),
        *dead("optimizer_impl", "optimizers are torch's", theirs),
        *absent("override_optimizer_config override_optimizer_config.** **", "the optimizer has no such option here",
                theirs, see=args),
    ]  # fmt: skip


def _checkpoint(theirs: str) -> list[ForeignKey]:
    return [
        *(moved(f"{theirs}.{key}", "checkpoint_config.save_contents", how="contents") for key in
          ("contents", "save_contents")),
        moved(f"{theirs}.load_contents", "checkpoint_config.load_contents", how="contents"),
        moved(f"{theirs}.async_save", "checkpoint_config.async_save", how="if_true"),
        *dead("strict mbridge_config.**", "checkpoints are files of this project", theirs,
              see="checkpoint_config.output_dir"),
    ]  # fmt: skip


def _profiler(theirs: str) -> list[ForeignKey]:
    return [
        decided(f"{theirs}.profiler.enable", "profiler.roles", "profile_steps says when; profiler.roles and "
                "profiler.ranks whose ranks", how="false_is_none"),
        *dead("profiler.** profiler", "profile_steps says when, profiler what, for all roles", theirs,
              see="profile_steps profiler.tools"),
    ]  # fmt: skip


def _model(theirs: str, role: str) -> list[ForeignKey]:
    """A `model` section that a role has of its own."""
    args = f"{role}.model_args"
    return [
        moved(f"{theirs}.path", f"{args}.model_name_or_path"),
        moved(f"{theirs}.override_config.model_config.**", f"{args}.model_config_kwargs", how="model_config"),
        moved(f"{theirs}.override_config.**", f"{args}.model_config_kwargs", how="model_config"),
        moved(f"{theirs}.override_config", f"{args}.model_config_kwargs"),
        moved(f"{theirs}.enable_gradient_checkpointing", f"{args}.disable_gradient_checkpointing",
              "the other way round", how="not"),
        moved(f"{theirs}.enable_activation_offload", f"{args}.activation_offload"),
        moved(f"{theirs}.use_remove_padding", f"{role}.use_sequence_packing"),
        moved(f"{theirs}.use_liger", f"{args}.use_liger"),
        moved(f"{theirs}.use_fused_kernels", f"{args}.use_fused_kernels", how="if_scores"),
        moved(f"{theirs}.trust_remote_code", f"{args}.trust_remote_code"),
        moved(f"{theirs}.lora_rank", f"{args}.lora_rank"),
        moved(f"{theirs}.lora_alpha", f"{args}.lora_alpha", how="with_lora"),
        moved(f"{theirs}.target_modules", f"{args}.lora_target", how="with_lora"),
        moved(f"{theirs}.lora_adapter_path", f"{args}.adapter_name_or_path"),
        moved(f"{theirs}.tokenizer_path", f"{args}.tokenizer_name_or_path", "roles that read the policy's tokens have "
              "that of actor_train", how="tokenizer"),
        *dead("hf_config_path", "it stands beside the weights", theirs, see=f"{args}.model_name_or_path"),
        *dead("fused_kernel_options.** fused_kernel_options tiled_mlp.**", "use_fused_kernels is liger-kernel's",
              theirs, see=f"{args}.use_fused_kernels"),
        moved(f"{theirs}.use_shm", f"{args}.use_shm"),
        moved(f"{theirs}.external_lib", f"{args}.external_lib", how="or_default"),
        *absent("exclude_modules", "lora_target names what gets adapters", theirs, see=f"{args}.lora_target"),
        *dead("return_last_hidden_state use_fused_loss mtp.** lora.**", "it is of verl's own models", theirs),
    ]  # fmt: skip


MODEL: list[ForeignKey] = [  # before the rows of every model: of two the first counts
    moved(f"{_M}.path", "pretrain", default="~/models/deepseek-llm-7b-chat"),
    moved(f"{_M}.external_lib", "external_lib", how="or_default"),
    moved(f"{_M}.custom_chat_template", "actor_train.data_args.template validation.data_args.template",
          "Jinja over messages", how="both"),
    moved(f"{_M}.trust_remote_code", "actor_train.model_args.trust_remote_code "
          "actor_infer.model_args.trust_remote_code reference.model_args.trust_remote_code", how="each_role"),
    moved(f"{_M}.use_remove_padding", "actor_train.use_sequence_packing reference.use_sequence_packing",
          how="each_role"),
    *_model(_M, "actor_train"),
]  # fmt: skip
"""`actor_rollout_ref.model`, of the policy in all its roles."""

ACTOR: list[ForeignKey] = [
    moved(f"{_A}.strategy", "actor_train.strategy_args.strategy_name", values={k: f"{v}_train" for k, v in
          STRATEGIES.items()}, default="fsdp"),
    moved(f"{_A}.ppo_mini_batch_size", "actor_train.training_args.gradient_accumulation_steps",
          "per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks, in responses",
          how="mini_batch", default=256),
    moved(f"{_A}.ppo_micro_batch_size_per_gpu", "actor_train.training_args.per_device_train_batch_size",
          how="micro_batch"),
    decided(f"{_A}.ppo_micro_batch_size", "actor_train.training_args.per_device_train_batch_size",
            "of all devices: divided by them", how="micro_batch_all"),
    moved(f"{_A}.use_dynamic_bsz", "actor_train.use_dynamic_batching_in_train"),
    moved(f"{_A}.ppo_max_token_len_per_gpu", "actor_train.max_tokens_per_microbatch_in_train",
          "times the ranks of ulysses_size", how="token_budget", default=16384),
    moved(f"{_A}.clip_ratio", "pg_clip"),
    moved(f"{_A}.clip_ratio_low", "pg_clip_low"),
    moved(f"{_A}.clip_ratio_high", "pg_clip_high"),
    moved(f"{_A}.clip_ratio_c", "dual_clip_c dual_clip_loss", "dual clip is on in verl", how="dual_clip", default=3.0),
    moved(f"{_A}.policy_loss.loss_mode", "policy_loss", values=LOSSES),
    moved(f"{_A}.policy_loss.clip_cov_ratio", "policy_loss_args", "cov_ratio of policy_loss: clip_cov", how="loss_arg"),
    moved(f"{_A}.policy_loss.clip_cov_lb", "policy_loss_args", "cov_low of policy_loss: clip_cov", how="loss_arg"),
    moved(f"{_A}.policy_loss.clip_cov_ub", "policy_loss_args", "cov_high of policy_loss: clip_cov", how="loss_arg"),
    moved(f"{_A}.policy_loss.kl_cov_ratio", "policy_loss_args", "cov_ratio of policy_loss: kl_cov", how="loss_arg"),
    moved(f"{_A}.policy_loss.ppo_kl_coef", "policy_loss_args", "kl_coef of policy_loss: kl_cov", how="loss_arg"),
    moved(f"{_A}.tau_pos", "sapo_tau_positive"),
    moved(f"{_A}.tau_neg", "sapo_tau_negative"),
    moved(f"{_A}.policy_loss.tau_pos", "sapo_tau_positive"),
    moved(f"{_A}.policy_loss.tau_neg", "sapo_tau_negative"),
    moved(f"{_A}.loss_agg_mode", "loss_agg_mode"),
    decided(f"{_A}.use_token_level_loss", "loss_agg_mode", "true is token-mean", values={True: "token-mean",
            False: "seq-mean-token-mean"}),
    moved(f"{_A}.loss_scale_factor", "loss_agg_mode", "seq-mean-token-sum-norm divides by response_length",
          how="nothing"),
    moved(f"{_A}.entropy_coeff", "entropy_loss_coef"),
    moved(f"{_A}.use_kl_loss", "use_kl_loss"),
    moved(f"{_A}.kl_loss_coef", "kl_loss_coef"),
    moved(f"{_A}.kl_loss_type", "kl_loss_type"),
    moved(f"{_A}.ppo_epochs", "ppo_epochs"),
    moved(f"{_A}.grad_clip", "max_grad_norm"),
    *dead("shuffle data_loader_seed", "mini-batches are in an order of the run's seed", _A, see="seed"),
    moved(f"{_A}.ulysses_sequence_parallel_size", "actor_train.model_args.ulysses_size"),
    moved(f"{_A}.use_torch_compile", "actor_train.model_args.torch_compile", how="compile"),
    moved(f"{_A}.use_remove_padding", "actor_train.use_sequence_packing"),
    moved(f"{_A}.use_fused_kernels", "actor_train.model_args.use_fused_kernels"),
    moved(f"{_A}.use_prefix_grouper", "actor_train.use_prefix_sharing", "on by default where it pays", how="if_true"),
    *dead("entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing calculate_entropy",
          "entropies are computed in chunks, and only where they are asked for", _A, see="entropy_loss_coef"),
    *dead("load_weight rollout_n calculate_sum_pi_squared pad_to_length nccl_timeout",
          "it is so here, or isn't needed", _A),
    decided(f"{_A}.router_replay.mode", "router_replay", "R3 is true; R2, the choice of the trainer's own earlier "
            "pass, isn't offered", values={"R3": True, "disabled": False}),
    *absent("router_replay.**", "experts aren't recorded in files", _A, see="router_replay"),
    *absent("freeze_vision_tower", "models of text only", _A),
    *absent("policy_loss.dro_beta qat.**", "the loss has no such option here", _A, see="policy_loss"),
    *_checkpoint(f"{_A}.checkpoint"),
    *optimizer(f"{_A}.optim", "actor_train", 1e-6),
    *_fsdp(f"{_A}.fsdp_config", "actor_train"),
    *_megatron(f"{_A}.megatron", "actor_train"),
    *_profiler(_A),
]  # fmt: skip
"""`actor_rollout_ref.actor`."""

REFERENCE: list[ForeignKey] = [
    decided(f"{_F}.strategy", "reference.strategy_args.strategy_name", "that of the actor where it isn't given",
            values={k: f"{v}_infer" for k, v in STRATEGIES.items()}),
    moved(f"{_F}.log_prob_micro_batch_size_per_gpu", "reference.infer_batch_size", how="or_default"),
    decided(f"{_F}.log_prob_micro_batch_size", "reference.infer_batch_size", "of all devices: divided by them",
            how="micro_batch_all"),
    moved(f"{_F}.log_prob_use_dynamic_bsz", "reference.use_dynamic_batching_in_infer"),
    moved(f"{_F}.log_prob_max_token_len_per_gpu", "reference.max_tokens_per_microbatch_in_infer", how="token_budget"),
    moved(f"{_F}.ulysses_sequence_parallel_size", "reference.model_args.ulysses_size"),
    moved(f"{_F}.use_torch_compile", "reference.model_args.torch_compile", how="compile"),
    *dead("entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing load_weight "
          "rollout_n pad_to_length nccl_timeout", "it is so here, or isn't needed", _F),
    *absent("router_replay.**", "the reference routes by itself", _F, see="router_replay"),
    *_fsdp(f"{_F}.fsdp_config", "reference"),
    *_megatron(f"{_F}.megatron", "reference"),
    *_profiler(_F),
    *_model(f"{_F}.model", "reference"),
]  # fmt: skip
"""`actor_rollout_ref.ref`."""

CRITIC: list[ForeignKey] = [
    moved(f"{_C}.strategy", "critic.strategy_args.strategy_name", values={k: f"{v}_train" for k, v in
          STRATEGIES.items()}),
    moved(f"{_C}.ppo_mini_batch_size", "critic.training_args.gradient_accumulation_steps", how="mini_batch"),
    moved(f"{_C}.ppo_micro_batch_size_per_gpu", "critic.training_args.per_device_train_batch_size", how="micro_batch"),
    decided(f"{_C}.ppo_micro_batch_size", "critic.training_args.per_device_train_batch_size",
            "of all devices: divided by them", how="micro_batch_all"),
    moved(f"{_C}.forward_micro_batch_size_per_gpu", "critic.infer_batch_size", how="or_default"),
    decided(f"{_C}.forward_micro_batch_size", "critic.infer_batch_size", "of all devices: divided by them",
            how="micro_batch_all"),
    moved(f"{_C}.use_dynamic_bsz", "critic.use_dynamic_batching_in_train critic.use_dynamic_batching_in_infer",
          how="both"),
    moved(f"{_C}.ppo_max_token_len_per_gpu", "critic.max_tokens_per_microbatch_in_train", how="token_budget"),
    moved(f"{_C}.forward_max_token_len_per_gpu", "critic.max_tokens_per_microbatch_in_infer", how="token_budget"),
    moved(f"{_C}.ulysses_sequence_parallel_size", "critic.model_args.ulysses_size"),
    moved(f"{_C}.cliprange_value", "value_clip", default=0.5),
    moved(f"{_C}.enable", "critic", "adv_estimator decides whether there is a critic", how="critic"),
    decided(f"{_C}.ppo_epochs", "ppo_epochs", "actor and critic pass over a batch equally often", how="if_free"),
    decided(f"{_C}.grad_clip", "max_grad_norm", "one bound for all roles", how="if_free"),
    decided(f"{_C}.loss_agg_mode", "loss_agg_mode", "one way for all losses", how="if_free"),
    *dead("shuffle rollout_n nccl_timeout load_weight data_loader_seed", "it is so here, or isn't needed", _C),
    *_checkpoint(f"{_C}.checkpoint"),
    *optimizer(f"{_C}.optim", "critic", 1e-5),
    *_fsdp(f"{_C}.model.fsdp_config", "critic"),
    *_fsdp(f"{_C}.fsdp", "critic"),
    *_megatron(f"{_C}.megatron", "critic"),
    *_profiler(_C),
    *_model(f"{_C}.model", "critic"),
]  # fmt: skip
"""`critic`."""

REWARD_MODEL: list[ForeignKey] = [
    moved(f"{_W}.strategy", "reward_model.strategy_args.strategy_name", "megatron_infer scores no rewards",
          values={"fsdp": "fsdp2_infer", "fsdp2": "fsdp2_infer", "megatron": "fsdp2_infer"}),
    decided(f"{_W}.model.input_tokenizer", "reward_model.template", "a reward model reads texts, by its own tokenizer "
            "and chat template", how="nothing"),
    moved(f"{_W}.micro_batch_size_per_gpu", "reward_model.infer_batch_size", how="or_default"),
    decided(f"{_W}.micro_batch_size", "reward_model.infer_batch_size", "of all devices: divided by them",
            how="micro_batch_all"),
    moved(f"{_W}.max_length", "reward_model.max_length"),
    moved(f"{_W}.use_dynamic_bsz", "reward_model.use_dynamic_batching_in_infer"),
    moved(f"{_W}.forward_max_token_len_per_gpu", "reward_model.max_tokens_per_microbatch_in_infer", how="token_budget"),
    *dead("ulysses_sequence_parallel_size nccl_timeout load_weight", "it reads whole texts", _W),
    *absent("enable_resource_pool n_gpus_per_node nnodes", "a role names its slots", _W,
            see="reward_model.device_mapping"),
    *_fsdp(f"{_W}.model.fsdp_config", "reward_model"),
    *absent("megatron.**", "megatron_infer scores no rewards", _W, see="reward_model.strategy_args.strategy_name"),
    *_profiler(_W),
    *_model(f"{_W}.model", "reward_model"),
    *absent("rollout.**", "a model that grades in words is a judge", _W, see="judge"),
]  # fmt: skip
"""`reward_model`."""
