"""Keys of Alibaba's ROLL about tasks: rewards, validation, environments; fine-tuning, preferences, distillation."""

from __future__ import annotations

from roll.catalog.foreign_keys.rows import ForeignKey, absent, dead, decided, moved, same

_D = "rewards.<name>"
_JUDGE = "judge"

REWARD_CLASSES = {
    "MathRuleRewardWorker": "math_rule",
    "CodeSandboxRewardWorker": "code",
    "GeneralRuleRewardWorker": "ifeval",
    "IfEvalRuleRewardWorker": "ifeval",
    "CrossThinkQARuleRewardWorker": "choice",
    "MultipleChoiceBooleanRuleRewardWorker": "choice",
    "GeneralValRuleRewardWorker": "exact",
    "LLMJudgeRewardWorker": "judge",
    "DetectionRewardWorker": "",
    "ModelRewardWorker": "reward_model",
}
"""Their reward workers by our rewards; empty: none."""

REWARDS: list[ForeignKey] = [
    decided(f"{_D}.worker_cls", f"{_D}.name", "a reward here is a function, named by what it does",
            how="reward_class"),
    *same("name tag_included world_size query_filter_config.type query_filter_config.filter_args.threshold_down "
          "query_filter_config.filter_args.threshold_up query_filter_config.filter_args.std_threshold weight", _D),
    decided(f"{_D}.response_filter_config.type", f"{_D}.response_filter_config.type", "mean_filter is score_filter",
            values={"mean_filter": "score_filter"}),
    *same("response_filter_config.filter_args.threshold_down response_filter_config.filter_args.threshold_up", _D),
    *absent("response_filter_config.**", "responses are filtered by score or length", _D,
            see=f"{_D}.response_filter_config.type"),
    *dead("reward_type", "a reward gives numbers, soft or not", _D),
    decided(f"{_D}.response_length_penalty_coef", "overlong_shaping", "0 is none; another is overlong_shaping",
            how="zero_is_none"),
    *dead("use_local code_url", "code runs in the sandbox that `sandbox` names", _D, see="sandbox"),
    moved(f"{_D}.format_pattern", f"{_D}.reward_kwargs", how="format_pattern"),
    *dead("reward_manager_config", "a weighted sum has `parts`", _D, see=f"{_D}.parts"),
    moved(f"{_D}.judge_prompt", "judge.prompt", how="judge_prompt"),
    decided(f"{_D}.judge_model_type", "judge.endpoint", "api asks judge.endpoint, inference starts an engine of "
            "the run", how="judge_type"),
    moved(f"{_D}.judge_model_name", "judge.model", how="of_judge"),
    moved(f"{_D}.judge_api_url", "judge.endpoint", how="of_judge"),
    *absent("judge_api_key", "a key never stands in a file; judge.api_key_env names its variable", _D,
            see="judge.api_key_env"),
    moved(f"{_D}.model_args.model_name_or_path", "judge.model_args.model_name_or_path", how="of_judge"),
    moved(f"{_D}.model_args.dtype", "judge.model_args.dtype", how="of_judge"),
    *(moved(f"{_D}.generating_args.{key}", f"judge.generating_args.{key}", how="of_judge")
      for key in ("max_new_tokens", "temperature", "top_p", "top_k", "num_beams", "repetition_penalty",
                  "stop_strings", "do_sample")),
    decided(f"{_D}.strategy_args.strategy_name", "judge.strategy_args.strategy_name",
            "a function has no backend; a judge has an engine", how="of_judge"),
    moved(f"{_D}.strategy_args.strategy_config.**", "judge.strategy_args.strategy_config", how="of_judge"),
    moved(f"{_D}.strategy_args.strategy_config", "judge.strategy_args.strategy_config", how="of_judge"),
    moved(f"{_D}.device_mapping", "judge.device_mapping", how="of_judge"),
    moved(f"{_D}.num_gpus_per_worker", "judge.num_gpus_per_worker", how="of_judge"),
    moved(f"{_D}.system_envs", "judge.system_envs", how="of_judge"),
    *dead("model_args.** data_args.** generating_args.** infer_batch_size training_args.** "
          "max_concurrency", "a function has no model, and a judge's engine doesn't need it", _D),
    *absent("**", "a reward takes its own options in reward_kwargs", _D, see=f"{_D}.reward_kwargs"),
]  # fmt: skip
"""`rewards.<domain>`."""

_V = "validation"
PROMPTS: list[ForeignKey] = [
    *same("tag_to_template"),
    decided("global_template", "global_template", "a model family's name is native", how="template"),
    moved(f"{_V}.eval_steps", "eval_steps", how="if_free"),
    decided(f"{_V}.data_args.template", f"{_V}.data_args.template", "a model family's name is native", how="template"),
    moved(f"{_V}.data_args.file_name", how="files"),
    moved(f"{_V}.data_args.prompt", how="column"),
    *same("messages tag id preprocessing_num_workers", f"{_V}.data_args"),
    decided(f"{_V}.data_args.response", f"{_V}.data_args.ground_truth", "what the reward compares against",
            how="response"),
    *dead("data_args.dataset_dir data_args.cache_path data_args.interleave_probs data_args.dataset_type "
          "data_args.domain_interleave_probs data_args.shuffle data_args.cutoff_len model_args.** strategy_args.** "
          "device_mapping infer_batch_size worker_cls world_size", "validation plays the rows of its files in order",
          _V),
    *same("temperature top_p top_k num_beams num_return_sequences repetition_penalty do_sample "
          "include_stop_str_in_output ignore_eos", f"{_V}.generating_args"),
    moved(f"{_V}.generating_args.max_new_tokens", how="max_new_tokens"),
    moved(f"{_V}.generating_args.stop_strings", how="stops"),
    *dead("generating_args.max_length generating_args.length_penalty generating_args.logprobs",
          "max_new_tokens bounds a response", _V),
    *absent("dataset_filter.** vlm_filter.**", "rows aren't filtered by source or difficulty; cut the file",
            see="actor_train.data_args.filter_overlong_prompts"),
    *dead("reward.**", "write reward_model for a model that scores; functions have rewards.<domain>.world_size "
          "processes", see="reward_model rewards.<name>.world_size"),
]  # fmt: skip
"""Prompts and validation."""

ENV_TYPES = {
    "sokoban": "sokoban-v1", "frozen_lake": "frozen_lake-v1", "countdown": "countdown-v1",
}  # fmt: skip
"""Their environments by ours."""

_E, _C = "custom_envs.<name>", "custom_envs.<name>.env_config"
_M = "<manager>"

ENVS: list[ForeignKey] = [
    decided(f"{_E}.env_type", f"{_E}.env_type", "bundled environments have a version; one of your own is a class",
            how="env_type"),
    *same("max_tokens_per_step history_length action_separator", _E),
    moved(f"{_E}.max_steps"),
    moved(f"{_E}.max_actions_per_traj", f"{_E}.max_steps"),
    decided(f"{_E}.env_manager_cls", "sample_unit", "sample_unit: trajectory for TrajEnvManager, "
            "sample_unit: step for StepEnvManager, sample_unit: concat for StepConcatEnvManager", how="env_manager"),
    moved(f"{_E}.agent_system_template", f"{_E}.system_template", "slots have other names", how="env_template"),
    moved(f"{_E}.agent_template", f"{_E}.turn_template", "slots have other names", how="env_template"),
    moved(f"{_E}.system_template", how="env_template"),
    moved(f"{_E}.turn_template", how="env_template"),
    *dead("use_thread_lock max_env_step_concurrent", "an environment process makes one call after the other", _E,
          see="env_workers.world_size"),
    *dead("user_prompt_format", "it is part of turn_template", _E, see=f"{_E}.turn_template"),
    moved(f"{_C}.action_pattern", f"{_E}.action_pattern", how="action_pattern"),
    moved(f"{_C}.max_steps", f"{_E}.max_steps", how="if_free"),
    decided(f"{_C}.format_penalty", "train_env_manager.format_penalty", "one penalty for all environments of a manager",
            how="format_penalty"),
    moved(f"{_C}.action_lookup", f"{_E}.action_lookup", how="action_lookup"),
    moved(f"{_C}.is_slippery", f"{_C}.slippery", how="env_option"),
    moved(f"{_C}.dim_room", f"{_C}.dim_room", how="env_option"),
    moved(f"{_C}.num_boxes", f"{_C}.num_boxes", how="env_option"),
    decided(f"{_C}.search_depth", f"{_C}.max_solution", "the longest solution of a room", how="env_option"),
    moved(f"{_C}.dim_x", f"{_C}.dim_room", "both sides together", how="env_side"),
    moved(f"{_C}.dim_y", f"{_C}.dim_room", "both sides together", how="env_side"),
    moved(f"{_C}.size", f"{_C}.size", how="env_option"),
    moved(f"{_C}.p", f"{_C}.p", how="env_option"),
    moved(f"{_C}.map", f"{_C}.map", how="env_option"),
    *dead("env_instruction", "the environment says its own instructions, in {instructions}", _C,
          see=f"{_E}.system_template"),
    *absent("grid_lookup grid_vocab render_mode observation_format", "the environment has symbols of its own", _C),
    moved(f"{_C}.**", f"{_C}", "arguments of a class of your own stay", how="env_argument"),
]  # fmt: skip
"""`custom_envs.<tag>`."""

MANAGERS: list[ForeignKey] = [
    *same("group_size_redundancy tags num_groups_partition max_traj_per_env format_penalty "
          "group_filter.type group_filter.filter_args.std_threshold group_filter.filter_args.threshold_down "
          "group_filter.filter_args.threshold_up", _M),
    moved(f"{_M}.num_env_groups", default=128),
    moved(f"{_M}.group_size", default=1),
    moved(f"{_M}.env_groups", f"{_M}.num_env_groups"),
    moved(f"{_M}.n_groups", f"{_M}.num_groups_partition"),
    moved(f"{_M}.max_env_num_per_worker", how="positive"),
    *(moved(f"{_M}.generating_args.{key}", f"val_env_manager.generating_args.{key}", how="val_only")
      for key in ("max_new_tokens", "temperature", "top_p", "top_k", "num_beams", "num_return_sequences",
                  "repetition_penalty", "stop_strings", "do_sample", "include_stop_str_in_output")),
    *dead("worker_cls name world_size", "code of your own goes into environments; their processes are env_workers", _M,
          see="env_workers.world_size"),
    decided(f"{_M}.system_envs", "system_envs", "environments' processes have those of the run", how="merge_envs"),
    *absent("group_filter_cls", "groups are filtered by group_filter", _M, see="train_env_manager.group_filter"),
    *dead("llm_proxy llm_proxy.**", "environments' responses come from actor_infer", _M),
    *dead("model_args.** strategy_args.** device_mapping data_args.** max_concurrency", "environments have no model",
          _M),
    decided("reward_normalization.grouping", "reward_normalization.grouping", "traj_group_id is traj_group",
            values={"traj_group_id": "traj_group", "group": "traj_group", "env_type": "tags"}, default="state"),
    moved("reward_normalization.method", default="identity"),
    decided("reward_normalization.norm_mean_type", "reward_normalization.grouping reward_normalization.method",
            "group and batch are groupings of mean_std (mean, where norm_std_type is null)", how="env_norm"),
    decided("reward_normalization.norm_std_type", "reward_normalization.grouping reward_normalization.method",
            "group and batch are groupings of mean_std (mean, where it is null)", how="env_norm"),
    *same("episode_reward_weight step_reward_weight step_reward_gamma"),
    *dead("batch_adjust_mode", "mini-batches are whole trajectories, as many as gradient accumulation takes"),
    moved("env_manager_cls", "sample_unit", how="env_manager"),
    moved("max_actions_per_traj", "custom_envs.<name>.max_steps", how="nothing"),
    moved("max_tokens_per_step", "custom_envs.<name>.max_tokens_per_step", how="nothing"),
]  # fmt: skip
"""Managers of environments, and how episodes are compared."""

OFFLINE: list[ForeignKey] = [
    *same("beta label_smoothing loss_type"),
    decided("ipo", "loss_type", "true is loss_type: ipo", values={True: "ipo", False: "sigmoid"}),
    moved("chosen_key", "actor_train.data_args.chosen_key", how="both_data"),
    moved("rejected_key", "actor_train.data_args.rejected_key", how="both_data"),
    decided("train_batch_size", "actor_train.training_args.gradient_accumulation_steps",
            "per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks, in sequences: a pair has "
            "two", how="dpo_batch"),
    moved("prompt_key", "actor_train.data_args.prompt", how="both_data", default="instruction"),
    moved("response_key", "actor_train.data_args.response", how="both_data", default="output"),
    absent("system_key", "a system message is part of `messages`", see="actor_train.data_args.messages")[0],
    absent("query_key", "it is part of the prompt's column", see="actor_train.data_args.prompt")[0],
    moved("question_key", "actor_train.data_args.prompt", how="both_data", default="question"),
    moved("answer_key", "actor_train.data_args.response", how="both_data", default="answer"),
    moved("student_pretrain", "pretrain"),
    moved("teacher_pretrain", "teacher.model_args.model_name_or_path"),
    moved("teacher_model_name_or_path", "teacher.model_args.model_name_or_path"),
    moved("logits_topk", "distill.top_k", "0 is every token", how="positive", default=64),
    moved("distill_loss_weight", "distill.coef distill.sft_coef", "the rows' own weight is the rest to 1",
          how="distill_weight", default=0.5),
    moved("kd_objective", "distill.divergence", values={"js_divergence": "jensen_shannon"}),
    decided("kd_temperature", "distill.divergence", "distributions are compared at temperature 1", how="one_is_none"),
    decided("teacher_temperature", "distill.divergence", "distributions are compared at temperature 1",
            how="one_is_none"),
    *absent("adaptive_kl_alpha", "divergences are named in divergence", see="distill.divergence"),
    moved("skew_lambda", "distill.divergence_args", how="skew"),
    *dead("distill_on_prompt", "responses are learnt, not prompts"),
    *dead("logits_transfer_backend", "what the teacher says travels by itself"),
    decided("use_opd", "teacher", "on-policy distillation is a section teacher", how="opd"),
    decided("is_pure_opd", "pipeline distill.reward_coef", "pipeline: distill", how="opd"),
    moved("opd_kl_coef", "distill.coef"),
]  # fmt: skip
"""Fine-tuning, preferences, distillation."""
