"""Keys of ours that no other system has: the other half of the rule that every key says where it comes from."""

from __future__ import annotations

_WORDS = """
prepare print_summary rollout_dump_gib rollout_dump_outputs
kl_top_k ray_init.object_store_memory tracing.enabled tracing.endpoint tracing.episode_share
profiler.activities profiler.max_events profiler.max_traces profiler.ranks profiler.record_shapes profiler.with_stack
adv_estimator_args allow_both_kl allow_uncorrected_async balance_by cosine_length.exceeded cosine_length.right
cosine_length.wrong delta_weight_sync discount_over engine_restarts executor export_model lora_sync loss_type_args
stage_args stages topr_level verify_weight_sync warm_start

custom_envs.<name>.max_actions_per_step custom_envs.<name>.thinking_tags env_workers.max_env_num_per_worker
custom_envs.<name>.env_config.agent custom_envs.<name>.env_config.command custom_envs.<name>.env_config.cwd
custom_envs.<name>.env_config.env custom_envs.<name>.env_config.exit_rewards custom_envs.<name>.env_config.history
custom_envs.<name>.env_config.ignore_fields custom_envs.<name>.env_config.logs
custom_envs.<name>.env_config.max_agents custom_envs.<name>.env_config.max_calls
custom_envs.<name>.env_config.max_tokens custom_envs.<name>.env_config.models.<name>.api_key_env
custom_envs.<name>.env_config.models.<name>.base_url custom_envs.<name>.env_config.models.<name>.model
custom_envs.<name>.env_config.pass_env custom_envs.<name>.env_config.python custom_envs.<name>.env_config.remote
custom_envs.<name>.env_config.reward.name custom_envs.<name>.env_config.reward.reward_kwargs
custom_envs.<name>.env_config.reward.timeout_s custom_envs.<name>.env_config.reward.world_size
custom_envs.<name>.env_config.sandbox custom_envs.<name>.env_config.sandbox_disk_mb
custom_envs.<name>.env_config.sandbox_memory_mb custom_envs.<name>.env_config.sandbox_readable
custom_envs.<name>.env_config.score custom_envs.<name>.env_config.side_calls
custom_envs.<name>.env_config.tasks custom_envs.<name>.env_config.timeout_s
custom_envs.<name>.env_config.tool_parser custom_envs.<name>.env_config.truncated_reward
custom_envs.<name>.role_rewards custom_envs.<name>.roles.<name>.api_key_env
custom_envs.<name>.roles.<name>.endpoint custom_envs.<name>.roles.<name>.model
custom_envs.<name>.roles.<name>.player custom_envs.<name>.roles.<name>.player_config
custom_envs.<name>.roles.<name>.request_args custom_envs.<name>.roles.<name>.request_retries
custom_envs.<name>.roles.<name>.request_timeout_s custom_envs.<name>.swap_roles custom_envs.<name>.tools
gateway.address gateway.call_timeout_s gateway.host gateway.max_body_mb gateway.port gateway.token_env
env_workers.memory_limit_mb env_workers.python env_workers.timeout_s <manager>.generating_args.ignore_eos
<manager>.invalid_action_penalty

interactions.api_key_env interactions.config interactions.endpoint interactions.model interactions.name
interactions.path interactions.prompt interactions.request_args interactions.score_weight interactions.timeout_s
custom_envs.<name>.chat_template_kwargs <role>.chat_template_kwargs
rewards.<name>.chat_template_kwargs
tool_use.thinking_tags tools.concurrency tools.description tools.max_reply_tokens tools.mcp.command tools.mcp.cwd
tools.mcp.env tools.mcp.pass_env tools.mcp.start_timeout_s tools.mcp.token_env tools.mcp.tools tools.mcp.url
tools.name tools.options tools.parameters tools.path tools.timeout_s

reward_env reward_retries rewards.<name>.judge_weight rewards.<name>.parts.<name>.name
rewards.<name>.parts.<name>.reward_kwargs rewards.<name>.parts.<name>.weight rewards.<name>.reward_model_weight
rewards.<name>.reward_models_weights rewards.<name>.rule_weight rewards.<name>.timeout_s


<role>.model_args.freeze_projector
<role>.model_args.recompute_granularity <role>.strategy_args.strategy_config.shard_between_micro_batches
<manager>.generating_args.fire_temperature <manager>.generating_args.fire_top_k <role>.generating_args.fire_top_k
<role>.training_args.end_weight_decay <role>.training_args.muon_adjust_lr_fn <role>.training_args.muon_momentum
<role>.training_args.muon_ns_steps <role>.training_args.wsd_decay_ratio
pipeline <role>.maj_at_k <role>.bootstrap <role>.pass_threshold
<role>.data_args.curriculum.column <role>.data_args.curriculum.min_share
<role>.data_args.curriculum.success_threshold <role>.data_args.curriculum.window <role>.data_args.dataset_args
<role>.data_args.deduplicate <role>.data_args.default_tag <role>.data_args.label
<role>.data_args.max_bad_rows <role>.data_args.procedural.config <role>.data_args.procedural.dataset
<role>.data_args.procedural.example_template <role>.data_args.procedural.few_shot
<role>.data_args.procedural.question_template <role>.data_args.procedural.seed <role>.data_args.procedural.size
<role>.data_args.procedural.tag <role>.data_args.score <role>.data_args.streaming
<role>.strategy_args.strategy_config.bf16 <role>.strategy_args.strategy_config.fp16

<role>.strategy_args.strategy_config.api <role>.strategy_args.strategy_config.api_key_env
<role>.strategy_args.strategy_config.endpoint <role>.strategy_args.strategy_config.max_in_flight
<role>.strategy_args.strategy_config.model <role>.strategy_args.strategy_config.request_args
<role>.strategy_args.strategy_config.request_retries <role>.strategy_args.strategy_config.request_timeout_s
<role>.strategy_args.strategy_config.retry_delay_s

<role>.cache_file <role>.cache_size <role>.input_cost <role>.label <role>.max_in_flight <role>.normalize
<role>.output_cost <role>.request_args <role>.request_retries <role>.request_timeout_s <role>.requests_per_minute
<role>.retry_delay_s <role>.score_format <role>.score_max <role>.score_min <role>.score_pattern
<role>.system_prompt <role>.tags <role>.tokens_per_minute <role>.truncation <role>.unparsed_score
"""

ONLY_HERE: frozenset[str] = frozenset(_WORDS.split())
"""Places, canonical (`tables.canonical`): `<role>` for every role, `<manager>` for both managers of environments."""
