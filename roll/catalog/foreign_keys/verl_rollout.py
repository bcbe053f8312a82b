"""Keys of verl about generation: `actor_rollout_ref.rollout`."""

from __future__ import annotations

from roll.catalog.foreign_keys.rows import ForeignKey, absent, dead, decided, moved

_R = "actor_rollout_ref.rollout"
_GEN, _VAL = "actor_infer.generating_args", "validation.generating_args"
_CONFIG = "actor_infer.strategy_args.strategy_config"
_AGENTIC = "name a domain's tools, or play environments (pipeline: agentic), or write a rollout of your own"

SAMPLING: list[ForeignKey] = [
    moved(f"{_R}.n", "num_return_sequences_in_group", default=1),
    moved(f"{_R}.temperature", f"{_GEN}.temperature"),
    decided(f"{_R}.top_p", f"{_GEN}.top_p", "off in training, whose log-probs are those of the full distribution",
            how="truncation"),
    decided(f"{_R}.top_k", f"{_GEN}.top_k", "off in training, whose log-probs are those of the full distribution",
            how="truncation"),
    decided(f"{_R}.repetition_penalty", f"{_GEN}.repetition_penalty", "off in training", how="truncation"),
    moved(f"{_R}.do_sample", f"{_GEN}.do_sample", "training samples", how="sampled"),
    moved(f"{_R}.ignore_eos", f"{_GEN}.ignore_eos"),
    moved(f"{_R}.stop", f"{_GEN}.stop_strings", how="stops"),
    moved(f"{_R}.prompt_length", "prompt_length", how="if_free"),
    moved(f"{_R}.response_length", "response_length", how="if_free"),
    *(moved(f"{_R}.val_kwargs.{key}", f"{_VAL}.{key}") for key in ("top_p", "repetition_penalty")),
    moved(f"{_R}.val_kwargs.top_k", f"{_VAL}.top_k"),
    moved(f"{_R}.val_kwargs.temperature", f"{_VAL}.temperature", default=0),
    moved(f"{_R}.val_kwargs.n", f"{_VAL}.num_return_sequences"),
    moved(f"{_R}.val_kwargs.do_sample", f"{_VAL}.do_sample"),
    moved(f"{_R}.use_fire_sampling", f"{_GEN}.fire_temperature", "fire_temperature: 30 for true, with fire_top_k",
          how="fire"),
    *absent("val_kwargs.**", "validation samples by generating_args", _R, see=_VAL),
]  # fmt: skip
"""How responses are sampled."""

ENGINE: list[ForeignKey] = [
    moved(f"{_R}.name", "actor_infer.strategy_args.strategy_name", values={"hf": "hf_infer", "vllm": "vllm",
          "sglang": "sglang", "sglang_async": "sglang", "vllm_async": "vllm"}, how="engine", default="vllm"),
    moved(f"{_R}.tensor_model_parallel_size", f"{_CONFIG}.tensor_parallel_size actor_infer.num_gpus_per_worker",
          how="engine_tp", default=2),
    moved(f"{_R}.pipeline_model_parallel_size", f"{_CONFIG}.pipeline_parallel_size", how="engine_pp"),
    moved(f"{_R}.gpu_memory_utilization", f"{_CONFIG}.gpu_memory_utilization {_CONFIG}.mem_fraction_static",
          "an option of vllm; with sglang it is mem_fraction_static", how="engine_memory", default=0.5),
    *(moved(f"{_R}.{key}", f"{_CONFIG}.{key}", how="vllm_option")
      for key in ("max_model_len", "max_num_batched_tokens", "enable_prefix_caching", "enforce_eager",
                  "enable_chunked_prefill", "quantization", "block_size", "swap_space", "cudagraph_capture_sizes")),
    moved(f"{_R}.max_num_seqs", "max_running_requests", "requests that one engine works on at once",
          how="max_num_seqs"),
    moved(f"{_R}.dtype", "actor_infer.model_args.dtype", how="dtype", default="bfloat16"),
    decided(f"{_R}.load_format", f"{_CONFIG}.load_format", "dummy: the first update from the trainer fills the weights",
            how="load_format"),
    decided(f"{_R}.free_cache_engine", f"{_CONFIG}.sleep_level", "true is null, which takes the level that fits how "
            "weights are sent; false is 0", how="sleep"),
    moved(f"{_R}.engine_kwargs.vllm.**", _CONFIG, how="engine_kwargs"),
    moved(f"{_R}.engine_kwargs.sglang.**", _CONFIG, how="engine_kwargs"),
    moved(f"{_R}.engine_kwargs.**", _CONFIG, how="engine_kwargs"),
    decided(f"{_R}.data_parallel_size", "actor_infer.device_mapping", "a rank of actor_infer is one engine: it has as "
            "many as its devices hold", how="nothing"),
    moved(f"{_R}.expert_parallel_size", f"{_CONFIG}.enable_expert_parallel", "above 1 is enable_expert_parallel",
          how="engine_ep"),
    moved(f"{_R}.update_weights_bucket_megabytes", "model_update_buffer_size_mb"),
    moved(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes", "model_update_buffer_size_mb", how="if_free"),
    *dead("checkpoint_engine.**", "weight_transport says how weights travel", _R, see="weight_transport"),
    *dead("log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size log_prob_use_dynamic_bsz "
          "log_prob_max_token_len_per_gpu", "old log-probs come from the actor in passes of its own infer_batch_size",
          _R, see="actor_train.infer_batch_size actor_train.use_dynamic_batching_in_infer "
          "actor_train.max_tokens_per_microbatch_in_infer"),
    *dead("disable_log_stats logprobs_mode skip_tokenizer_init scheduling_policy seed full_determinism nnodes "
          "n_gpus_per_node layered_summon multi_stage_wake_up over_sample_rate layer_name_map.** "
          "use_block_quant_rollout moe_load_balance_metrics_interval "
          "skip_dump_dir", "the run sees to it", _R),
    *dead("enable_rollout_routing_replay", "router_replay asks the engine for it", _R, see="router_replay"),
    *dead("calculate_log_probs", "log-probs of sampled tokens are always kept", _R, see="train_infer_correction"),
    *dead("mode", "engines take one request after the other, as they come", _R, see="max_running_requests"),
    *dead("chat_scheduler completion_callback", "a rollout of your own plays a domain", _R,
          see="rewards.<name>.rollout"),
    *absent("skip_rollout skip.**", "responses aren't taken from files without their rewards; replay_from trains on "
            "what a run has recorded", _R, see="replay_from rollout_dump_dir"),
    *absent("trace.** prometheus.**", "metrics go to trackers", _R, see="track_with"),
    *dead("profiler.** profiler", "profile_steps says when, profiler what, for all roles", _R,
          see="profile_steps profiler.tools"),
    decided(f"{_R}.multi_turn.enable", "rewards.<name>.tools", _AGENTIC, how="false_is_none"),
    *absent("multi_turn.tool_config_path", "tools are listed in the configuration itself", _R,
            see="tools rewards.<name>.tools"),
    *absent("multi_turn.interaction_config_path", "simulated users are listed in the configuration itself; their "
            "classes are taken as they are", _R, see="interactions rewards.<name>.interaction"),
    *absent("multi_turn.max_assistant_turns multi_turn.max_user_turns", "with tools, responses are counted", _R,
            see="tool_use.max_turns"),
    *absent("multi_turn.max_parallel_calls", "with tools", _R, see="tool_use.max_parallel_calls"),
    *absent("multi_turn.max_tool_response_length", "each tool's replies are counted in tokens", _R, see="tools"),
    *absent("multi_turn.tool_response_truncate_side", "with tools", _R, see="tool_use.cut_replies"),
    *absent("multi_turn.format", "read off the chat template, if not said otherwise", _R, see="tool_use.parser"),
    *dead("agent.num_workers agent.default_agent_loop agent.custom_async_server.**", "the run sees to it", _R,
          see="max_running_requests"),
    *absent("multi_turn.** agent.**", _AGENTIC, _R,
            see="tools rewards.<name>.tools custom_envs rewards.<name>.rollout"),
    *dead("actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout", "roles that name the same slots share them",
          see="actor_infer.device_mapping"),
    *absent("**", "the engine has no such option here", _R, see=_CONFIG),
]  # fmt: skip
"""The engine."""
