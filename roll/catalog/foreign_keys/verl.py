"""Keys of verl: data, algorithm, trainer, rewards."""

from __future__ import annotations

from roll.catalog.foreign_keys.rows import ForeignKey, absent, dead, decided, moved

_TRAIN_DATA, _VAL = "actor_train.data_args", "validation.data_args"
BOTH = f"{_TRAIN_DATA} {_VAL}"

ESTIMATORS = {
    "grpo_passk": "pass_at_k", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}  # fmt: skip
"""Their estimators by ours, where the names differ."""

DATA: list[ForeignKey] = [
    moved("data.train_files", f"{_TRAIN_DATA}.file_name", "parquet files are read as they are", how="files"),
    moved("data.val_files", f"{_VAL}.file_name", how="files"),
    decided("data.prompt_key", f"{_TRAIN_DATA}.prompt {_VAL}.prompt", "found by itself where it is prompt or messages",
            how="prompt_key"),
    decided("data.reward_fn_key", f"{_TRAIN_DATA}.tag {_VAL}.tag",
            "the column whose values rewards.<domain>.tag_included lists",
            how="fn_key", default="data_source"),
    moved("data.train_batch_size", "rollout_batch_size", default=1024),
    moved("data.val_batch_size", "val_batch_size"),
    *dead("gen_batch_size", "prompts are started as they are needed, see is_use_additional_prompts", "data",
          see="is_use_additional_prompts"),
    moved("data.max_prompt_length", "prompt_length", default=512),
    moved("data.max_response_length", "response_length", default=512),
    moved("data.truncation", "truncation"),
    moved("data.shuffle", f"{_TRAIN_DATA}.shuffle"),
    moved("data.seed", "seed", how="if_free"),
    moved("data.filter_overlong_prompts", f"{_TRAIN_DATA}.filter_overlong_prompts {_VAL}.filter_overlong_prompts",
          how="both"),
    moved("data.filter_overlong_prompts_workers",
          f"{_TRAIN_DATA}.preprocessing_num_workers {_VAL}.preprocessing_num_workers", how="both"),
    decided("data.custom_cls.path", f"{_TRAIN_DATA}.dataset", "a class here yields rows, path/to/file.py:Name",
            how="custom_class"),
    decided("data.custom_cls.name", f"{_TRAIN_DATA}.dataset", "a class here yields rows, path/to/file.py:Name",
            how="custom_class"),
    moved("data.trust_remote_code", "actor_train.model_args.trust_remote_code", how="if_true"),
    decided("data.chat_template", f"{_TRAIN_DATA}.template", "Jinja over messages", how="template"),
    *dead("dataloader_num_workers use_shm datagen.** tool_config_path", "rows are read and tokenised as they are "
          "needed, and keep their columns", "data"),
    *dead("return_raw_chat", "messages always reach rewards and rollouts, as task.payload['messages']", "data"),
    *dead("return_raw_input_ids", "a reward model with another tokenizer encodes messages itself", "data",
          see="reward_model.template"),
    *dead("return_full_prompt", "rewards and rollouts always see the whole row, as task.payload", "data"),
    moved("data.validation_shuffle", "validation.shuffle", how="if_true"),
    moved("data.tokenizer", "actor_train.model_args.tokenizer_name_or_path", how="or_default"),
    *absent("image_key image_patch_size return_multi_modal_inputs", "rows are text: models of images aren't supported",
            "data"),
    *absent("video_key", "rows are text: models of videos aren't supported", "data"),
    *absent("train_max_samples val_max_samples", "rows aren't counted out; cut the file", "data",
            see=f"{_TRAIN_DATA}.file_name"),
    *absent("sampler.class_path sampler.class_name", "a curriculum orders rows", "data",
            see=f"{_TRAIN_DATA}.curriculum"),
    moved("data.apply_chat_template_kwargs.**", "chat_template_kwargs", how="template_variables"),
]  # fmt: skip
"""`data`."""

_CORRECTION = "train_infer_correction"

ALGORITHM: list[ForeignKey] = [
    moved("algorithm.adv_estimator", "adv_estimator", values=ESTIMATORS, how="verl_estimator", default="gae"),
    moved("algorithm.gamma", "gamma"),
    moved("algorithm.lam", "lambd", default=1.0),
    moved("algorithm.norm_adv_by_std_in_grpo", "adv_estimator", "false is adv_estimator: dr_grpo", how="no_std"),
    moved("algorithm.use_kl_in_reward", "add_token_level_kl"),
    moved("algorithm.kl_penalty", "kl_penalty"),
    moved("algorithm.kl_ctrl.type", "target_kl", "fixed is null, adaptive is the number of kl_ctrl.target_kl",
          how="kl_type"),
    moved("algorithm.kl_ctrl.kl_coef", "init_kl_coef", default=0.001),
    moved("algorithm.kl_ctrl.horizon", "kl_horizon", how="kl_adaptive"),
    moved("algorithm.kl_ctrl.target_kl", "target_kl", how="kl_adaptive"),
    moved("algorithm.use_pf_ppo", "pf_ppo", how="pf_ppo"),
    moved("algorithm.pf_ppo.reweight_method", "pf_ppo.reweight_method", how="pf_ppo"),
    moved("algorithm.pf_ppo.weight_pow", "pf_ppo.weight_pow", how="pf_ppo"),
    decided("algorithm.filter_groups.enable", "rewards.<name>.query_filter_config.type",
            "std_filter drops groups of equal scores", how="filter_groups"),
    *dead("filter_groups.metric", "groups are filtered by their scores", "algorithm",
          see="rewards.<name>.query_filter_config.type"),
    moved("algorithm.filter_groups.max_num_gen_batches", "max_num_gen_batches", how="gen_batches"),
    moved("algorithm.rollout_correction.rollout_is", f"{_CORRECTION}.level", how="correction"),
    moved("algorithm.rollout_is", f"{_CORRECTION}.level", how="correction"),
    moved("algorithm.rollout_is_level", f"{_CORRECTION}.level", how="correction"),
    moved("algorithm.rollout_correction.rollout_is_threshold", f"{_CORRECTION}.importance_upper", how="correction"),
    moved("algorithm.rollout_is_threshold", f"{_CORRECTION}.importance_upper", how="correction"),
    moved("algorithm.rollout_correction.rollout_is_batch_normalize", f"{_CORRECTION}.importance_mean_one",
          how="correction"),
    moved("algorithm.rollout_correction.rollout_rs", f"{_CORRECTION}.level", how="correction"),
    moved("algorithm.rollout_correction.rollout_rs_threshold", f"{_CORRECTION}.ratio_high", how="correction"),
    moved("algorithm.rollout_correction.rollout_rs_threshold_lower", f"{_CORRECTION}.ratio_low", how="correction"),
    *absent("rollout_correction.rollout_token_veto_threshold", "see row_divergence_high", "algorithm",
            see=f"{_CORRECTION}.row_divergence_high"),
    *dead("rollout_correction.bypass_mode rollout_correction.bypass_old_logprob_for_rollout", "ratios are of the "
          "trainer's log-probs", "algorithm"),
    decided("algorithm.rollout_correction.use_policy_gradient", "policy_loss", "true is policy_loss: reinforce",
            values={True: "reinforce", False: "ppo"}),
    decided("algorithm.rollout_correction.use_pure_rollout_correction", "policy_loss",
            "true is policy_loss: reinforce", values={True: "reinforce", False: "ppo"}),
]  # fmt: skip
"""`algorithm`."""

TRAINER: list[ForeignKey] = [
    moved("trainer.balance_batch", "balance_batch"),
    moved("trainer.total_epochs", "num_train_epochs", default=30),
    moved("trainer.total_training_steps", "max_steps", how="steps", default=None),
    moved("trainer.project_name", "tracker_kwargs", "as `project` below the tracker's name", how="project"),
    moved("trainer.experiment_name", "exp_name", how="name", default="gsm8k"),
    moved("trainer.logger", "track_with", how="loggers", default=["console", "wandb"]),
    moved("trainer.log_val_generations", "log_val_generations"),
    moved("trainer.rollout_data_dir", "rollout_dump_dir"),
    decided("trainer.validation_data_dir", "log_val_generations", "validation samples go to the log and the trackers",
            how="val_dir"),
    moved("trainer.nnodes", "num_nodes"),
    moved("trainer.n_gpus_per_node", "num_gpus_per_node", default=8),
    moved("trainer.save_freq", "save_steps", how="period"),
    moved("trainer.test_freq", "eval_steps", how="period"),
    moved("trainer.resume_mode", "resume_from_checkpoint", values={"disable": False, "auto": "auto"}, how="resume",
          default="auto"),
    moved("trainer.resume_from_path", "resume_from_checkpoint", how="resume"),
    moved("trainer.resume_path", "resume_from_checkpoint", how="resume"),
    moved("trainer.val_before_train", "val_before_train", default=True),
    moved("trainer.val_only", "val_only"),
    moved("trainer.critic_warmup", "critic_warmup"),
    moved("trainer.default_local_dir", "checkpoint_config.output_dir"),
    moved("trainer.max_actor_ckpt_to_keep", "checkpoint_config.max_to_keep", default=None),
    moved("trainer.max_ckpt_to_keep", "checkpoint_config.max_to_keep", how="if_free"),
    moved("trainer.seed", "seed"),
    *dead("max_critic_ckpt_to_keep", "a checkpoint holds all roles", "trainer", see="checkpoint_config.max_to_keep"),
    moved("trainer.rollout_n", "num_return_sequences_in_group"),
    moved("trainer.default_hdfs_dir", "checkpoint_config.output_dir", "an address such as hdfs://host/run",
          how="address"),
    moved("trainer.del_local_ckpt_after_load", "checkpoint_config.delete_after_load"),
    decided("trainer.remove_previous_ckpt_in_save", "checkpoint_config.max_to_keep",
            "true is max_to_keep: 1, which removes the one before when the next is complete", how="keep_one"),
    moved("trainer.ray_wait_register_center_timeout", "rpc_timeout", how="nothing"),
    *dead("device use_legacy_worker_impl use_v1 task_type", "devices are found by themselves", "trainer"),
    *dead("esi_redundant_time", "a run that is interrupted goes on from its newest checkpoint", "trainer",
          see="save_steps"),
    moved("trainer.profile_steps", "profile_steps", how="or_default"),
    moved("global_profiler.steps", "profile_steps", how="or_default"),
    moved("global_profiler.tool", "profiler.tools", values={"nsys": "nsight", "torch_memory": "memory",
          "torch": "torch"},
          how="profiled"),
    moved("global_profiler.save_path", "profiler_output_dir", how="profiled"),
    *absent("npu_profile.** controller_nsight_options.** worker_nsight_options.** profile_continuous_steps",
            "profiler says what is recorded", "trainer", see="profiler.tools"),
    *dead("global_profiler.**", "profiler says what is recorded", see="profiler.tools"),
    *(moved(f"{under}.num_cpus", "ray_init.num_cpus", how="or_default") for under in
      ("ray_init", "ray_kwargs.ray_init")),
    *(moved(f"{under}.timeline_json_file", "profiler.ray_timeline", "the file is in profiler_output_dir",
            how="timeline")
      for under in ("ray_init", "ray_kwargs")),
    moved("ray_init.num_gpus", "num_gpus_per_node", how="or_default"),
    *absent("ray_init.runtime_env ray_init.runtime_env.**", "workers import what the controller imports",
            see="system_envs"),
    *absent("ray_init.include_dashboard", "a dashboard has no password, and the Ray of a run listens to its own "
            "machine alone; start one with `ray start --head` and join it", see="num_nodes"),
    *absent("ray_init.address", "a run on several machines joins the cluster that RAY_ADDRESS names", see="num_nodes"),
    *absent("ray_init._temp_dir", "the Ray of a run has a folder of its own below TMPDIR, which goes with it"),
    *absent("ray_init.** ray_kwargs.**", "Ray is started by the run, or by ray start"),
    *dead("hydra.** hydra defaults", "the file is composed here without Hydra's own settings"),
    *dead("_target_ **._target_", "it names a class of verl"),
    *dead("transfer_queue.** rollout_manager.**", "batches travel through Ray's object store"),
]  # fmt: skip
"""`trainer`, and what surrounds it."""

_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
_OVERLONG_BUFFERS = (_OVERLONG, "custom_reward_function.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg",
                     "reward_model.overlong_buffer")  # fmt: skip
_D = "rewards.<name>"

REWARDS: list[ForeignKey] = [
    moved("custom_reward_function.path", f"{_D}.name custom_reward_function.path",
          "path/to/file.py:function; a compute_score is taken as it is",
          how="custom_function"),
    moved("custom_reward_function.name", f"{_D}.name custom_reward_function.name",
          "path/to/file.py:function", how="custom_function"),
    moved("custom_reward_function.reward_kwargs.**", f"{_D}.reward_kwargs custom_reward_function.reward_kwargs",
          how="custom_kwargs"),
    *(moved(f"{under}.enable", "overlong_shaping", how="overlong") for under in
      _OVERLONG_BUFFERS),
    *(moved(f"{under}.len", "overlong_shaping.buffer", how="overlong") for under in
      _OVERLONG_BUFFERS),
    *(moved(f"{under}.penalty_factor", "overlong_shaping.penalty", how="overlong") for under in
      _OVERLONG_BUFFERS),
    *dead(f"{_OVERLONG}.log custom_reward_function.overlong_buffer.log "
          "reward_model.overlong_buffer.log", "the penalty is a metric anyway",
          see="overlong_shaping"),
    *dead("reward_model.reward_kwargs.max_resp_len", "the limit is response_length", see="response_length"),
    decided("reward_model.reward_manager", f"{_D}.name", "a function scores a domain; dapo's penalty is "
            "overlong_shaping, prime's parallel processes are rewards.<domain>.world_size", how="reward_manager"),
    decided("reward.reward_manager.name", f"{_D}.name", "a function scores a domain; dapo's penalty is "
            "overlong_shaping", how="reward_manager"),
    *dead("reward_model.launch_reward_fn_async", "rewards are always computed beside generation",
          see=f"{_D}.concurrency"),
    moved("reward_model.num_workers", f"{_D}.world_size", how="each_domain"),
    moved("reward.num_workers", f"{_D}.world_size", how="each_domain"),
    decided("reward_model.sandbox_fusion.url", "sandbox", "a sandbox server of this project's own protocol runs code",
            how="sandbox_url"),
    moved("reward_model.sandbox_fusion.max_concurrent", f"{_D}.concurrency", how="each_domain"),
    moved("reward_model.sandbox_fusion.memory_limit_mb", f"{_D}.memory_limit_mb", how="nothing"),
    moved("reward_model.enable", f"{_D}.name", "true is name: reward_model, with a section reward_model",
          how="reward_model"),
    *absent("reward_model.reward_kwargs.** reward_kwargs.** reward.**", "a reward takes its own options in "
            "reward_kwargs", see=f"{_D}.reward_kwargs"),
]  # fmt: skip
"""How responses are scored."""
